"""Ways of calling a model, early reads and random trees: no interleaving of what ranks enqueue hangs or overruns."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import hf_zero
from tests.ranks.test_autograd_calls import WAYS
from tests.ranks.test_property_trees import Inner, Leaf, Tree, TreeNet, _trees
from tests.support.happens_before import problems
from tests.support.nets import Net, batches
from tests.support.networks import diverge, loss_of_network
from tests.support.recorder import record


STAGES = (0, 1, 2, 3)
TRANSPORTS = ("nccl", "messages", "reads")


def _call(way, stage, transport, recording):
    torch.manual_seed(0)
    model = Net(depth=5)
    diverge(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = recording.shard(model, optimizer, zero_stage=stage, transport=transport)
    for number in range(4):
        with engine.no_sync() if number == 0 else contextlib.nullcontext():
            way(model, batches(dist.get_rank(), number), engine.backward)
        if number:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=[pytest.mark.exhaustive] * (stage < 3)) for stage in STAGES]
)
@pytest.mark.parametrize(
    "transport", [pytest.param(t, marks=[pytest.mark.exhaustive] * (t == "messages")) for t in TRANSPORTS]
)
@pytest.mark.parametrize("way", WAYS)
def test_no_interleaving_of_several_passes_hangs_or_overruns(way, stage, transport):
    found = problems(record(functools.partial(_call, way, stage, transport)))
    assert not found, "\n".join(found)


class _Early(Net):
    """Reads a parameter of the last block before its block is called; that gives a gradient on the first rank only."""

    scope = contextlib.nullcontext

    def route(self, x):
        with self.scope():
            early = x * self.layers[-1].gain
        return super().route(x + (early if dist.get_rank() == 0 else early.detach()))


def _read_early(how, stage, transport, recording):
    torch.manual_seed(0)
    model = _Early(depth=6)
    scope = functools.partial(hf_zero.gathered_parameters, model.layers[-1])
    if how == "in a scope inside the pass":
        model.scope = scope
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = recording.shard(model, optimizer, zero_stage=stage, transport=transport)
    for number in range(3):
        with scope() if how == "in a scope around the pass" else contextlib.nullcontext():
            early = model.layers[-1].gain.square() if how == "before the pass" else torch.zeros(())
            early = early if dist.get_rank() == 0 else early.detach()
            engine.backward(loss_of_network(model, number) + early)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("transport", ["nccl", "reads"])
@pytest.mark.parametrize(
    "how", ["inside the pass", "in a scope inside the pass", "before the pass", "in a scope around the pass"]
)
def test_gradients_of_early_reads_on_one_rank_hold_up_no_other(how, transport):
    for stage in (2, 3):
        found = problems(record(functools.partial(_read_early, how, stage, transport)))
        assert not found, "\n".join([f"stage {stage}", *found])


# -- random trees -----------------------------------------------------------------------------------------------------


def _train_tree(tree, apart, stage, transport, recording, *, hooks_entry=False):
    torch.manual_seed(0)
    model = TreeNet(tree)
    if apart:
        diverge(model)
    if hooks_entry:
        model.enter.register_forward_hook(lambda _module, _args, output: output.requires_grad_())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = recording.shard(model, optimizer, zero_stage=stage, transport=transport, **dict(tree.options))
    for number in range(3 * tree.accumulation):
        last = number % tree.accumulation == tree.accumulation - 1
        with contextlib.nullcontext() if last else engine.no_sync():
            engine.backward(loss_of_network(model, number))
        if tree.peek:
            with torch.no_grad():
                model(batches(0, 99)[0])
        if last:
            optimizer.step()
            optimizer.zero_grad()


def _check_tree(tree, apart, *choices, **more):
    found = problems(record(functools.partial(_train_tree, tree, apart, *choices, **more)))
    assert not found, "\n".join(found)


def _is_known(tree, apart):
    """Whether a block in front of which nothing is trained may have a trained part that only some ranks use."""
    return apart and tree.frozen_entry and any(isinstance(block, Inner) or block.frozen for block in tree.blocks)


_TRAINED, _FROZEN = Leaf("linear", frozen=False, double=False), Leaf("linear", frozen=True, double=False)
# Block 3 is called first, and rank 0 alone uses its only trained part.
KNOWN = Tree(
    blocks=(_TRAINED, _TRAINED, Inner("chain", (_FROZEN, _TRAINED)), _FROZEN),
    orders=((3, 2),),
    same=(),
    tied=(),
    container="dict",
    checkpoints="none",
    frozen_entry=True,
    peek=False,
    rmsprop=False,
    accumulation=1,
    clip=None,
    options=(),
)


@pytest.mark.parametrize(
    "hooks_entry",
    [True, pytest.param(False, marks=pytest.mark.xfail(strict=True, reason="docs/troubleshooting.md: ranks wait"))],
)
def test_a_first_layer_of_which_one_rank_trains_a_part_needs_inputs_with_gradients(hooks_entry):
    """Elsewhere its output leads backward nowhere, so that only this rank gathers it again."""
    _check_tree(KNOWN, True, 3, "nccl", hooks_entry=hooks_entry)


_TREES = given(_trees(), st.booleans(), st.sampled_from(STAGES), st.sampled_from(TRANSPORTS))
_SETTINGS = functools.partial(settings, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@_SETTINGS(max_examples=15)
@_TREES
def test_no_interleaving_of_random_trees_hangs_or_overruns(tree, apart, stage, transport):
    assume(not _is_known(tree, apart))
    _check_tree(tree, apart, stage, transport)


@pytest.mark.exhaustive
@_SETTINGS(max_examples=1000)
@_TREES
def test_no_interleaving_of_many_random_trees_hangs_or_overruns(tree, apart, stage, transport):
    assume(not _is_known(tree, apart))
    _check_tree(tree, apart, stage, transport)
