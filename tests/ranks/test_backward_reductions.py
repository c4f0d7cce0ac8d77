"""In backward a unit is reduced when backward has left it behind: complete or not, at one moment on all ranks."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hf_zero
from hf_zero.core.gradients import GradientBuffer
from hf_zero.core.unit import Unit, UnitState
from tests.support.harness import distributed
from tests.support.nets import seeded


WIDTH, DEPTH = 8, 8
BLOCK = 4 * 4 * 64  # bytes of a block's gradients: four parameters of 64 elements at most, padded to as many
WAITING = BLOCK // 3  # the most that waits to be copied into them


class Block(nn.Module):
    """Two matrices, the second of which not every call uses."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, use):
        x = x + torch.tanh(self.always(x))
        return x + torch.tanh(self.expert(x)) if use else x


class Net(nn.Module):
    """Blocks alone; `idle` says which of them leave their expert out."""

    def __init__(self, depth=DEPTH, idle=()):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(depth)])
        self.idle = [number % depth for number in idle]

    def call(self, number, x):
        return self.layers[number](x, number not in self.idle)

    def forward(self, x):
        for number in range(len(self.layers)):
            x = self.call(number, x)
        return x.square().mean()


class Checkpointed(Net):
    """Blocks that are called again in backward, `span` at a time."""

    def __init__(self, reentrant, span, **options):
        super().__init__(**options)
        self.reentrant, self.span = reentrant, span

    def forward(self, x):
        for first in range(0, len(self.layers), self.span):
            x = checkpoint(self.part, first, x, use_reentrant=self.reentrant)
        return x.square().mean()

    def part(self, first, x):
        for number in range(first, min(first + self.span, len(self.layers))):
            x = self.call(number, x)
        return x


class Repeated(Net):
    """Every block is called twice, the second time in the opposite order."""

    def forward(self, x):
        for number in [*range(len(self.layers)), *reversed(range(len(self.layers)))]:
            x = self.call(number, x)
        return x.square().mean()


def prepare(make, **config):
    model = seeded(make)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, hf_zero.shard(model, optimizer, config)


def inputs(step):
    draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(2, WIDTH, generator=draw).requires_grad_()


def train(model, optimizer, engine, steps=3):
    for step in range(steps):
        engine.backward(model(inputs(step)))
        optimizer.step()
        optimizer.zero_grad()
    with hf_zero.gathered_parameters(model):
        return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


@contextlib.contextmanager
def recorded():
    """What is begun and waited for, in this order."""
    log = []
    watched = {
        (Unit, "begin_unshard"): lambda unit: unit.state is UnitState.RESTING and f"gather {unit.name}",
        (Unit, "unshard"): lambda unit: unit.state is UnitState.GATHERING and f"have {unit.name}",
        (GradientBuffer, "begin_reduce"): lambda gradient: f"reduce {gradient.buffer.tag.name}",
        (GradientBuffer, "finish_reduce"): lambda gradient: gradient._work and f"done {gradient.buffer.tag.name}",
    }
    before = {key: getattr(*key) for key in watched}

    def note(key, self, **options):
        if line := watched[key](self):
            log.append(line)
        return before[key](self, **options)

    for (owner, name), _ in watched.items():
        setattr(
            owner,
            name,
            functools.partialmethod(lambda self, key, **options: note(key, self, **options), (owner, name)),
        )
    try:
        yield log
    finally:
        for (owner, name), original in before.items():
            setattr(owner, name, original)


def most_held(model, optimizer, engine, steps=3):
    """The most bytes of unreduced gradients that are held while the last of several backward passes runs."""
    seen = []
    add = GradientBuffer.add

    def look(self, index, grad):
        add(self, index, grad)
        seen.append(sum(tensor.nbytes for unit in engine.units for g in unit.gradients for tensor in g.held))

    for step in range(steps):
        seen.clear()
        GradientBuffer.add = look
        try:
            engine.backward(model(inputs(step)))
        finally:
            GradientBuffer.add = add
        optimizer.step()
        optimizer.zero_grad()
    return max(seen)


# ------------------------------------------------------------------------------------------- ranks that differ


class Diverging(Net):
    """Rank 1 has no gradient for the expert of one block, by default of the last."""

    def __init__(self, block=-1):
        super().__init__(idle=[block] if dist.get_rank() == 1 else [])


