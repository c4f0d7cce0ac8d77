"""Checkpoints do not tell where state has rested: the same bytes, to be resumed from anywhere, one shard at a time."""

import functools
import hashlib
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.checkpoint import staging
from hf_zero.integrations.plain_checkpoints import LoopEngine
from tests.ranks.test_offload import Wide
from tests.support.far_home import disk_homes, far_homes
from tests.support.harness import distributed, run_ranks
from tests.support.nets import batches, micro, seeded


HOMES = {
    "device": lambda: None,
    "far": far_homes,
    "part": functools.partial(far_homes, ratio=0.4),
    "disk": functools.partial(disk_homes, tempfile.gettempdir()),
}


def _prepared(homes, stage=3, asynchronous=False):
    model = seeded(Wide)()
    for param in model.layers[0].parameters():
        param.requires_grad_(False)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    config = hf_zero.ZeroConfig(zero_stage=stage, async_save=asynchronous)
    engine = LoopEngine(model, config, homes=HOMES[homes]())
    engine.attach_optimizer(optimizer)
    return model, optimizer, engine


def _step(model, optimizer, engine, number, ranks=None):
    rank = dist.get_rank() if ranks is None else 0
    micro(model, batches(rank, number), engine.backward)
    engine.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()


def _whole(model, optimizer):
    with hf_zero.gathered_parameters(model):
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return weights, optimizer.state_dict()["state"]


def _hashes(folder):
    files = sorted(Path(folder).rglob("*.safetensors"))
    assert len(files) >= 2, files
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _save(folder, homes, asynchronous=False):
    torch.manual_seed(0)
    model, optimizer, engine = _prepared(homes, asynchronous=asynchronous)
    for number in range(2):
        _step(model, optimizer, engine, number)
    engine.save_checkpoint(folder)
    for number in range(2, 4):
        _step(model, optimizer, engine, number)
    engine.wait_for_checkpoint()
    return _whole(model, optimizer)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_files_are_the_same(tmp_path, asynchronous):
    run_ranks(_save_everywhere, tmp_path, asynchronous)
    found = {homes: _hashes(tmp_path / homes) for homes in HOMES}
    assert all(hashes == found["device"] for hashes in found.values()), found


def _save_everywhere(folder, asynchronous):
    for homes in HOMES:
        _save(folder / homes, homes, asynchronous)


@pytest.mark.parametrize("saved, loaded, stage", [("device", "far", 3), ("disk", "device", 1), ("far", "disk", 2)])
def test_a_run_is_resumed_at_another_place_and_stage(tmp_path, saved, loaded, stage):
    run_ranks(_save_and_resume, tmp_path / "saved", saved, loaded, stage)


def _save_and_resume(folder, saved, loaded, stage):
    weights, states = _save(folder, saved)
    model, optimizer, engine = _prepared(loaded, stage)
    _step(model, optimizer, engine, 7)  # what is loaded takes the place of everything, a step that is owed included
    engine.load_checkpoint(folder)
    for number in range(2, 4):
        _step(model, optimizer, engine, number)
    found, others = _whole(model, optimizer)
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    for name, state in states.items():
        assert all(torch.equal(others[name][kind], value) for kind, value in state.items()), name


def test_a_run_is_resumed_by_another_number_of_ranks(tmp_path):
    run_ranks(_save, tmp_path / "saved", "far")
    (one,) = run_ranks(_load_only, tmp_path / "saved", "device", world_size=1)
    for loaded in run_ranks(_load_only, tmp_path / "saved", "disk", world_size=3):
        assert all(torch.equal(loaded[0][name], value) for name, value in one[0].items())
        for name, state in one[1].items():
            assert all(torch.equal(loaded[1][name][kind], value) for kind, value in state.items()), name


def _load_only(folder, homes):
    model, optimizer, engine = _prepared(homes)
    engine.load_checkpoint(folder)
    return _whole(model, optimizer)


@distributed(world_size=2)
def test_saving_and_loading_keep_one_shard_open(tmp_path):
    model, optimizer, engine = _prepared("far")
    _step(model, optimizer, engine, 0)
    engine.settle()
    home = engine.homes.optimizer
    home.most_open = 0
    engine.save_checkpoint(tmp_path / "saved")
    engine.load_checkpoint(tmp_path / "saved")
    assert 1 <= home.most_open <= 2, "a shard, and the copy that follows it"


@distributed(world_size=2)
def test_ranks_that_see_no_common_folder_save_the_same(tmp_path):
    whole = staging.find_writers

    def apart(folder, job):
        found = whole(folder, job)
        return staging.Writers(creators=found.creators, shared=False)

    found = {}
    for homes in ("device", "far"):
        staging.find_writers = apart
        _save(tmp_path / homes, homes)
        dist.barrier()
        found[homes] = _hashes(tmp_path / homes)
    assert found["far"] == found["device"], found
