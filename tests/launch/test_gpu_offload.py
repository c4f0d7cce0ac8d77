"""What only a GPU can show of offload: the same training, copies that come late, memory that is pinned once."""

import pytest
import torch

import hf_zero
from hf_zero.core.courier import CudaLanes
from hf_zero.core.engine import engine_of
from tests.support.harness import distributed


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

DEVICE = torch.device("cuda", 0)
HOST = {"offload_optimizer_device": "cpu", "offload_step": "host"}
BOTH = {**HOST, "offload_param_device": "cpu"}


def _train(stage, precision, steps=4, **config):
    """Several gloo ranks share one GPU. Losses, weights, and the engine."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = hf_zero.shard(
        model, optimizer, {"zero_stage": stage, "mixed_precision": precision, **config}, device=DEVICE
    )
    losses = []
    for step in range(2 * steps):
        generator = torch.Generator().manual_seed(10 * step + engine.comm.rank)
        ids = torch.randint(0, 256, (4, 32), generator=generator).to(DEVICE)
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        if step % 2 == 0:
            with engine.no_sync():
                engine.backward(loss)
            continue
        engine.backward(loss)
        engine.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    with hf_zero.gathered_parameters(model):
        return losses, torch.cat([p.detach().float().flatten().cpu() for p in model.parameters()]), model


def _close(found, wanted, precision):
    # The host's kernels round elsewhere than the device's.
    assert found[0] == pytest.approx(wanted[0], rel=1e-5 if precision == "no" else 1e-2)
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=1e-5 if precision == "no" else 1e-3)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("stage, config", [(1, HOST), (2, HOST), (3, HOST), (3, BOTH)])
@distributed(world_size=2)
def test_offload_trains_as_without(stage, config, precision):
    found = _train(stage, precision, **config)
    _close(found, _train(stage, precision), precision)
    weights = [shard.weight for buffer in engine_of(found[2]).buffers for shard in buffer.master_shards]
    assert weights and all(weight.device.type == "cpu" for weight in weights)


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_what_the_device_steps_has_the_same_bits(stage):
    found = _train(stage, "bf16", **{**HOST, "offload_step": "device"})
    wanted = _train(stage, "bf16")
    assert found[0] == wanted[0] and torch.equal(found[1], wanted[1])


@distributed(world_size=2)
def test_state_on_disk_trains_as_without(tmp_path):
    places = {f"offload_{kind}_nvme_path": str(tmp_path) for kind in ("optimizer", "param")}
    found = _train(3, "bf16", offload_optimizer_device="nvme", offload_param_device="nvme", **places)
    _close(found, _train(3, "bf16"), "bf16")


@pytest.mark.parametrize("late", ["_down", "_up", "compute"])
@distributed(world_size=2)
def test_a_slow_stream_changes_nothing(late):
    expected = _train(3, "no", **BOTH)
    copy = CudaLanes._copy

    def slow(lanes, stream, target, source):
        with torch.cuda.stream(torch.cuda.current_stream() if late == "compute" else getattr(lanes, late)):
            torch.cuda._sleep(5_000_000)
        return copy(lanes, stream, target, source)

    CudaLanes._copy = slow
    found = _train(3, "no", **BOTH)
    assert found[0] == expected[0] and torch.equal(found[1], expected[1])


def test_buffers_are_pinned_once_and_given_back():
    lanes = CudaLanes(DEVICE)
    memory = lanes.memory(1 << 20)
    assert memory.is_pinned() and memory.numel() == 1 << 20
    source = torch.arange(1 << 18, dtype=torch.float32, device=DEVICE)
    target = memory.view(torch.float32)
    lanes.down(target, source).wait()
    assert torch.equal(target, source.cpu())
    back = torch.zeros_like(source)
    lanes.up(back, target)
    lanes.join()
    assert torch.equal(back, source)
    lanes.close()
    lanes.close()
    assert not memory.is_pinned()


@distributed(world_size=2)
def test_a_step_moves_gradients_down_and_weights_up():
    _, _, model = _train(3, "bf16", **HOST)
    engine = engine_of(model)
    owned = sum(shard.numel for buffer in engine.buffers for shard in buffer.master_shards)
    moved = engine.homes.host.courier.moved
    assert moved["down"] == 8 * 4 * owned and moved["up"] >= 4 * 2 * owned, (moved, owned)
