"""No schedule can hang or overrun anything on a device: what ranks enqueue is checked for all interleavings."""

import contextlib
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable

import peft
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import hf_zero
from hf_zero.core.placement import Place
from tests.ranks.test_autograd_calls import WAYS
from tests.ranks.test_property_trees import TreeNet, _trees
from tests.support import zoo
from tests.support.allocator import replay
from tests.support.far_home import far_homes
from tests.support.happens_before import (
    Collective,
    Compute,
    Section,
    exposed_gathers,
    problems,
    reductions_under_way,
)
from tests.support.late_lanes import late_homes
from tests.support.matrix_optimizers import Lamb
from tests.support.nets import Net, batches, seeded
from tests.support.networks import NETWORKS, checkpoint_calls, diverge
from tests.support.recorder import RecordedLanes, record


STEPS = 3
STAGES = (0, 1, 2, 3)
TRANSPORTS = ("nccl", "messages", "reads")
WIDTH = 16


@dataclasses.dataclass(frozen=True)
class Variant:
    """What differs from three steps of one micro-batch each on NCCL."""

    changes: tuple[Callable, ...] = ()  # of the network, before it is prepared
    accumulation: int = 1
    evaluates: bool = False  # a pass without gradients after each micro-batch
    beside: bool = False  # a second model that trains, and a third that is only evaluated
    config: dict = dataclasses.field(default_factory=dict)
    ranks: int = 2
    homes: Callable = lambda: None  # where slices rest
    optimizer: Callable = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def _activations_late():
    """Everything on a host, what checkpoints keep as well."""
    homes = late_homes(limit=1 << 20, lanes=RecordedLanes())
    return dataclasses.replace(homes, activations=homes.host)


FAR_AHEAD = {
    "stage3_prefetch_bucket_size": 600,
    "stage3_max_reuse_distance": 600,
    "stage3_param_persistence_threshold": 10,
}
QUANTISED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
VARIANTS = {
    "plain": Variant(),
    "divergence": Variant((diverge,)),
    "checkpoint": Variant((diverge, functools.partial(checkpoint_calls, reentrant=False))),
    "reentrant": Variant((diverge, functools.partial(checkpoint_calls, reentrant=True))),
    "no_sync": Variant((diverge,), accumulation=3, config={"no_sync": "reduce"}),
    "no_sync_local": Variant((diverge,), accumulation=3, config={"no_sync": "local"}),
    "two_engines": Variant(beside=True),
    "evaluation": Variant((diverge,), accumulation=2, evaluates=True),
    "bf16": Variant((diverge,), config={"mixed_precision": "bf16", "communication_data_type": "bf16"}),
    "no_overlap": Variant((diverge,), config={"overlap_comm": False}),
    "far_ahead": Variant((diverge,), config=FAR_AHEAD),
    "little_room": Variant((diverge,), config={"stage3_max_live_parameters": 1, "reduce_bucket_size": 64}),
    "nodes": Variant((diverge,), accumulation=2, config={"zero_hpz_partition_size": 2}, ranks=4),
    "offload": Variant((diverge,), accumulation=2, evaluates=True, homes=far_homes),
    "offload_reads": Variant((diverge,), config={"transport": "reads"}, homes=functools.partial(far_homes, ratio=0.5)),
    "offload_nodes": Variant((diverge,), config={"zero_hpz_partition_size": 2}, ranks=4, homes=far_homes),
    "copies": Variant((diverge,), accumulation=2, evaluates=True, homes=lambda: late_homes(lanes=RecordedLanes())),
    "copies_to_slices": Variant(
        (diverge,), config=FAR_AHEAD, homes=lambda: late_homes(Place.DEVICE, ratio=0.5, lanes=RecordedLanes())
    ),
    "streamed": Variant((diverge,), accumulation=2, homes=lambda: late_homes(step="device", lanes=RecordedLanes())),
    "streamed_to_slices": Variant(
        (diverge,), evaluates=True, homes=lambda: late_homes(Place.DEVICE, step="device", lanes=RecordedLanes())
    ),
    "activations": Variant(
        (diverge, functools.partial(checkpoint_calls, reentrant=False)), accumulation=2, homes=_activations_late
    ),
    "sums_on_nodes": Variant(
        (diverge,), accumulation=2, config={"zero_hpz_partition_size": 2, "no_sync": "node"}, ranks=4
    ),
    "quantised": Variant((diverge,), accumulation=2, config={"zero_hpz_partition_size": 2, **QUANTISED}, ranks=4),
    "quantised_replicas": Variant((diverge,), config={"mics_shard_size": 2, **QUANTISED}, ranks=4),
    "quantised_frozen": Variant(
        (diverge,), config={"zero_hpz_partition_size": 2, "zero_quantized_nontrainable_weights": True}, ranks=4
    ),
    "replicas": Variant((diverge,), accumulation=2, config={"mics_shard_size": 2, "transport": "messages"}, ranks=4),
    "owned": Variant((diverge,), accumulation=2, evaluates=True, optimizer=Lamb),
    "owned_nodes": Variant((diverge,), config={"zero_hpz_partition_size": 2}, ranks=4, optimizer=Lamb),
    "owned_offload": Variant((diverge,), config={"transport": "reads"}, homes=far_homes, optimizer=Lamb),
    "messages": Variant((diverge,), accumulation=2, config={"transport": "messages"}),
    "reads": Variant((diverge,), accumulation=2, config={"transport": "reads"}),
    "uneven": Variant((diverge,), accumulation=2, config={"rank_weights": [2, 1], "transport": "messages"}),
    "uneven_offload": Variant((diverge,), config={"rank_weights": [1, 2], "transport": "reads"}, homes=far_homes),
    "small_units": Variant(accumulation=2, evaluates=True, config={"unit_size": 20}),
    "tiles": Variant(accumulation=2, evaluates=True, config={"tile_loss": 3}),
}

