"""At stage 3 backward gathers one unit ahead, whatever the way through the model; only the first one is waited for."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hf_zero
from hf_zero.core.flat_buffer import FlatBuffer
from hf_zero.core.unit import Unit, UnitState
from tests.support.harness import distributed
from tests.support.nets import seeded


WIDTH, DEPTH = 8, 6
LAYER = WIDTH * WIDTH + WIDTH


class Net(nn.Module):
    """An embedding, layers and a head, that make a loss."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, 32)

    def call(self, number, x):
        return torch.tanh(self.layers[number](x))

    def body(self, ids):
        x = self.embed(ids)
        for number in range(DEPTH):
            x = self.call(number, x)
        return x

    def forward(self, ids):
        return F.cross_entropy(self.head(self.body(ids)).flatten(0, 1), ids.flatten())


class Checkpointed(Net):
    def __init__(self, reentrant, span):
        super().__init__()
        self.reentrant, self.span = reentrant, span

    def body(self, ids):
        x = self.embed(ids)
        for first in range(0, DEPTH, self.span):
            x = checkpoint(self.part, first, x, use_reentrant=self.reentrant)
        return x

    def part(self, first, x):
        for number in range(first, first + self.span):
            x = self.call(number, x)
        return x


class Talkative(Net):
    """Its output holds what the layers made; hooks of the model's output then fire between those of the layers."""

    def forward(self, ids):
        states = [self.embed(ids)]
        for number in range(DEPTH):
            states.append(self.call(number, states[-1]))
        return self.head(states[-1]).square().mean(), states


class Outputs(Net):
    def forward(self, ids):
        return self.head(self.body(ids))


def by_itself(model, ids):
    return model(ids)


def with_its_states(model, ids):
    loss, states = model(ids)
    return loss + sum(state.square().mean() for state in states)


def of_the_body(model, ids):
    """The model itself is not called."""
    return model.head(model.body(ids)).square().mean()


def of_two_forwards(model, ids):
    return F.mse_loss(model(ids), model(ids.flip(0)) * 0.5)


def prepare(make, **config):
    model = seeded(make)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, hf_zero.shard(model, optimizer, {"zero_stage": 3, **config})


IDS = torch.arange(32).view(4, 8)


def step(model, optimizer, engine, loss):
    """One step; the gathers that forward and backward had to wait for without having begun them before."""
    waited = []
    unshard = Unit.unshard

    def look(unit):
        if unit.state is UnitState.RESTING:
            waited.append(unit.name)
        unshard(unit)

    Unit.unshard = look
    try:
        value = loss(model, IDS)
        in_forward = waited[:]
        engine.backward(value)
    finally:
        Unit.unshard = unshard
    optimizer.step()
    optimizer.zero_grad()
    return in_forward, waited[len(in_forward) :]


@pytest.mark.parametrize(
    "make, loss, passes",
    [
        (Net, by_itself, 1),
        (Talkative, with_its_states, 1),
        (functools.partial(Checkpointed, False, 1), by_itself, 1),
        (functools.partial(Checkpointed, True, 1), by_itself, 1),
        (Net, of_the_body, 1),
        (Outputs, of_two_forwards, 2),
    ],
    ids=["plain", "hidden states", "checkpointed", "reentrant", "called directly", "two forwards"],
)
@distributed(world_size=2)
def test_every_gather_of_backward_was_begun_before(make, loss, passes):
    model, optimizer, engine = prepare(make)
    for _ in range(2):
        step(model, optimizer, engine, loss)
    engine.comm.traffic.clear()
    in_forward, in_backward = step(model, optimizer, engine, loss)
    assert len(in_forward) <= passes and len(in_backward) <= passes - 1, (in_forward, in_backward)
    # Nothing is gathered for nothing: all units in forward, and in backward all but the embedding and the head (kept).
    assert engine.comm.traffic.calls["all_gather"] == passes * (2 * DEPTH + 2), engine.comm.traffic.calls


@pytest.mark.parametrize("reentrant", [False, True])
@distributed(world_size=2)
def test_what_is_recomputed_together_is_gathered_ahead(reentrant):
    model, optimizer, engine = prepare(functools.partial(Checkpointed, reentrant, 3))
    for _ in range(2):
        step(model, optimizer, engine, by_itself)
    engine.comm.traffic.clear()
    _, in_backward = step(model, optimizer, engine, by_itself)
    assert in_backward == ["layers.3", "layers.0"], in_backward  # where recomputation begins cannot be foreseen
    assert engine.comm.traffic.calls["all_gather"] == 2 * DEPTH + 2, engine.comm.traffic.calls


