"""One rank, whose slice is the whole: weights are released between uses, and 16-bit gradients go as they are."""

import contextlib

import pytest
import torch

import hf_zero
from hf_zero.core.engine import ZeroEngine
from hf_zero.core.placement import Place
from hf_zero.core.unit import UnitState
from hf_zero.planning.model import BatchShape
from hf_zero.planning.places import Places
from hf_zero.planning.trace import Scenario, trace
from tests.ranks.test_memory import batch, build
from tests.support.harness import distributed
from tests.support.late_lanes import late_homes


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


def _crossing(precision, accumulation, homes):
    """Losses and weights, and the bytes that a step moves between host and device."""
    model = build(hidden=64)
    config = hf_zero.ZeroConfig(zero_stage=2, mixed_precision=precision, initial_scale_power=12)
    engine = ZeroEngine(model, config, homes=homes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.attach_optimizer(optimizer)
    seen, copied = [], []
    for _ in range(3):
        for micro in range(accumulation):
            loss = model(**batch(model)).loss
            with contextlib.nullcontext() if micro == accumulation - 1 else engine.no_sync():
                engine.backward(loss)
            seen.append(loss.item())
        seen.append(engine.clip_grad_norm_(0.1).item())
        optimizer.step()
        optimizer.zero_grad()
        copied.append(dict(engine.homes.host.courier.moved))
    with hf_zero.gathered_parameters(model):
        weights = [param.detach().clone() for param in model.parameters()]
    return seen, weights, {way: copied[2][way] - copied[1][way] for way in copied[2]}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@distributed(world_size=1)
def test_16_bit_gradients_of_one_micro_batch_go_down_in_16_bits(precision, accumulation):
    wanted, others, _ = _crossing(precision, accumulation, None)
    losses, weights, moved = _crossing(precision, accumulation, late_homes(Place.DEVICE))
    assert losses == wanted and all(map(torch.equal, weights, others))
    numel = sum(weight.numel() for weight in weights)
    # A sum of two micro-batches has more bits. Padding of parameters goes along.
    assert 0 <= moved["down"] / numel - (2 if accumulation == 1 else 4) < 0.05, (moved, numel)
    assert 2 <= moved["up"] / numel < 2.05, (moved, numel)
    config = hf_zero.ZeroConfig(zero_stage=2, mixed_precision=precision, **Places(optimizer=Place.HOST).options())
    with torch.device("meta"):
        model = build(hidden=64)
    shape = BatchShape(rows=2, length=8)
    plan = trace(model, Scenario(config=config, world_size=1, batch=shape, accumulation=accumulation))
    assert plan.pcie_bytes == moved["down"] + moved["up"]


@distributed(world_size=1)
def test_what_is_written_to_a_gradient_is_not_rounded_to_16_bits():
    """Inside `no_sync`, where a gradient is what autograd has made of it."""
    found = []
    for homes in (None, late_homes(Place.DEVICE)):
        model = build(hidden=32)
        engine = ZeroEngine(model, hf_zero.ZeroConfig(zero_stage=2, mixed_precision="bf16"), homes=homes)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine.attach_optimizer(optimizer)
        with engine.no_sync():
            engine.backward(model(**batch(model)).loss)
            wanted = [param.grad.clone() / 3 for param in model.parameters()]
            for param in model.parameters():
                param.grad.div_(3)
        engine.schedule.reduce_all()
        assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), wanted, strict=True))
        found.append(wanted)
    assert all(map(torch.equal, *found))