FAMILIES = ("llama_tied", "mixtral", "t5")
ADAPTED = ("lora_llama", "lora_qwen2")

WITHOUT_LAYERS = {"no_layers", "sequential"}
# Recomputed, they would take another way than in forward.
NO_RECOMPUTATION = {"branches", "some_of_experts"}
IMPOSSIBLE = {
    "checkpoint": NO_RECOMPUTATION,
    "activations": NO_RECOMPUTATION,
    # A reentrant checkpoint takes and gives tensors only, and needs a gradient to pass through it.
    "reentrant": NO_RECOMPUTATION | {"talkative", "frozen"},
    "tiles": {*NETWORKS, "t5"},  # no decoders
    "bf16": {"mixed"},  # autocast leaves fp64 as it is
}
# What comes next is not what came next in the pass before, or is read outside of its module.
UNFORESEEN = {"turning", "skipping", "borrowing"}
# Of a checkpoint over several blocks, the first one is known when its recomputation begins.
EXPOSED = {"spanning": 3, "spanning_reentrant": 3}


def _cases():
    for name, variant, stage in itertools.product([*NETWORKS, *FAMILIES, *ADAPTED], VARIANTS, STAGES):
        refused = stage == 0 and variant in ("quantised", "quantised_replicas", "uneven", "uneven_offload")
        if name in IMPOSSIBLE.get(variant, ()) or (name in WITHOUT_LAYERS and VARIANTS[variant].changes):
            continue
        if not refused:
            yield name, variant, stage


def _sample():
    """Every network at stage 3, and for each variant one case at stage 3 and one at another stage."""
    cases = list(_cases())
    draw = random.Random(12)
    chosen = {case for case in cases if case[1:] == ("plain", 3)}
    for number, variant in enumerate(VARIANTS):
        found = {}
        for stage in STAGES:
            fitting = [case for case in cases if case[1:] == (variant, stage)]
            found[stage] = draw.sample(fitting, min(len(fitting), 2 if stage == 3 else 1))
        lower = [case for stage in STAGES[:3] for case in found[stage]]
        chosen |= {*found[3][:1], lower[number % len(lower)]}
    return sorted(chosen)


