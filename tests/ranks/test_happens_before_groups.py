"""Ranks that share layers or sequences cannot hang or overrun anything: what all of them enqueue is replayed."""

import contextlib
import functools
import itertools

import pytest
import torch
import torch.distributed as dist

from hf_zero.core.sequence import SequenceGroup
from hf_zero.parallel.sequence_batches import cut
from hf_zero.parallel.ulysses import Ulysses
from tests.ranks.test_happens_before import _too_many_exposed
from tests.support import sequences, tensor_models, zoo
from tests.support.far_home import far_homes
from tests.support.happens_before import Collective, problems
from tests.support.recorder import record


RANKS, WIDTH, ACCUMULATION = 4, 2, 2
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


def _check(program, kind, stage):
    logs = record(program, RANKS)
    found = problems(logs)
    assert not found, "\n".join(found)
    for rank, log in enumerate(logs):
        first = rank - rank % WIDTH
        calls = [event for event in log if isinstance(event, Collective) and event.members == (first, first + 1)]
        assert sum(call.kind == kind for call in calls) > 10, [str(call) for call in calls]
        if stage == 3:
            exposed = _too_many_exposed(log)
            assert not exposed, exposed


def _cases(names):
    for name, stage, checkpoints, variant in itertools.product(names, range(4), (False, True), VARIANTS):
        if not (stage == 0 and variant == "quantised"):
            yield name, stage, checkpoints, variant


def _marked(names, usual):
    return [
        pytest.param(*case, marks=[pytest.mark.exhaustive] * (case not in usual), id="-".join(map(str, case)))
        for case in _cases(names)
    ]


# Sums of parts that the engine takes over (qwen3), and experts.
LAYERS = _marked(
    ("llama", "qwen3", "mixtral"),
    [("qwen3", 3, True, "offload"), ("llama", 2, False, "plain")],
)


@pytest.mark.parametrize("name, stage, checkpoints, variant", LAYERS)
def test_ranks_that_share_layers(name, stage, checkpoints, variant):
    _check(functools.partial(_share_layers, name, stage, checkpoints, variant), "all-reduce", stage)


# Grouped heads, and a head of keys that all ranks need.
HEADS = _marked(((4, 2), (4, 1)), [((4, 2), 3, False, "plain")])


@pytest.mark.parametrize("heads, stage, checkpoints, variant", HEADS)
def test_ranks_that_share_sequences(heads, stage, checkpoints, variant):
    _check(functools.partial(_share_sequences, heads, stage, checkpoints, variant), "all-to-all", stage)
