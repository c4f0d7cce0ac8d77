"""What only a GPU can show: the same numbers there, no use of released storage, no reliance on timing."""

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.comm.communicator import Communicator
from hf_zero.comm.transport.nccl import Nccl
from hf_zero.comm.work import Landing
from hf_zero.core.flat_buffer import FlatBuffer
from tests.support.harness import distributed


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def build(precision="no"):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def train(stage, precision="no", checkpointing=False, steps=3):
    """Several gloo ranks share one GPU; messages pass through the host."""
    device = torch.device("cuda", 0)
    model = build().to(device)
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine = hf_zero.shard(model, optimizer, {"zero_stage": stage, "mixed_precision": precision}, device=device)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + engine.comm.rank)
        ids = torch.randint(0, 256, (4, 32), generator=generator).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with hf_zero.gathered_parameters(model):
        return losses, torch.cat([p.detach().float().flatten().cpu() for p in model.parameters()])


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_stages_agree(stage, precision):
    losses, weights = train(stage, precision)
    expected_losses, expected = train(0, precision)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6 if precision == "no" else 1e-3)


@pytest.mark.parametrize("checkpointing", [False, True])
@distributed(world_size=2)
def test_released_storage_is_not_read(checkpointing):
    expected = train(3, checkpointing=checkpointing)[1]
    release = FlatBuffer.release

    def poison(buffer):
        if buffer.unsharded.untyped_storage().nbytes():
            buffer.unsharded.fill_(float("nan"))
        release(buffer)

    FlatBuffer.release = poison
    weights = train(3, checkpointing=checkpointing)[1]
    assert torch.equal(weights, expected), "a value was read after its release"


@pytest.mark.parametrize("move", ["all_gather", "reduce_scatter"])
@distributed(world_size=2)
def test_a_slow_device_changes_nothing(move):
    expected = train(3)[1]
    original = getattr(Communicator, move)

    def slow(comm, *args):
        torch.cuda._sleep(2_000_000)
        pending = original(comm, *args)
        torch.cuda._sleep(2_000_000)
        return pending

    setattr(Communicator, move, slow)
    assert torch.equal(train(3)[1], expected)


class Late(Nccl):
    """NCCL whose streams are busy with something else first, and whose results are poison until they are there."""

    def __init__(self, group):
        super().__init__(group)
        self._other_work = torch.empty(64 * 2**20, device=self.device)

    def _keep_busy(self, group):
        dist.all_reduce(self._other_work, group=group, async_op=True)

    def gather(self, flat, tag, shard):
        self._keep_busy(self.group)
        sent = flat.clone()
        flat.fill_(float("nan"))
        handle = dist.all_gather_into_tensor(flat, sent, group=self.group, async_op=True)
        return Landing([handle], lambda sent=sent: None)

    def reduce_scatter(self, flat, out, tag):
        self._keep_busy(self.reduce_group)
        out.fill_(float("nan"))
        return super().reduce_scatter(flat, out, tag)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("transport", [Nccl, Late])
def test_nccl_with_one_process(transport, stage, tmp_path, monkeypatch):
    """One rank is enough for NCCL to run collectives on its own streams, if they are issued."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    release = FlatBuffer.release

    def poison(buffer):
        if buffer.unsharded.untyped_storage().nbytes():
            buffer.unsharded.fill_(float("nan"))
        release(buffer)

    monkeypatch.setattr(FlatBuffer, "release", poison)
    try:
        device = torch.device("cuda", 0)
        ours, stock = build().to(device), build().to(device)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (ours, stock)]
        comm = Communicator(transport(dist.group.WORLD))
        engine = hf_zero.shard(ours, optimizers[0], {"zero_stage": stage}, group=comm, device=device)
        for step in range(3):
            ids = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(step)).to(device)
            for model, backward in ((ours, engine.backward), (stock, torch.Tensor.backward)):
                backward(model(input_ids=ids, labels=ids).loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert comm.traffic.calls["all_gather"] and comm.traffic.calls["reduce_scatter"], "NCCL was not called"
        with hf_zero.gathered_parameters(ours):
            for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    finally:
        dist.destroy_process_group()
