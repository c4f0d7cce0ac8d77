"""Preparing a model takes rank 0's weights over, and writes each byte once that stays: counted, on every rank."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import hf_zero
from hf_zero.core.engine import engine_of
from tests.ranks.test_memory import batch, build, live_bytes
from tests.support.harness import distributed


# Operations that fill memory; those that fill a view, too.
FILLS = ("copy_", "zero_", "zeros", "fill_", "clone", "_to_copy", "cat", "full", "_foreach_copy_")


class Filled(TorchDispatchMode):
    """Adds up the bytes of tensors that operations fill; what optimizers are tried out on is mostly smaller."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in FILLS and isinstance(out, torch.Tensor) and out.nbytes > 1 << 16:
            self.nbytes += out.nbytes
        return out


def groups_of(model):
    decayed = [param for param in model.parameters() if param.dim() > 1]
    return [{"params": decayed}, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_every_byte_that_stays_is_written_once(stage):
    model = build(hidden=512, vocab=2048)
    expected = [param.detach().clone() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.add_(dist.get_rank())
    whole = sum(param.nbytes for param in model.parameters())
    stays = whole // 2 if stage == 3 else whole
    before = live_bytes()
    with Filled() as filled:
        hf_zero.shard(model, torch.optim.AdamW(groups_of(model)), {"zero_stage": stage})
    traffic = engine_of(model).comm.traffic
    # Rank 0 copies, the others read out of its memory; nobody clears memory, or copies a master.
    written = filled.nbytes if dist.get_rank() == 0 else traffic.bytes_sent["deal"]
    assert stays * 0.98 < written < stays * 1.05, (written, stays)
    if dist.get_rank() == 1:
        assert filled.nbytes < 0.05 * stays, (filled.nbytes, stays)
    assert traffic.bytes_sent["broadcast"] < 1000, traffic.bytes_sent
    assert live_bytes() - before < stays * 1.05 - whole, (live_bytes(), before, stays, whole)
    for param, value in zip(model.parameters(), expected, strict=True):
        with hf_zero.gathered_parameters([param]):
            assert torch.equal(param, value), "rank 0's values"


@distributed(world_size=2)
def test_the_values_by_messages():
    """Where ranks cannot read each other's memory, they are rank 0's as well."""
    for stage in (2, 3):
        torch.manual_seed(dist.get_rank())
        model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Linear(65, 7))
        expected = [param.detach().clone() for param in model.parameters()]
        for value in expected:
            dist.broadcast(value, 0)
        hf_zero.shard(model, torch.optim.SGD(model.parameters(), 0.1), {"zero_stage": stage, "peer_memory": False})
        with hf_zero.gathered_parameters(list(model.parameters())):
            for param, value in zip(model.parameters(), expected, strict=True):
                assert torch.equal(param, value), stage


@distributed(world_size=2)
def test_states_are_read_into_memory_that_nothing_has_cleared(tmp_path):
    def prepared():
        model = build(hidden=512, vocab=2048)
        optimizer = torch.optim.AdamW(groups_of(model))
        return model, optimizer, hf_zero.shard(model, optimizer, {"zero_stage": 3})

    model, optimizer, engine = prepared()
    engine.backward(model(**batch(model)).loss)
    optimizer.step()
    engine.save_checkpoint(tmp_path / "saved")
    whole = sum(param.numel() * param.itemsize for param in model.parameters())
    again, loaded, other = prepared()
    with Filled() as filled:
        other.load_checkpoint(tmp_path / "saved")
    assert filled.nbytes < 0.1 * whole, (filled.nbytes, whole)
    for mine, theirs in zip(loaded.param_groups, optimizer.param_groups, strict=True):
        for weight, expected in zip(mine["params"], theirs["params"], strict=True):
            for kind, value in optimizer.state[expected].items():
                assert torch.equal(loaded.state[weight][kind], value), kind
