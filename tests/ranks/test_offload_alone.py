"""One rank, whose slice is the whole, releases its weights between uses where they are to rest elsewhere."""

import pytest
import torch

import hf_zero
from hf_zero.core.unit import UnitState
from tests.ranks.test_memory import batch, build
from tests.support.harness import distributed


def _train(**config):
    model = build(hidden=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = hf_zero.shard(model, optimizer, {"zero_stage": 3, **config})
    losses = []
    for _ in range(4):
        loss = model(**batch(model)).loss
        engine.backward(loss)
        losses.append(loss.item())
        engine.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    resting = {unit.state for unit in engine.units}
    with hf_zero.gathered_parameters(model):
        return losses, [param.detach().clone() for param in model.parameters()], resting


PLACES = {
    "weights on the host": {"offload_param_device": "cpu"},
    "all on the host": {"offload_param_device": "cpu", "offload_optimizer_device": "cpu"},
}


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("place", PLACES)
@distributed(world_size=1)
def test_one_rank_trains_with_released_weights(place, precision):
    losses, weights, resting = _train(mixed_precision=precision, **PLACES[place])
    wanted, others, whole = _train(mixed_precision=precision)
    assert losses == wanted and all(map(torch.equal, weights, others))
    assert resting == {UnitState.RESTING} and UnitState.RESTING not in whole


@pytest.mark.parametrize("place", ["none", "cpu"])
@distributed(world_size=1)
def test_the_optimizer_on_the_host_needs_no_other_ranks(place):
    losses, weights, _ = _train(offload_optimizer_device="cpu", offload_param_device=place)
    wanted, others, _ = _train()
    assert losses == wanted and all(map(torch.equal, weights, others))
