"""Sharded inside nodes or replicas, training gives DDP's numbers, sends little between nodes, and resumes anywhere."""

import contextlib
import dataclasses
import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.comm.topology import Link
from hf_zero.core.engine import engine_of
from hf_zero.errors import ZeroConfigError
from tests.ranks.test_memory import batch, build, check_bytes, live_bytes
from tests.ranks.test_plain_checkpoints import Loop, _go_on
from tests.support.harness import distributed, run_ranks
from tests.support.nets import Net, batches, micro, seeded
from tests.support.networks import NETWORKS
from tests.support.reference import ADAMW, SGD, Plan, check_stages, whole_weights


RECIPES = Path(__file__).parents[2] / "recipes/accelerate_configs"
NODES = {"zero_hpz_partition_size": 2, "node_size": 2}
REPLICAS = {"mics_shard_size": 2, "node_size": 2}
ROWS = [
    (3, NODES),
    (3, {**NODES, "no_sync": "node"}),
    (3, {**NODES, "peer_memory": False, "stage3_param_persistence_threshold": 20}),
    (3, REPLICAS),
    (3, {**REPLICAS, "no_sync": "node"}),
    (2, {**REPLICAS, "no_sync": "local"}),
    (1, {"mics_shard_size": 2}),
]


@pytest.mark.parametrize("stage, config", ROWS)
@distributed(world_size=4)
def test_the_numbers_are_those_of_one_large_group(stage, config):
    check = functools.partial(check_stages, stages=[stage], config=config, micro=micro)
    check(seeded(functools.partial(Net, depth=3)), batches, Plan(accumulation=3, clip=0.1), optimizer=ADAMW)
    check(seeded(NETWORKS["frozen"]), batches, Plan(steps=2), optimizer=SGD)


@distributed(world_size=8)
def test_replicas_that_span_two_nodes_give_the_same_numbers():
    config = {"mics_shard_size": 4, "zero_hpz_partition_size": 2, "node_size": 2}
    build_net = seeded(functools.partial(Net, depth=2))
    for more in ({}, {"no_sync": "node"}):
        check_stages(
            build_net, batches, Plan(accumulation=2, clip=0.1), stages=[3], config={**config, **more}, micro=micro
        )


def _sums_in_hops(model, gradients):
    """The mean gradient over four ranks, added up inside each node first."""
    for param, parts in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
        param.grad = ((parts[0] + parts[1]) + (parts[2] + parts[3])) / 4


@distributed(world_size=4)
def test_sums_are_made_inside_the_node_first_bit_for_bit():
    make = seeded(functools.partial(Net, depth=3))
    plain, model = make(), make()
    theirs = SGD(plain.parameters())
    ours = SGD(model.parameters())
    engine = hf_zero.shard(model, ours, {"zero_stage": 3, **NODES})
    for step in range(6):
        mine = []
        for rank in range(4):
            micro(plain, batches(rank, step), torch.Tensor.backward)
            mine.append([param.grad for param in plain.parameters()])
            plain.zero_grad()
        _sums_in_hops(plain, mine)
        theirs.step()
        micro(model, batches(dist.get_rank(), step), engine.backward)
        ours.step()
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
    for name, value in whole_weights(model).items():
        assert torch.equal(value, dict(plain.named_parameters())[name]), name


# -- bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("no_sync", ["reduce", "node"])
@distributed(world_size=4)
def test_only_refreshed_weights_and_sums_leave_the_node(no_sync, accumulation):
    model = seeded(functools.partial(Net, depth=3))()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = hf_zero.shard(model, optimizer, {"zero_stage": 3, **NODES, "no_sync": no_sync, "mixed_precision": "bf16"})
    steps, nodes = 3, 2
    engine.comm.traffic.clear()
    for step in range(steps):
        for number in range(accumulation):
            with engine.no_sync() if number < accumulation - 1 else contextlib.nullcontext():
                micro(model, batches(dist.get_rank(), step * accumulation + number), engine.backward)
        optimizer.step()
        optimizer.zero_grad()
    sent = engine.comm.traffic.sent
    slices = sum(buffer.layout.slice_numel for buffer in engine.buffers)
    reductions = 1 if no_sync == "node" else accumulation
    assert sent["all_gather", Link.NET] == steps * slices * 2 * (nodes - 1)
    assert sent["reduce_scatter", Link.NET] == steps * reductions * slices * 4 * (nodes - 1)


@pytest.mark.parametrize("config, per_param", [(NODES, 2 / 2 + 12 / 4), (REPLICAS, 12 / 2)])
@distributed(world_size=4)
def test_resident_bytes(config, per_param):
    before = live_bytes()
    model = build()
    numel = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    engine = hf_zero.shard(model, optimizer, {"zero_stage": 3, "mixed_precision": "bf16", **config})
    for step in range(2):
        engine.backward(model(**batch(model, step)).loss)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    engine.mesh.fence()
    check_bytes(live_bytes() - before, per_param * numel, "after the step")