@pytest.mark.parametrize(
    "config, expected",
    [
        ({}, [2, 2, 2, 2, 2, 1]),
        ({"stage3_max_live_parameters": 1}, [2, 2, 2, 2, 2, 1]),
        ({"overlap_comm": False}, [1, 1, 1, 1, 1, 1]),
        ({"stage3_prefetch_bucket_size": 0}, [1, 1, 1, 1, 1, 1]),
        ({"stage3_prefetch_bucket_size": 3 * LAYER}, [4, 4, 4, 3, 2, 1]),
        ({"stage3_prefetch_bucket_size": 3 * LAYER, "stage3_max_live_parameters": 3 * LAYER}, [3, 3, 3, 3, 2, 1]),
    ],
)
@distributed(world_size=2)
def test_units_unsharded_in_backward(config, expected):
    """At the end of each layer's backward, the last layer first. One unit ahead is gathered whatever the limit."""
    model, optimizer, engine = prepare(Net, **config)
    step(model, optimizer, engine, by_itself)
    loss = model(IDS)
    seen = []
    for layer in model.layers:
        layer.weight.register_hook(
            lambda grad: seen.append(sum(unit.state is not UnitState.RESTING for unit in engine.units))
        )
    engine.backward(loss)
    assert seen == expected, seen


@pytest.mark.parametrize("config", [{}, {"stage3_max_live_parameters": 1}])
@distributed(world_size=2)
def test_one_unit_ahead_is_gathered_in_forward_whatever_the_limit(config):
    model, optimizer, engine = prepare(Net, **config)
    for _ in range(2):
        step(model, optimizer, engine, by_itself)
    in_forward, _ = step(model, optimizer, engine, by_itself)
    assert in_forward == [], in_forward


# ------------------------------------------------------------------------------------------- memory


@distributed(world_size=2)
def test_what_is_counted_as_unsharded_is():
    model, optimizer, engine = prepare(functools.partial(Checkpointed, True, 1))
    counted = engine.schedule._unsharded

    def check(when):
        expected = sum(unit.numel for unit in engine.units if unit.state is not UnitState.RESTING)
        assert counted.numel == expected, f"{when}: {counted.numel} instead of {expected}"

    for module in model.modules():
        module.register_forward_hook(lambda module, args, out: check("in forward"))
    for number in range(3):
        step(model, optimizer, engine, by_itself)
        check("after a step")
        with torch.no_grad():
            model(IDS)
        assert model.layers[2].weight.isfinite().all()
        check("after a read")
        with hf_zero.gathered_parameters(model.layers):
            check("in a scope")
        model.layers[number].requires_grad_(number > 0)
        check("after freezing")
    step(model, optimizer, engine, of_the_body)
    assert counted.numel == 0


@distributed(world_size=2)
def test_a_gather_without_memory_for_all_buffers_is_not_begun():
    """A unit of two buffers: the try that failed and the next one make as many collectives as the other ranks do."""
    model = seeded(Net)()
    model.layers[0].bias.requires_grad_(False)
    engine = hf_zero.shard(model, None, {"zero_stage": 3})
    unit = hf_zero.core.guard.owner_of(model.layers[0].weight)
    assert len(unit.buffers) == 2
    allocate = FlatBuffer.allocate

    def fail(buffer):
        if buffer is unit.buffers[1]:
            raise torch.OutOfMemoryError("no room")
        allocate(buffer)

    FlatBuffer.allocate = fail
    with pytest.raises(torch.OutOfMemoryError):
        unit.unshard()
    FlatBuffer.allocate = allocate
    assert not engine.comm.traffic.calls["all_gather"], engine.comm.traffic.calls
    assert [buffer.unsharded.untyped_storage().nbytes() for buffer in unit.buffers] == [0, 0]
    assert engine.schedule._unsharded.numel == 0
    unit.unshard()
    assert engine.comm.traffic.calls["all_gather"] == 2, engine.comm.traffic.calls
    assert model.layers[0].weight.isfinite().all()
