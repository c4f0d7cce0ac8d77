"""Ranks that share layers or sequences, or have groups apart, cannot hang or overrun anything: all is replayed."""

import contextlib
import functools
import itertools

import pytest
import torch
import torch.distributed as dist

from hf_zero.core.sequence import SequenceGroup
from hf_zero.parallel.sequence_batches import cut
from hf_zero.parallel.ulysses import Ulysses
from tests.support import sequences, tensor_models, zoo
from tests.support.far_home import far_homes
from tests.support.happens_before import Collective, problems, too_many_exposed
from tests.support.nets import Net, seeded
from tests.support.networks import loss_of_network
from tests.support.recorder import record


RANKS, WIDTH, ACCUMULATION, LAYERS = 4, 2, 2, 2
VARIANTS = {
    "plain": {},
    "messages": {"transport": "messages"},
    "small_units": {"unit_size": 1500},
    "no_sync_local": {"no_sync": "local"},
    "far_ahead": {"stage3_prefetch_bucket_size": 5000, "stage3_max_reuse_distance": 5000},
    "quantised": {"zero_quantized_weights": True, "zero_quantized_gradients": True},
    "offload": {},
}
HOMES = {"offload": far_homes}


def _prepare(model, optimizer, stage, variant, recording, **more):
    homes = HOMES.get(variant, lambda: None)()
    return recording.shard(model, optimizer, zero_stage=stage, homes=homes, **VARIANTS[variant], **more)


def _train(engine, optimizer, loss_of, recording, steps=2):
    for number in range(steps * ACCUMULATION):
        last = number % ACCUMULATION == ACCUMULATION - 1
        recording.section(f"forward {number}")
        loss = loss_of(number)
        recording.section(f"backward {number}")
        with contextlib.nullcontext() if last else engine.no_sync():
            engine.backward(loss)
        del loss
        recording.section(f"after {number}")
        if last:
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()


def _share_layers(name, stage, checkpoints, variant, recording):
    torch.manual_seed(0)
    model = tensor_models.build(name, WIDTH)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = _prepare(model, optimizer, stage, variant, recording)

    def loss_of(number):
        return model(**zoo.batch(name, dist.get_rank() // WIDTH, number)).loss

    _train(engine, optimizer, loss_of, recording)


def _share_sequences(heads, stage, checkpoints, variant, recording):
    torch.manual_seed(0)
    model, ulysses = sequences.build(*heads).train(), Ulysses(WIDTH)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = _prepare(model, optimizer, stage, variant, recording, mixins=(ulysses.adopt(model),))
    ulysses.group = SequenceGroup(engine.mesh, WIDTH)
    rank, rows = dist.get_rank(), sequences.examples(2 * RANKS)

    def loss_of(number):
        pair = rows[2 * (rank // WIDTH) :][:2]
        batch = {name: torch.stack([row[name] for row in pair]) for name in pair[0]}
        return model(**cut(batch, rank % WIDTH, WIDTH)).loss

    _train(engine, optimizer, loss_of, recording)


def _check(share, what, stage, checkpoints, variant, kind):
    logs = record(functools.partial(share, what, stage, checkpoints, variant), RANKS)
    found = problems(logs)
    assert not found, "\n".join(found)
    wanted = "message of heads" if (kind, variant) == ("all-to-all", "messages") else kind
    for rank, log in enumerate(logs):
        first = rank - rank % WIDTH
        calls = [event for event in log if isinstance(event, Collective) and event.members == (first, first + 1)]
        called = [str(call) for call in calls]
        assert sum(call.startswith(wanted) for call in called) > 10, called
        if stage == 3:
            # Of a checkpoint over several units, the first one is known when its recomputation begins.
            exposed = too_many_exposed(log, LAYERS if checkpoints and variant == "small_units" else 1)
            assert not exposed, exposed


def _cases(models, usual):
    """All ways to train; models take turns, as what is theirs are the messages inside of a layer."""
    ways = itertools.product(range(4), (False, True), VARIANTS)
    possible = [way for way in ways if way[0] or way[-1] != "quantised"]
    for model, way in zip(itertools.cycle(models), possible, strict=False):
        yield pytest.param(
            model, *way, marks=[pytest.mark.exhaustive] * (way not in usual), id="-".join(map(str, (model, *way)))
        )


# Sums of parts that the engine takes over (qwen3), and experts.
SHARED_LAYERS = _cases(("llama", "mixtral", "qwen3"), [(3, True, "offload"), (2, False, "messages")])


@pytest.mark.parametrize("name, stage, checkpoints, variant", list(SHARED_LAYERS))
def test_ranks_that_share_layers(name, stage, checkpoints, variant):
    _check(_share_layers, name, stage, checkpoints, variant, kind="all-reduce")


# Grouped heads, and a head of keys that all ranks need.
SHARED_SEQUENCES = _cases(((4, 2), (4, 1)), [(3, False, "plain")])


@pytest.mark.parametrize("heads, stage, checkpoints, variant", list(SHARED_SEQUENCES))
def test_ranks_that_share_sequences(heads, stage, checkpoints, variant):
    _check(_share_sequences, heads, stage, checkpoints, variant, kind="all-to-all")


@pytest.mark.parametrize("stage", range(4))
def test_engines_on_disjoint_groups_do_not_meet(stage):
    """Two engines at the same time, on two ranks each, and one on all four."""

    def program(recording):
        pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
        model, whole = seeded(lambda: Net(depth=4))(), seeded(lambda: Net(depth=4), seed=1)()
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, whole)]
        engine = recording.shard(model, optimizers[0], zero_stage=stage, group=pairs[dist.get_rank() // 2])
        recording.shard(whole, optimizers[1], zero_stage=stage)
        for number in range(3):
            engine.backward(loss_of_network(model, number) + loss_of_network(whole, number))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    logs = record(program, world_size=4)
    assert problems(logs) == []
    members = [{event.members for event in log if isinstance(event, Collective)} for log in logs]
    assert members == [{(0, 1), (0, 1, 2, 3)}] * 2 + [{(2, 3), (0, 1, 2, 3)}] * 2, members