# -- reading, writing, saving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{**NODES, "no_sync": "node"}, {**REPLICAS, "no_sync": "node"}])
@distributed(world_size=4)
def test_gradients_and_weights_are_read_and_written_between_passes(config):
    def run(**config):
        model = seeded(functools.partial(Net, depth=2))()
        optimizer = SGD(model.parameters())
        engine = hf_zero.shard(model, optimizer, {"zero_stage": 3, **config})
        seen = []
        for number in range(4):
            with engine.no_sync() if number % 2 == 0 else contextlib.nullcontext():
                micro(model, batches(dist.get_rank(), number), engine.backward)
            seen.append(model.layers[1].up.weight.grad.clone())
            if number % 2:
                weight = model.layers[0].up.weight
                weight.grad = weight.grad * 2
                optimizer.step()
                optimizer.zero_grad()
                with hf_zero.gathered_parameters(model.head, write=True):
                    model.head.weight.data.mul_(1.5)
                with torch.no_grad():
                    seen.append(model(batches(0, 9)[0]))
        with engine.no_sync():
            micro(model, batches(dist.get_rank(), 5), engine.backward)
        optimizer.step()
        return [*seen, *whole_weights(model).values()]

    for ours, plain in zip(run(**config), run(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def _save(folder, **config):
    loop = Loop(3, **config)
    loop.train(3)
    loop.save(folder)
    return loop.train(3)


def _files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"}


def _weights_at_start(folder, **config):
    Loop(3, **config).save(folder)


@pytest.mark.parametrize("config", [NODES, REPLICAS])
def test_it_resumes_with_other_extents_and_the_same_files(tmp_path, config):
    run_ranks(_weights_at_start, tmp_path / "plain", world_size=4)
    run_ranks(_weights_at_start, tmp_path / "extents", world_size=4, **config)
    plain, ours = _files(tmp_path / "plain"), _files(tmp_path / "extents")
    assert plain and plain.keys() == ours.keys()
    assert [name for name in plain if plain[name] != ours[name]] == []

    whole = run_ranks(_save, tmp_path / "saved", world_size=4, **config)[0]
    assert run_ranks(_go_on, tmp_path / "saved", 3, world_size=4, **config)[0] == whole
    for stage, ranks, other in ((3, 2, {}), (3, 4, REPLICAS if config is NODES else NODES)):
        resumed = run_ranks(_go_on, tmp_path / "saved", stage, world_size=ranks, **other)[0]
        assert max(abs(a - b) for a, b in zip(whole, resumed, strict=True)) <= 1e-6, (ranks, other)


@pytest.mark.parametrize("name, replicas, nodes", [("zero3_hpz", 1, 2), ("fsdp_hybrid", 2, 1)])
@distributed(world_size=4)
def test_a_launcher_file_takes_the_ranks_of_each_machine(monkeypatch, name, replicas, nodes):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = hf_zero.ZeroConfig.from_any(RECIPES / f"{name}.yaml")
    config = dataclasses.replace(config, mixed_precision="no")
    topology = hf_zero.shard(nn.Linear(4, 4), config=config).mesh.topology
    assert (topology.replicas, topology.nodes, topology.local, topology.machine) == (replicas, nodes, 2, 2)


# -- what cannot be arranged --------------------------------------------------------------------------------------


@distributed(world_size=4)
def test_extents_that_do_not_fit_the_ranks_are_refused_with_those_that_do():
    for config, says in [
        ({"zero_hpz_partition_size": 3}, "zero_hpz_partition_size is 3, but 4 ranks share.*one of 1, 2, 4"),
        ({"mics_shard_size": 8}, "mics_shard_size is 8, but there are 4 ranks: set it to one of 1, 2, 4"),
        ({"mics_shard_size": 1}, "set zero_stage to 0"),
        ({"node_size": 3}, "node_size is 3"),
    ]:
        with pytest.raises(ZeroConfigError, match=says):
            hf_zero.shard(nn.Linear(2, 2), config={"zero_stage": 3, **config})
    one = hf_zero.shard(nn.Linear(4, 4), config={"zero_stage": 3, "zero_hpz_partition_size": 4, "node_size": 4})
    assert one.mesh.topology.is_plain
    assert engine_of(one.model) is one


@distributed(world_size=6)
def test_uneven_machines_are_named_with_the_largest_node_that_fits(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4" if dist.get_rank() < 4 else "2")
    with pytest.raises(ZeroConfigError, match=r"is 3, but the machines have 2 and 4 ranks.*set it to 2"):
        hf_zero.shard(nn.Linear(2, 2), config={"zero_stage": 3, "zero_hpz_partition_size": 3})
