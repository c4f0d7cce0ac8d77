"""The memory report knows places: what is in memory, and what rests elsewhere, adds up to all state there is."""

import tempfile

import pytest
import torch

import hf_zero
from hf_zero.core.engine import ZeroEngine
from hf_zero.core.heap import _Heap
from hf_zero.core.placement import Place
from hf_zero.planning.model import BatchShape
from hf_zero.planning.places import Places
from hf_zero.planning.trace import Scenario, trace
from tests.ranks.test_memory import batch, build
from tests.ranks.test_offload_disk import shard, train
from tests.support.far_home import disk_homes, host_homes
from tests.support.harness import distributed, run_ranks
from tests.support.late_lanes import late_homes
from tests.support.resident import anonymous_bytes


def _train(homes):
    model = build(hidden=64)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = ZeroEngine(model, hf_zero.ZeroConfig(zero_stage=3, mixed_precision="bf16"), homes=homes)
    engine.attach_optimizer(optimizer)
    engine.backward(model(**batch(model)).loss)
    optimizer.step()
    optimizer.zero_grad()
    engine.settle()
    return engine, hf_zero.memory_report(model)


@distributed(world_size=2)
def test_state_on_disk_is_not_in_memory():
    engine, report = _train(disk_homes(tempfile.gettempdir(), limit=4096))
    _, resident = _train(None)
    trained = sum(shard.numel for buffer in engine.buffers for shard in buffer.master_shards)
    assert report.elsewhere["disk"] == {
        "master weights": 4 * trained,
        "optimizer states": 8 * trained,
        "parameters": 2 * trained,
    }
    states = sum(len(optimizer.state) for optimizer in engine.optimizers)
    assert report.state_bytes <= 64 * states, ("step counts and shells", report.categories)
    assert resident.elsewhere == {} and abs(resident.state_bytes / (12 * trained) - 1) < 0.01
    slots = report.elsewhere["host"]["buffers"]
    assert 0 < slots <= 3 * 4 * 4096 * 4, slots  # three buffers, for weights, gradient-free: master and two states
    for unit in report.units:
        assert unit.optimizer > 0, "units say what is theirs, wherever it rests"
    assert "master weights, disk" in str(report)


def _given_back(folder):
    """Bytes that leave memory as steps that are owed are made, and those of the gradients that these need."""
    model, optimizer, engine = shard(folder, depth=10, width=2048)
    train(model, optimizer, engine, 2, width=2048)
    kept = []
    for layer in model.layers[1:]:  # small things that stay lie between the gradients
        layer.register_full_backward_hook(lambda *_: kept.append(torch.zeros(4096)))
    train(model, optimizer, engine, 1, width=2048)
    before = anonymous_bytes()
    engine.settle()
    return before - anonymous_bytes(), 4 * sum(len(each) for each in engine.masters)


def test_gradients_leave_memory_when_the_steps_are_made_that_they_are_owed_to(tmp_path):
    """Or the C library would keep as much memory, in pieces that fit nothing, as the disk has taken over."""
    for left, gradients in run_ranks(_given_back, str(tmp_path)):
        assert left >= gradients - 2 * _Heap._EVERY, (left / 1e6, gradients / 1e6)


@pytest.mark.parametrize("weights", ["none", "nvme"])
@distributed(world_size=2)
def test_the_plan_is_what_rests(weights, tmp_path):
    """The engine that is planned with is the one that trains: at rest the same bytes, in memory and on disk."""
    folder = {"offload_optimizer_nvme_path": str(tmp_path), "offload_param_nvme_path": str(tmp_path)}
    config = hf_zero.ZeroConfig(
        zero_stage=3, offload_optimizer_device="nvme", offload_param_device=weights, sub_group_size=1 << 17, **folder
    )
    scenario = Scenario(config=config, world_size=2, batch=BatchShape(rows=2, length=16), backend="gloo")
    with torch.device("meta"):
        model = build(hidden=256)
    plan = trace(model, scenario)
    model = build(hidden=256)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = hf_zero.shard(model, optimizer, config)
    for _ in range(2):
        engine.backward(model(**batch(model)).loss)
        optimizer.step()
        optimizer.zero_grad()
    report = hf_zero.memory_report(model)
    assert report.categories["gradients"] > 1e6, "steps that are owed need them"
    assert report.elsewhere["disk"] == plan.disk and sum(plan.disk.values()) > 1e6, (report.elsewhere, plan.disk)
    assert abs(report.state_bytes / plan.resident_bytes - 1) < 0.01, (report.categories, plan.resident)
    assert abs(report.elsewhere["host"]["buffers"] / plan.host["buffers"] - 1) < 0.01, (report.elsewhere, plan.host)


@pytest.mark.parametrize(
    "stage, weights, step",
    [
        (1, Place.DEVICE, "host"),
        (2, Place.DEVICE, "device"),
        (3, Place.DEVICE, "host"),
        (3, Place.HOST, "host"),
        (3, Place.HOST, "device"),
    ],
)
@distributed(world_size=2)
def test_the_plan_is_what_crosses_the_bus(stage, weights, step):
    """What a GPU is planned to copy in a step is what is copied where the device is played by other memory."""
    config = hf_zero.ZeroConfig(zero_stage=stage, mixed_precision="bf16")
    places = {**Places(optimizer=Place.HOST, parameters=weights).options(), "offload_step": step}
    with torch.device("meta"):
        model = build(hidden=64)
    shape = BatchShape(rows=2, length=8)
    plan = trace(model, Scenario(config=config.replace(**places), world_size=2, batch=shape, accumulation=2))
    model = build(hidden=64)
    engine = ZeroEngine(model, config, homes=late_homes(weights, step=step))
    optimizer = torch.optim.AdamW(model.parameters())
    engine.attach_optimizer(optimizer)
    copied = []
    for _ in range(3):
        with engine.no_sync():
            engine.backward(model(**batch(model)).loss)
        engine.backward(model(**batch(model)).loss)
        optimizer.step()
        optimizer.zero_grad()
        copied.append(engine.homes.host.courier.moved.total())
    assert copied[2] - copied[1] == plan.pcie_bytes > 0, (copied, plan.pcie_bytes)


@distributed(world_size=2)
def test_the_host_of_cpu_ranks_is_the_device():
    _, report = _train(host_homes())
    _, resident = _train(None)
    assert report.categories == resident.categories, "no second copy"
    assert report.elsewhere["host"] == {
        kind: resident.categories[kind] - (0 if kind == "master weights" else _counts(resident))
        for kind in ("master weights", "optimizer states")
    }


def _counts(report):
    """Bytes of step counts, which are no flat state."""
    return report.categories["optimizer states"] - 2 * report.categories["master weights"]