# -- programs ---------------------------------------------------------------------------------------------------------


def _build(name):
    """A network or a model of transformers, and the loss of a micro-batch."""
    if name in NETWORKS:
        return NETWORKS[name](), _loss_of_network
    family = name.removeprefix("lora_")
    model = zoo.build(family)
    if name != family:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        model.enable_input_require_grads()
    return model, functools.partial(_loss_of_family, family)


def _loss_of_network(model, number):
    x, y = batches(dist.get_rank(), number)
    return F.cross_entropy(model(x).float(), y)


def _loss_of_family(family, model, number):
    return model(**zoo.batch(family, dist.get_rank(), number)).loss


def _train(name, stage, variant, recording):
    torch.manual_seed(0)
    model, loss_of = _build(name)
    for change in variant.changes:
        change(model)
    prepare = functools.partial(recording.shard, zero_stage=stage, homes=variant.homes(), **variant.config)
    optimizers = [variant.optimizer(model.parameters())]
    engine = prepare(model, optimizers[0])
    if variant.beside:
        student, teacher = seeded(lambda: Net(depth=5))(), seeded(lambda: Net(depth=4))()
        optimizers.append(torch.optim.AdamW(student.parameters()))
        prepare(student, optimizers[1])
        prepare(teacher)
    for step, micro in itertools.product(range(STEPS), range(variant.accumulation)):
        number = step * variant.accumulation + micro
        recording.section(f"forward {number}")
        loss = loss_of(model, number)
        if variant.beside:
            recording.section(f"evaluation beside {number}")
            with torch.no_grad():
                wanted = _loss_of_network(teacher, number)
            recording.section(f"forward beside {number}")
            loss = loss + (_loss_of_network(student, number) - wanted).square()
        last = micro == variant.accumulation - 1
        recording.section(f"backward {number}")
        with contextlib.nullcontext() if last else engine.no_sync():
            engine.backward(loss)
        del loss
        if variant.evaluates:
            recording.section(f"evaluation {number}")
            model.eval()
            with torch.no_grad():
                loss_of(model, number)
            model.train()
        recording.section(f"after {number}")
        if last:
            engine.clip_grad_norm_(1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def _too_many_exposed(log, allowed=1):
    """Passes of the last micro-batch that wait for more gathers than allowed with nothing to do meanwhile."""
    exposed = exposed_gathers(log)
    last = list(exposed)[-1].split()[-1]
    return {name: labels for name, labels in exposed.items() if name.endswith(f" {last}") and len(labels) > allowed}


def _check(name, variant, stage):
    logs = record(functools.partial(_train, name, stage, VARIANTS[variant]), VARIANTS[variant].ranks)
    found = problems(logs)
    assert not found, "\n".join(found)
    if stage == 3 and name not in UNFORESEEN and variant != "no_overlap":
        # Among layers of unequal sizes the third hop of a sum, a gather, may find nothing to go on under.
        allowed = EXPOSED.get(name, 1) + (variant == "quantised_replicas")
        for log in logs:
            exposed = _too_many_exposed(log, allowed)
            assert not exposed, exposed


@pytest.mark.parametrize("name, variant, stage", _sample())
def test_no_interleaving_hangs_or_overruns(name, variant, stage):
    _check(name, variant, stage)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, variant, stage", list(_cases()))
def test_no_interleaving_of_any_case_hangs_or_overruns(name, variant, stage):
    _check(name, variant, stage)


# -- ways of calling --------------------------------------------------------------------------------------------------


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
            engine.backward(_loss_of_network(model, number) + early)
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


def _train_tree(tree, apart, stage, transport, recording):
    torch.manual_seed(0)
    model = TreeNet(tree)
    if apart:
        diverge(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = recording.shard(model, optimizer, zero_stage=stage, transport=transport, **dict(tree.options))
    for number in range(3 * tree.accumulation):
        last = number % tree.accumulation == tree.accumulation - 1
        with contextlib.nullcontext() if last else engine.no_sync():
            engine.backward(_loss_of_network(model, number))
        if tree.peek:
            with torch.no_grad():
                model(batches(0, 99)[0])
        if last:
            optimizer.step()
            optimizer.zero_grad()


def _check_tree(*choices):
    found = problems(record(functools.partial(_train_tree, *choices)))
    assert not found, "\n".join(found)


_TREES = given(_trees(), st.booleans(), st.sampled_from(STAGES), st.sampled_from(TRANSPORTS))
_SETTINGS = functools.partial(settings, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@_SETTINGS(max_examples=15)
@_TREES
def test_no_interleaving_of_random_trees_hangs_or_overruns(tree, apart, stage, transport):
    _check_tree(tree, apart, stage, transport)


@pytest.mark.exhaustive
@_SETTINGS(max_examples=1000)
@_TREES
def test_no_interleaving_of_many_random_trees_hangs_or_overruns(tree, apart, stage, transport):
    _check_tree(tree, apart, stage, transport)


# -- groups and memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_engines_on_disjoint_groups_do_not_meet(stage):
    """Two engines at the same time, on two ranks each, and one on all four."""

    def program(recording):
        pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
        model, whole = seeded(lambda: Net(depth=4))(), seeded(lambda: Net(depth=4), seed=1)()
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, whole)]
        engine = recording.shard(model, optimizers[0], zero_stage=stage, group=pairs[dist.get_rank() // 2])
        recording.shard(whole, optimizers[1], zero_stage=stage)
        for number in range(3):
            engine.backward(_loss_of_network(model, number) + _loss_of_network(whole, number))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    logs = record(program, world_size=4)
    assert problems(logs) == []
    members = [{event.members for event in log if isinstance(event, Collective)} for log in logs]
    assert members == [{(0, 1), (0, 1, 2, 3)}] * 2 + [{(2, 3), (0, 1, 2, 3)}] * 2, members


class Words(nn.Module):
    """Layers of one size between an embedding and a head that are larger than three of them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1024, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))
        self.head = nn.Linear(WIDTH, 1024, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


@pytest.mark.parametrize("stage", (2, 3))
def test_reductions_under_way_hold_no_more_than_two_layers(stage):
    """A larger one goes on by itself, and nothing does while the gradient of a larger one is made."""

    def program(recording):
        model = Words()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = recording.shard(model, optimizer, zero_stage=stage)
        for _ in range(2):
            engine.backward(model(torch.arange(4)).square().mean())
            optimizer.step()

    for log in record(program):
        layer, large = (numel * 4 * 3 // 2 for numel in (WIDTH * WIDTH, 1024 * WIDTH))  # sums over 2 ranks beside it
        moments = [held for _, held in reductions_under_way(log)]
        assert 2 * layer in moments and {held for held in moments if held > 2 * layer} <= {large}, set(moments)
        made = [
            held
            for event, held in reductions_under_way(log)
            if isinstance(event, Compute) and event.name == "embedding_dense_backward"
        ]
        assert made == [0, 0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["rooted", "adapted"])
def test_steps_leave_no_memory_behind_and_no_holes(name, stage):
    """What is held between steps stays the same, and what an allocator has to reserve for a step is found early."""

    def program(recording):
        model, loss_of = _build(name)
        optimizer = torch.optim.AdamW(model.parameters())
        engine = recording.shard(model, optimizer, zero_stage=stage)
        for number in range(6):
            engine.backward(loss_of(model, number))
            optimizer.step()
            optimizer.zero_grad()
            recording.section("between steps")

    log = record(program)[0]
    ends = [index for index, event in enumerate(log) if isinstance(event, Section)]
    allocators = [replay(log[:end]) for end in ends]
    held, reserved = [each.held for each in allocators], [each.reserved for each in allocators]
    assert len(set(held[1:])) == 1, held
    assert len(set(reserved[2:])) == 1, reserved
