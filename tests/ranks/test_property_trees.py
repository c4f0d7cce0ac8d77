"""Random small module trees train as without hf_zero: any nesting, sharing, freezing, dtypes and call order.

A tree is data; the ranks build it by themselves. What hypothesis finds is printed as that data and can be run again by
`_train(tree)` inside ranks.
"""

import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.harness import run_ranks
from tests.support.nets import WIDTH, batches, seeded
from tests.support.reference import SGD, Plan, check_stages, no_change


# No optimizer with a step count: stock ones count per parameter and skip unused ones, a flat master has one count.
RMSPROP = functools.partial(torch.optim.RMSprop, lr=1e-3, eps=1e-3, momentum=0.9)


@dataclasses.dataclass(frozen=True)
class Leaf:
    kind: str  # "linear", "plain" (no bias), "norm", "scale" (a scalar)
    frozen: bool
    double: bool


@dataclasses.dataclass(frozen=True)
class Inner:
    kind: str  # "chain", "residual", "twice", "branch" (rank and data decide)
    children: tuple


@dataclasses.dataclass(frozen=True)
class Tree:
    blocks: tuple  # of Leaf or Inner
    orders: tuple  # the blocks that a forward calls; forwards take turns
    same: tuple  # (i, j): block i is block j
    tied: tuple  # (i, j): a matrix of block i is a matrix of block j, if both have one
    container: str  # "list", "dict", "attributes"
    checkpoints: str  # "none", "reentrant", "plain"
    frozen_entry: bool
    peek: bool  # an evaluation before every step
    rmsprop: bool
    accumulation: int
    clip: float | None
    options: tuple  # items of ZeroConfig


class LeafModule(nn.Module):
    def __init__(self, leaf):
        super().__init__()
        makers = {
            "linear": lambda: nn.Linear(WIDTH, WIDTH),
            "plain": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
            "norm": lambda: nn.LayerNorm(WIDTH),
            "scale": lambda: nn.ParameterList([torch.tensor(0.7)]),
        }
        self.inner = makers[leaf.kind]()
        self.dtype = torch.float64 if leaf.double else torch.float32
        self.inner.to(self.dtype).requires_grad_(not leaf.frozen)

    def forward(self, x):
        y = x.to(self.dtype)
        y = y * self.inner[0] if isinstance(self.inner, nn.ParameterList) else self.inner(y)
        return y.to(x.dtype)


class InnerModule(nn.Module):
    def __init__(self, node):
        super().__init__()
        self.kind = node.kind
        self.parts = nn.ModuleList([_module(child) for child in node.children])

    def forward(self, x):
        if self.kind == "branch":
            return self.parts[(dist.get_rank() + int(x.sum() > 0)) % len(self.parts)](x)
        y = x
        for _ in range(2 if self.kind == "twice" else 1):
            for part in self.parts:
                y = torch.tanh(part(y))
        return x + y if self.kind == "residual" else y


def _module(node):
    return LeafModule(node) if isinstance(node, Leaf) else InnerModule(node)


class TreeNet(nn.Module):
    def __init__(self, tree):
        super().__init__()
        self.tree, self.turn = tree, 0
        self.enter, self.head = nn.Linear(4, WIDTH).requires_grad_(not tree.frozen_entry), nn.Linear(WIDTH, 3)
        blocks = [_module(node) for node in tree.blocks]
        for i, j in tree.same:
            blocks[i] = blocks[j]
        for i, j in tree.tied:
            _tie(blocks[i], blocks[j])
        if tree.container == "list":
            self.blocks = nn.ModuleList(blocks)
        elif tree.container == "dict":
            self.blocks = nn.ModuleDict({f"b{number}": block for number, block in enumerate(blocks)})
        else:
            for number, block in enumerate(blocks):
                setattr(self, f"block{number}", block)
        self.calls = [lambda x, block=block: torch.tanh(block(x)) for block in blocks]

    def forward(self, x):
        order = self.tree.orders[self.turn % len(self.tree.orders)]
        self.turn += self.training
        x = self.enter(x)
        for number in order:
            if self.tree.checkpoints != "none" and self.training:
                x = checkpoint(self.calls[number], x, use_reentrant=self.tree.checkpoints == "reentrant")
            else:
                x = self.calls[number](x)
        return self.head(x)


def _tie(one, other):
    linears = [[m for m in block.modules() if isinstance(m, nn.Linear)] for block in (one, other)]
    if all(linears) and linears[0][0].weight.dtype == linears[1][0].weight.dtype:
        linears[0][0].weight = linears[1][0].weight


def _micro(model, batch, backward):
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    backward(loss)
    return loss


def _peek(step, model):
    model.eval()
    with torch.no_grad():
        model(batches(0, 99)[0])
    model.train()


def _train(tree):
    check_stages(
        seeded(lambda: TreeNet(tree)),
        batches,
        Plan(steps=3, accumulation=tree.accumulation, clip=tree.clip),
        optimizer=RMSPROP if tree.rmsprop else SGD,
        micro=_micro,
        before_step=_peek if tree.peek else no_change,
        config=dict(tree.options),
    )


_RARELY = st.sampled_from([False, False, True])
_LEAVES = st.builds(Leaf, st.sampled_from(["linear", "plain", "norm", "scale"]), frozen=_RARELY, double=_RARELY)


def _nodes(kinds):
    def inner(parts):
        return st.builds(Inner, st.sampled_from(kinds), st.lists(parts, min_size=1, max_size=2).map(tuple))

    return st.recursive(_LEAVES, inner, max_leaves=4)


def _option(name, *values):
    return st.tuples(st.just(name), st.sampled_from(values))


@st.composite
def _trees(draw):
    container = draw(st.sampled_from(["list", "list", "dict", "attributes"]))
    count = draw(st.integers(1, 4))
    # Where ranks may differ inside a block, a block must be what travels together: a list of several.
    kinds = ["chain", "residual", "twice"] + (["branch"] if container == "list" and count > 1 else [])
    blocks = draw(st.lists(_nodes(kinds), min_size=count, max_size=count))
    indices = st.integers(0, count - 1)
    pairs = st.lists(st.tuples(indices, indices), max_size=1).map(tuple)
    orders = st.lists(st.lists(indices, max_size=5).map(tuple), min_size=1, max_size=3).map(tuple)
    return Tree(
        blocks=tuple(blocks),
        orders=draw(orders),
        same=draw(pairs),
        tied=draw(pairs),
        container=container,
        checkpoints=draw(st.sampled_from(["none", "none", "plain", "reentrant"])),
        # Behind frozen parameters alone, a branch could leave one rank without anything to differentiate.
        frozen_entry=draw(st.booleans()) and "branch" not in repr(blocks),
        peek=draw(st.booleans()),
        rmsprop=draw(st.booleans()),
        accumulation=draw(st.integers(1, 3)),
        clip=draw(st.sampled_from([None, None, 0.1])),
        options=draw(st.tuples(_option("overlap_comm", True, False), _option("no_sync", "reduce", "local"))),
    )


def _check(tree):
    try:
        run_ranks(_train, tree, world_size=2)
    except pytest.fail.Exception as failure:
        # An ordinary error, so that hypothesis looks for the smallest tree and prints it.
        raise AssertionError(str(failure)) from None


_SETTINGS = functools.partial(settings, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@_SETTINGS(max_examples=12)
@given(_trees())
def test_random_trees_train_as_without_hf_zero(tree):
    _check(tree)


@pytest.mark.exhaustive
@_SETTINGS(max_examples=200)
@given(_trees())
def test_many_random_trees_train_as_without_hf_zero(tree):
    _check(tree)
