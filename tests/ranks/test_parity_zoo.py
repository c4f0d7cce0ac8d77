"""Every model family trains at stages 0-3 as it trains under DDP: losses, gradient norms and weights."""

import functools

import pytest
import torch
import torch.distributed as dist

from tests.support import zoo
from tests.support.harness import distributed
from tests.support.reference import OPTIMIZERS, Plan, check_stages, compare, train_stock


def _check(name, optimizer, plan):
    make_optimizer = OPTIMIZERS[optimizer]
    unused = name in zoo.WITH_UNUSED_PARAMETERS
    check_stages(
        functools.partial(zoo.build, name),
        functools.partial(zoo.batch, name),
        plan,
        optimizer=make_optimizer,
        ddp={"find_unused_parameters": unused},
    )


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "plan", [Plan(), Plan(accumulation=3, ragged=True)], ids=["plain", "accumulation, ragged end"]
)
@distributed(world_size=2)
def test_two_ranks(name, optimizer, plan):
    _check(name, optimizer, plan)


@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "mixtral", "t5", "whisper", "llava"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@distributed(world_size=2)
def test_two_ranks_with_clipping(name, optimizer):
    _check(name, optimizer, Plan(accumulation=3, clip=0.3))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "qwen3_moe", "t5", "vit"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@distributed(world_size=4)
def test_four_ranks(name, optimizer):
    _check(name, optimizer, Plan(accumulation=3, ragged=True, clip=0.3))


@distributed(world_size=3)
def test_three_ranks_cut_parameters_unevenly():
    _check("llama_tied", "sgd", Plan(accumulation=2))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_the_zoo_is_the_same_on_every_call(name):
    """What the suite rests on: models and batches that depend on their arguments alone, and a loss that trains."""
    torch.manual_seed(7)
    models = [zoo.build(name), zoo.build(name)]
    assert all(torch.equal(a, b) for a, b in zip(*(m.state_dict().values() for m in models), strict=True))
    batches = [zoo.batch(name, 0, 1), zoo.batch(name, 0, 1), zoo.batch(name, 1, 1), zoo.batch(name, 0, 2)]
    losses = [model(**batch).loss for batch in batches for model in models]
    assert len({loss.item() for loss in losses[:4]}) == 1 and len({loss.item() for loss in losses}) == 3
    losses[0].backward()
    unused = {key for key, p in models[0].named_parameters() if p.requires_grad and p.grad is None}
    assert bool(unused) == (name in zoo.WITH_UNUSED_PARAMETERS), unused


@pytest.mark.parametrize("name, experts", [("mixtral", 8), ("qwen3_moe", 16)])
def test_some_experts_of_the_zoo_are_idle(name, experts):
    model = zoo.build(name)
    model(**zoo.batch(name, 0, 0)).loss.backward()
    grads = [p.grad for key, p in model.named_parameters() if key.endswith("experts.down_proj")]
    idle = [experts - int(grad.flatten(1).any(1).sum()) for grad in grads]
    assert grads[0].shape[0] == experts and any(idle), idle


@distributed(world_size=2)
def test_the_comparison_notices_ranks_that_are_not_averaged():
    """The suite must not pass by chance: without the exchange of gradients it fails."""
    mine = functools.partial(zoo.batch, "llama", dist.get_rank())
    alone = functools.partial(zoo.batch, "llama", 0)
    first = train_stock(zoo.build("llama"), OPTIMIZERS["sgd"], mine, Plan(), ddp={})
    same = train_stock(zoo.build("llama"), OPTIMIZERS["sgd"], mine, Plan(), ddp=None)
    other = train_stock(zoo.build("llama"), OPTIMIZERS["sgd"], alone, Plan(), ddp={})
    compare(same, first, "averaging by hand", exact=True)
    other.losses = first.losses
    with pytest.raises(AssertionError, match="gradient norm of step 0"):
        compare(other, first, "one rank's data")
    other.norms = first.norms
    with pytest.raises(AssertionError, match="weight differs by"):
        compare(other, first, "one rank's data")
