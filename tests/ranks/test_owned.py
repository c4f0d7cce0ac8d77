"""Optimizers that look at whole matrices train as on one process, wherever gradients, weights and states lie."""

import contextlib
import dataclasses
import functools
import itertools
import random
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import hf_zero
from hf_zero.core.engine import ZeroEngine
from hf_zero.core.master import SliceShard
from hf_zero.tools.memory import memory_report
from tests.support.far_home import disk_homes, far_homes, host_homes
from tests.support.harness import distributed, run_ranks
from tests.support.matrix_optimizers import MAKERS
from tests.support.nets import Net, seeded


STEPS, BATCH = 3, 32  # on four ranks, 1 x 8 or 4 x 2 samples
HOMES = {
    "device": lambda: None,
    "host": host_homes,
    "far": far_homes,
    "far_slices_near": functools.partial(far_homes, parameters=False),
    "disk": functools.partial(disk_homes, tempfile.gettempdir()),
}
# Muon's iteration in bf16 would turn the last bit of a gradient, which the order of sums decides, into more than 1e-6.
DTYPES = {"muon_and_adamw": torch.float64, "soap": torch.float64}


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train."""

    optimizer: str = "muon_and_adamw"
    stage: int = 3
    accumulation: int = 1
    zero_init: bool = False
    homes: str = "device"
    clip: float | None = None
    config: tuple = ()

    def __str__(self):
        fields = dataclasses.asdict(self).items()
        return "-".join(f"{name}={value}" for name, value in fields if value != getattr(Case, name)) or "plain"


class Tied(Net):
    """Its head is the transposed input layer, and one block is frozen."""

    def __init__(self):
        super().__init__()
        self.layers[1].requires_grad_(False)
        self.tied = nn.Linear(8, 4, bias=False)
        self.again = nn.Linear(8, 4, bias=False)
        self.again.weight = self.tied.weight

    def forward(self, x):
        hidden = self.route(self.enter(x))
        return self.head(hidden + F.linear(self.tied(hidden), self.enter.weight)) + self.again(hidden)[:, :3]


def samples(number, dtype):
    draw = torch.Generator().manual_seed(number)
    return torch.randn(BATCH, 4, generator=draw).to(dtype), torch.randint(3, (BATCH,), generator=draw)


def trained(model):
    return [param for param in model.parameters() if param.requires_grad]


@functools.cache
def one_process(name, clip=None, steps=STEPS):
    """The weights after training on whole batches, without hf_zero."""
    dtype = DTYPES.get(name, torch.float32)
    model = seeded(Tied)().to(dtype)
    optimizers = MAKERS[name](trained(model))
    for step in range(steps):
        x, y = samples(step, dtype)
        F.cross_entropy(model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(trained(model), clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def prepared(case, dtype=None):
    dtype = dtype or DTYPES.get(case.optimizer, torch.float32)
    with hf_zero.zero_init() if case.zero_init else contextlib.nullcontext():
        model = seeded(Tied)().to(dtype)
    optimizers = MAKERS[case.optimizer](trained(model))
    engine = ZeroEngine(
        model, hf_zero.ZeroConfig(zero_stage=case.stage, **dict(case.config)), homes=HOMES[case.homes]()
    )
    for optimizer in optimizers:
        engine.attach_optimizer(optimizer)
    return model, optimizers, engine


def train(case, model, optimizers, engine, steps=range(STEPS)):
    """Each rank takes its part of every batch, in `accumulation` pieces."""
    pieces, rank = dist.get_world_size() * case.accumulation, dist.get_rank()
    for step in steps:
        x, y = samples(step, next(model.parameters()).dtype)
        mine = list(zip(x.chunk(pieces), y.chunk(pieces), strict=True))[rank * case.accumulation :][
            : case.accumulation
        ]
        for number, (inputs, labels) in enumerate(mine):
            with engine.no_sync() if number < len(mine) - 1 else contextlib.nullcontext():
                engine.backward(F.cross_entropy(model(inputs), labels) / case.accumulation)
        if case.clip is not None:
            engine.clip_grad_norm_(case.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def weights_of(model):
    with hf_zero.gathered_parameters(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def compare(found, wanted, what, tolerance=1e-6):
    for name, weight in wanted.items():
        apart = (found[name].double() - weight.double()).abs().max().item()
        assert apart <= tolerance, f"{what}: {name} differs by {apart:.2e}"


def check(case):
    model, optimizers, engine = prepared(case)
    assert any(isinstance(shard, SliceShard) for buffer in engine.buffers for shard in buffer.resting.shards), str(
        case
    )
    train(case, model, optimizers, engine)
    compare(weights_of(model), one_process(case.optimizer, case.clip), case)
    engine.homes.close()


def _cases():
    shapes = itertools.product(MAKERS, range(4), (1, 4), (False, True), HOMES)
    for name, stage, accumulation, zero_init, homes in shapes:
        yield Case(name, stage, accumulation, zero_init, homes, clip=0.1 if accumulation == 4 else None)


def _sample(ranks):
    """Every optimizer, and others drawn."""
    cases, draw = list(_cases()), random.Random(17 + ranks)
    return [*(Case(name, accumulation=4) for name in MAKERS), *draw.sample(cases, 8)]


def check_all(cases):
    for case in cases:
        try:
            check(case)
        except Exception as error:
            raise AssertionError(str(case)) from error


@distributed(world_size=1)
def test_one_rank_trains_as_without_hf_zero():
    check_all(_sample(1))


@distributed(world_size=2)
def test_two_ranks_train_as_one_process():
    check_all(_sample(2))


@distributed(world_size=4)
def test_four_ranks_train_as_one_process():
    check_all(_sample(4)[:10])


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks, part", [(ranks, part) for ranks in (1, 2, 4) for part in range(8)])
def test_all_cases_train_as_one_process(ranks, part):
    run_ranks(check_all, list(_cases())[part::8], world_size=ranks)


@distributed(world_size=4)
def test_nodes_and_replicas_train_as_one_process():
    nodes, replicas = (("zero_hpz_partition_size", 2),), (("mics_shard_size", 2),)
    check(Case("lamb", 3, 2, config=nodes, clip=0.1))
    check(Case("soap", 3, homes="far", config=nodes))
    check(Case("muon_and_adamw", 3, config=(*nodes, ("no_sync", "node"))))
    check(Case("lamb", 3, homes="host", config=replicas))
    check(Case("adafactor", 2, 2, config=replicas))


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=2)
def test_the_memory_report_counts_whole_matrices_and_the_gradients_of_slices(stage):
    case = Case("lamb", stage)
    model, (optimizer,), engine = prepared(case)
    train(case, model, [optimizer], engine, range(1))
    engine.backward(F.cross_entropy(model(samples(1, torch.float32)[0]), samples(1, torch.float32)[1]))
    held = sum(weight.nbytes for group in optimizer.param_groups for weight in group["params"])
    found = memory_report(model)
    assert found.categories["master weights"] == held
    assert found.categories["optimizer states"] == 2 * held == 2 * sum(unit.optimizer for unit in found.units) / 3
    slices = sum(shard.numel * 4 for buffer in engine.buffers for shard in buffer.resting.shards)
    assert found.categories["gradients"] == slices == sum(unit.gradients for unit in found.units)
    whole = torch.tensor(float(held))
    dist.all_reduce(whole)
    copies = 2 if stage == 0 else 1
    assert whole.item() == copies * 4 * sum(param.numel() for param in trained(model))


@pytest.mark.parametrize("name", ["muon_and_adamw", "lamb"])
@distributed(world_size=2)
def test_the_optimizer_ran_and_no_other_in_its_place(name):
    """Plain SGD at stage 0, and AdamW everywhere, would train too, and to other weights."""
    wanted = one_process(name)
    for other in (functools.partial(torch.optim.SGD, lr=1e-2), functools.partial(torch.optim.AdamW, lr=1e-2)):
        MAKERS["other"] = lambda params, other=other: [other(params)]
        DTYPES["other"] = DTYPES.get(name, torch.float32)
        one_process.cache_clear()
        with pytest.raises(AssertionError):
            compare(one_process("other"), wanted, "")
    for stage in range(4):
        case = Case(name, stage, accumulation=4, zero_init=stage == 3)
        model, optimizers, engine = prepared(case)
        train(case, model, optimizers, engine)
        compare(weights_of(model), wanted, case)
        kinds = {kind for state in optimizers[0].state.values() for kind in state}
        assert kinds == ({"momentum_buffer"} if name == "muon_and_adamw" else {"step", "exp_avg", "exp_avg_sq"})


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_a_step_sends_six_bytes_per_owned_parameter_however_many_micro_batches_it_has(stage):
    sent = []
    for accumulation in (1, 4):
        case = Case("lamb", stage, accumulation, config=(("mixed_precision", "bf16"),))
        model, optimizers, engine = prepared(case)
        train(case, model, optimizers, engine, range(1))
        engine.comm.traffic.clear()
        train(case, model, optimizers, engine, range(1, 2))
        mine = torch.tensor(float(engine.comm.traffic.bytes_sent["hand_over"]))
        dist.all_reduce(mine)
        sent.append(mine.item())
    owned = sum(param.numel() for param in trained(model))
    assert sent[0] == sent[1] and 0 < sent[0] <= 6 * owned, (sent, owned)


@distributed(world_size=2)
def test_masters_and_states_of_a_matrix_lie_whole_on_one_rank():
    model, (optimizer,), engine = prepared(Case("lamb"))
    train(Case("lamb"), model, [optimizer], engine, range(1))
    mine = sorted(tuple(weight.shape) for group in optimizer.param_groups for weight in group["params"])
    theirs = [None, None]
    dist.all_gather_object(theirs, mine)
    assert sorted(theirs[0] + theirs[1]) == sorted(tuple(param.shape) for param in trained(model))
    assert all(state["exp_avg"].shape == weight.shape for weight, state in optimizer.state.items())


@distributed(world_size=2)
def test_a_matrix_without_a_gradient_is_left_alone():
    """Also by momentum and weight decay, on every rank; one that the owner alone did not use is stepped."""
    for stage in range(4):
        case = Case("lamb", stage)
        model, optimizers, engine = prepared(case)
        train(case, model, optimizers, engine, range(1))
        before = weights_of(model)
        hidden = model.layers[0](model.enter(samples(1, torch.float32)[0]))
        out = model.head(hidden) if dist.get_rank() == 0 else model.tied(hidden)
        engine.backward(out.square().mean())
        optimizers[0].step()
        after = weights_of(model)
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert {"enter.weight", "layers.0.up.weight", "head.weight", "tied.weight"} <= moved, (stage, moved)
        assert not any(name.startswith(("layers.1", "layers.2")) for name in moved), (stage, moved)


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_what_is_written_to_weights_reaches_the_owner(stage):
    case = Case("lamb", stage, config=(("mixed_precision", "bf16"),))
    model, optimizers, engine = prepared(case)
    train(case, model, optimizers, engine, range(1))
    with hf_zero.gathered_parameters(model, write=True):
        model.enter.weight.data[0] = 3.0
    wanted = weights_of(model)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
    train(case, model, optimizers, engine, range(1, 2))
    found = weights_of(model)
    assert torch.equal(found["enter.weight"][0], torch.full((4,), 3.0, dtype=torch.bfloat16))
    compare(found, wanted, f"stage {stage}", tolerance=0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_an_overflow_skips_the_step(stage):
    case = Case("lamb", stage, config=(("mixed_precision", "fp16"), ("initial_scale_power", 4), ("hysteresis", 1)))
    model, optimizers, engine = prepared(case)
    train(case, model, optimizers, engine, range(1))
    before = weights_of(model)
    engine.backward(model(samples(1, torch.float32)[0]).float().mean() * float("inf"))
    optimizers[0].step()
    assert engine.step_was_skipped
    compare(weights_of(model), before, f"stage {stage}", tolerance=0)


@distributed(world_size=2)
def test_quantised_weights_are_refused_with_them():
    with pytest.raises(ValueError, match="Lamb steps whole matrices.*set zero_quantized_weights to false"):
        prepared(Case("lamb", config=(("zero_quantized_weights", True),)))
