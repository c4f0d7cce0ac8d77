"""The gradient norm is that of all ranks, lies where the ranks can exchange it, and hides no nan."""

import math

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.core import grad_norm
from tests.support.harness import distributed


class Recorder:
    """Stands for a communicator, and notes on which device it is asked to agree."""

    def __init__(self):
        self.devices = []

    def all_reduce_scalars(self, values, largest=False):
        self.devices.append(values.device.type)
        return values


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_the_norm_of_no_gradients_is_on_the_engines_device(norm_type):
    """NCCL takes nothing of the host's memory; gloo takes anything, so that runs on it show nothing."""
    comm = Recorder()
    norm = grad_norm.global_norm([], comm, True, norm_type, device=torch.device("meta"))
    assert comm.devices == ["meta"] and norm.device.type == "meta"


def prepared(stage, **config):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, hf_zero.shard(model, optimizer, {"zero_stage": stage, **config})


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=2)
def test_it_is_torchs_norm(stage, norm_type):
    model, optimizer, engine = prepared(stage)
    twin = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    with hf_zero.gathered_parameters(model):
        twin.load_state_dict(model.state_dict())
    x = torch.randn(2, 4, 8)  # of both ranks
    engine.backward(model(x[dist.get_rank()]).square().mean())
    (sum(twin(part).square().mean() for part in x) / 2).backward()
    wanted = torch.nn.utils.clip_grad_norm_(twin.parameters(), math.inf, norm_type)
    torch.testing.assert_close(engine.clip_grad_norm_(math.inf, norm_type), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@distributed(world_size=2)
def test_what_is_not_finite_in_any_ranks_part_is_seen(norm_type, bad):
    for rank in range(2):
        model, optimizer, engine = prepared(3)
        engine.backward(model(torch.ones(2, 8)).sum())
        if dist.get_rank() == rank:
            engine.masters[0].grad[0] = bad
        norm = engine.clip_grad_norm_(math.inf, norm_type).item()
        assert norm == bad or (norm != norm and bad != bad), f"rank {rank} has {bad}, the norm is {norm}"


@distributed(world_size=2)
def test_a_nan_under_the_infinity_norm_skips_the_step():
    for rank in range(2):
        model, optimizer, engine = prepared(2, mixed_precision="bf16")
        before = torch.cat([master.detach().clone() for master in engine.masters])
        engine.backward(model(torch.ones(2, 8)).float().sum())
        if dist.get_rank() == rank:
            engine.masters[0].grad[0] = math.nan
        engine.clip_grad_norm_(1.0, math.inf)
        optimizer.step()
        assert engine.step_was_skipped, f"rank {rank} had nan"
        assert torch.equal(torch.cat([master.detach() for master in engine.masters]), before)