@pytest.mark.parametrize("block", [-1, 0, 4])
@pytest.mark.parametrize("peer_memory", [True, False])
@distributed(world_size=2)
def test_one_rank_lacks_a_gradient(block, peer_memory):
    """At stage 3 this hung: the rank that had all gradients waited for reductions that the other had not come to."""
    make = functools.partial(Diverging, block)
    ours = {
        stage: train(*prepare(make, zero_stage=stage, peer_memory=peer_memory, hang_timeout_s=20.0))
        for stage in (0, 1, 2, 3)
    }
    for stage in (1, 2, 3):
        assert torch.equal(ours[stage], ours[0]), stage


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_all_ranks_begin_and_wait_in_the_same_order(stage):
    model, optimizer, engine = prepare(Diverging, zero_stage=stage, peer_memory=False)
    train(model, optimizer, engine, steps=2)
    with recorded() as log:
        engine.backward(model(inputs(2)))
    logs = engine.comm.all_gather_object(log)
    assert sum(line.startswith("reduce") for line in log) == DEPTH, log
    assert logs[0] == logs[1], "\n".join(f"{a:20} {b}" for a, b in zip(*logs, strict=False))


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_ranks_that_call_different_blocks_reduce_in_one_order(stage):
    """Below stage 3 ranks may skip whole blocks; which is left behind when then differs, but not the order."""

    def route(model, x):
        for number, layer in enumerate(model.layers):
            if (number + dist.get_rank()) % 3:
                x = layer(x, True)
        return x.square().mean()

    model, optimizer, engine = prepare(Net, zero_stage=stage, peer_memory=False)
    model.forward = functools.partial(route, model)
    with recorded() as log:
        engine.backward(model(inputs(0)))
    logs = engine.comm.all_gather_object([line for line in log if line.startswith("reduce")])
    assert logs[0] == logs[1] == [f"reduce layers.{number}" for number in reversed(range(DEPTH))], logs


# ------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "make, blocks",
    [
        (Net, 1),
        (functools.partial(Net, idle=[-1]), 1),
        (functools.partial(Net, idle=range(DEPTH)), 1),
        (functools.partial(Repeated, idle=[-1]), 1),
        (functools.partial(Checkpointed, False, 1, idle=[-1]), 1),
        (functools.partial(Checkpointed, False, 2, idle=[-1]), 1),
        (functools.partial(Checkpointed, True, 1, idle=[-1]), 1),
        (functools.partial(Checkpointed, True, 2, idle=[-1]), 2),
    ],
    ids=["all used", "one unused", "half unused", "repeated", "plain-1", "plain-2", "reentrant-1", "reentrant-2"],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_gradients_are_held_for_a_few_blocks_only(stage, make, blocks):
    """With one unused parameter in the last block, all ranks held the gradients of the whole model."""
    model, optimizer, engine = prepare(make, zero_stage=stage, peer_memory=False)
    with recorded() as log:
        held = most_held(model, optimizer, engine, steps=1)
    assert 0 < held <= blocks * BLOCK + WAITING, f"{held / BLOCK} of {DEPTH} blocks"
    reduced = [line for line in log if line.startswith("reduce")]
    assert reduced == [f"reduce layers.{number}" for number in reversed(range(DEPTH))], reduced


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_the_first_block_is_reduced_before_the_gradient_of_the_embedding_comes(stage):
    class Embedding(Net):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(BLOCK // 4 // WIDTH, WIDTH)

        def forward(self, x):
            return super().forward(self.embed(torch.arange(4)))

    held = most_held(*prepare(Embedding, zero_stage=stage, peer_memory=False))
    assert 0 < held <= BLOCK + WAITING, f"{held / BLOCK} blocks"


class Spare(Net):
    """The last blocks are not called, or called without a gradient."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def forward(self, x):
        for number in range(DEPTH - 3):
            x = self.call(number, x)
        aside = x
        if self.mode != "not called":
            with torch.set_grad_enabled(self.mode == "without use"):
                for number in range(DEPTH - 3, DEPTH):
                    aside = self.call(number, aside)
        return (x + aside.detach()).square().mean()


@pytest.mark.parametrize("mode", ["not called", "without gradients", "without use"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_blocks_that_backward_never_comes_to_hold_nothing_up(stage, mode):
    held = most_held(*prepare(functools.partial(Spare, mode), zero_stage=stage, peer_memory=False))
    assert 0 < held <= BLOCK + WAITING, f"{held / BLOCK} of {DEPTH} blocks"


@pytest.mark.parametrize("before", ["failed forward", "evaluation", "evaluation with gradients"])
@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_what_came_before_a_forward_does_not_hold_gradients_up(stage, before):
    model, optimizer, engine = prepare(Net, zero_stage=stage, peer_memory=False)
    train(model, optimizer, engine, steps=1)
    if before == "failed forward":
        with pytest.raises(RuntimeError, match="shape"):
            model.layers[3].always.forward = lambda x: F.linear(x, torch.ones(3, 3))
            model(inputs(5))
        del model.layers[3].always.forward
    else:
        with torch.set_grad_enabled(before != "evaluation"):
            model(inputs(5)).detach()
    held = most_held(model, optimizer, engine, steps=1 if before != "evaluation with gradients" else 2)
    assert 0 < held <= BLOCK + WAITING, f"{held / BLOCK} blocks"


@distributed(world_size=2)
def test_reductions_under_way_are_bounded_by_elements():
    """A large reduction goes on under one layer's backward and not under the next two."""

    class Headed(Net):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(WIDTH, 100 * WIDTH)

        def forward(self, x):
            for number in range(DEPTH):
                x = self.call(number, x)
            return self.head(x).square().mean()

    model, optimizer, engine = prepare(Headed, zero_stage=3, peer_memory=False)
    train(model, optimizer, engine, steps=1)
    with recorded() as log:
        engine.backward(model(inputs(1)))
    moves = [line for line in log if line.startswith(("reduce", "done"))]
    assert moves[:8] == [
        "reduce head",
        "done head",
        "reduce layers.7",
        "reduce layers.6",
        "done layers.7",
        "reduce layers.5",
        "done layers.6",
        "reduce layers.4",
    ], moves
