"""Tensor parallelism beside offload, extents and quantised messages: what it is without them, and the same files."""

import contextlib
import dataclasses
import functools
import tempfile

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.core import drift
from hf_zero.core.engine import ZeroEngine
from hf_zero.core.placement import Place
from hf_zero.errors import ZeroConfigError, ZeroRuntimeError
from hf_zero.integrations.plain_loop import LoopEngine
from tests.support import zoo
from tests.support.far_home import disk_homes, far_homes
from tests.support.harness import distributed
from tests.support.late_lanes import late_homes
from tests.support.reference import ADAMW
from tests.support.tensor_models import build, whole_weights


WIDTH = 2
HOMES = {
    "far": far_homes,
    "part": functools.partial(far_homes, ratio=0.4),
    "disk": functools.partial(disk_homes, tempfile.gettempdir()),
    "late": late_homes,
    "late_disk": functools.partial(late_homes, Place.DISK, folder=tempfile.gettempdir()),
    "streamed": functools.partial(late_homes, step="device"),
}


@dataclasses.dataclass
class Run:
    seen: list  # losses and norms
    weights: dict  # whole
    states: dict  # whole, of the optimizer
    engine: object


def train(name="llama", homes=None, width=WIDTH, steps=2, accumulation=2, **config):
    model = build(name, width)
    optimizer = ADAMW(model.parameters())
    engine = ZeroEngine(model, hf_zero.ZeroConfig.from_any(config), homes=homes)
    engine.attach_optimizer(optimizer)
    seen = []
    for step in range(steps):
        for number in range(accumulation):
            with contextlib.nullcontext() if number == accumulation - 1 else engine.no_sync():
                loss = model(**zoo.batch(name, dist.get_rank() // width, step * accumulation + number)).loss
                engine.backward(loss)
            seen.append(loss.item())
        seen.append(engine.clip_grad_norm_(0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return Run(seen, whole_weights(model), optimizer.state_dict()["state"], engine)


def differences(found, wanted):
    """Whatever differs in any bit."""
    lines = [] if found.seen == wanted.seen else [f"losses and norms: {found.seen}, not {wanted.seen}"]
    lines += [name for name, weight in wanted.weights.items() if not torch.equal(found.weights[name], weight)]
    for name, states in wanted.states.items():
        for kind, value in states.items():
            other = found.states[name][kind]
            same = torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value
            lines += [] if same else [f"{kind} of {name}"]
    return lines


def apart(found, wanted):
    """The largest difference of a loss, norm or weight."""
    numbers = max(abs(one - other) for one, other in zip(found.seen, wanted.seen, strict=True))
    return max(numbers, *((found.weights[name] - weight).abs().max() for name, weight in wanted.weights.items()))


# -- offload ----------------------------------------------------------------------------------------------------------


@distributed(world_size=4)
def _offload(name, names_of_homes, stages, **config):
    for stage in stages:
        wanted = train(name, zero_stage=stage, **config)
        for homes in names_of_homes:
            found = differences(train(name, HOMES[homes](), zero_stage=stage, **config), wanted)
            assert not found, (homes, stage, found)


# Masters of the second case are cut inside of what the second tensor-parallel rank counts in a norm.
@pytest.mark.parametrize("name, homes, stage, precision", [("qwen3", "disk", 3, "bf16"), ("phi3", "far", 0, "no")])
def test_no_bit_differs_where_masters_are_away(name, homes, stage, precision):
    _offload(name, [homes], [stage], mixed_precision=precision)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
def test_no_bit_differs_in_any_case(name, precision):
    _offload(name, list(HOMES), range(4), mixed_precision=precision)


@distributed(world_size=2)
def test_one_group_owes_steps_as_several_do():
    """No other data-parallel rank: only parameters that may leave the device are released."""
    for stage in (0, 3):
        assert not differences(train(homes=far_homes(), zero_stage=stage), train(zero_stage=stage)), stage


def _files(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}


@distributed(world_size=4)
def test_steps_that_are_owed_are_in_the_files(tmp_path):
    found = []
    for kind, homes in (("near", None), ("far", far_homes()), ("disk", HOMES["disk"]())):
        model = build("llama", WIDTH)
        optimizer = ADAMW(model.parameters())
        engine = LoopEngine(model, hf_zero.ZeroConfig(zero_stage=3), homes=homes)
        engine.attach_optimizer(optimizer)
        engine.backward(model(**zoo.batch("llama", dist.get_rank() // WIDTH, 0)).loss)
        optimizer.step()
        engine.save_checkpoint(tmp_path / kind)
        dist.barrier()
        found.append(_files(tmp_path / kind))
    assert found[0] and found[0] == found[1] == found[2]


@distributed(world_size=2)
def test_a_full_disk_of_one_rank_is_an_error_on_all(tmp_path):
    """Both are alone among data-parallel ranks, so nobody else would tell the other one."""
    homes = disk_homes(str(tmp_path))
    if dist.get_rank() == 1:
        homes.optimizer.reserved = _full
    with pytest.raises(ZeroRuntimeError, match="rank 1: no room"):
        ZeroEngine(build("llama", WIDTH), hf_zero.ZeroConfig(zero_stage=3), homes=homes)


def _full(nbytes):
    raise ZeroRuntimeError("no room")


# -- extents and quantised messages -----------------------------------------------------------------------------------


NODES, REPLICAS = {"zero_hpz_partition_size": 2}, {"mics_shard_size": 2}
BOTH = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
FOUR = {"zero_quantized_gradients": True, "quantized_gradient_bits": 4, "zeropp_loco_param": {"err_beta": 0.8}}
EXACT = [
    (3, NODES),
    (3, {**NODES, "no_sync": "node"}),
    (3, {**NODES, "peer_memory": False}),
    (3, REPLICAS),
    (2, {**REPLICAS, "no_sync": "local"}),
    (1, REPLICAS),
    (3, {"rank_weights": [1, 2, 1, 1]}),
    (2, {"rank_weights": [1, 2, 1, 1]}),
]
QUANTISED = [
    (3, {**BOTH, **NODES}),
    (3, {**BOTH, "peer_memory": False}),
    (2, {"zero_quantized_gradients": True, "peer_memory": False}),
    (3, {**BOTH, **REPLICAS}),
    (3, {**FOUR, **NODES}),
]


def _one_of(cases, usual):
    marks = [[pytest.mark.exhaustive] * (number != usual) for number in range(len(cases))]
    return [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks, strict=True)]


@pytest.mark.parametrize("stage, config", _one_of(EXACT, 1))
@distributed(world_size=8)
def test_extents_change_the_order_of_sums_at_most(stage, config):
    found = train("qwen3", zero_stage=stage, **config)
    assert apart(found, train("qwen3", zero_stage=stage)) <= 1e-6
    assert drift.mend(found.engine) == []


@pytest.mark.exhaustive
@distributed(world_size=8)
def test_nodes_and_replicas_make_the_same_sums():
    first = train(zero_stage=3, accumulation=1, **NODES)
    for stage, config in ((3, REPLICAS), (1, REPLICAS)):
        assert not differences(train(zero_stage=stage, accumulation=1, **config), first), (stage, config)


@pytest.mark.parametrize("stage, config", _one_of(QUANTISED, 0))
@distributed(world_size=8)
def test_quantised_messages_stay_within_their_bounds_and_leave_copies_alike(stage, config):
    found, wanted = train(zero_stage=stage, steps=3, **config), train(zero_stage=stage, steps=3)
    assert found.seen != wanted.seen
    assert drift.mend(found.engine) == []
    errors = [None] * 8  # by which each rank decides whether to go on quantising
    dist.all_gather_object(errors, [each.error for each in found.engine.mesh.quantised])
    assert all(each == errors[0] for each in errors), errors
    for each in found.engine.mesh.quantised:
        assert 0 < each.error <= each.limit and each.codec is not None, (each.kind, each.error)
    ours, theirs = (torch.cat([each.flatten() for each in run.weights.values()]) for run in (found, wanted))
    assert (ours - theirs).norm() / theirs.norm() <= 0.02


@distributed(world_size=4)
def test_what_does_not_go_together_is_refused():
    for config, says in (
        ({**BOTH, "offload_optimizer_device": "cpu"}, "zero_quantized_weights and offload_optimizer_device.*together"),
        ({"zero_hpz_partition_size": 4}, "zero_hpz_partition_size is 4.*2 ranks share one copy"),
        ({"node_size": 3}, "node_size is 3.*there are 4 ranks"),
    ):
        with pytest.raises(ZeroConfigError, match=says):
            hf_zero.shard(build("llama", WIDTH), None, {"zero_stage": 3, **config})
