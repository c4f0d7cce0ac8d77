"""`accelerator.save_state` replaces a folder when the new one is complete, and `load_state` reads what was saved."""

import errno
import os
import random
from pathlib import Path

import pytest
import torch
from accelerate.utils import ProjectConfiguration

import hf_zero
from hf_zero.checkpoint import commit
from hf_zero.errors import ZeroCheckpointError
from tests.ranks.test_checkpoint_faults import _die_at
from tests.support.harness import distributed, run_ranks


class Loop:
    """A model under Accelerate that makes seeded steps."""

    def __init__(self, asynchronous=False, **project):
        plugin = hf_zero.ZeroPlugin(zero_stage=3, async_save=asynchronous)
        self.accelerator = hf_zero.ZeroAccelerator(
            zero_plugin=plugin, project_config=ProjectConfiguration(**project) if project else None
        )
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)

    def steps(self, number=3):
        losses = []
        for _ in range(number):
            loss = self.model(torch.randn(4, 8)).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, folder=None):
        self.accelerator.save_state(folder)
        self.accelerator.saves.wait()

    def load(self, folder=None):
        self.accelerator.load_state(folder)


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


FAILURES = {"tensors": (os, "pwrite"), "schedule": (torch, "save"), "marker": (commit, "write_marker")}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("what, rank", [("tensors", 1), ("schedule", 0), ("schedule", 1), ("marker", 0)])
@distributed(world_size=2)
def test_a_save_that_fails_leaves_the_one_before(tmp_path, what, rank, asynchronous):
    loop, folder = Loop(asynchronous), tmp_path / "state"
    loop.steps()
    loop.save(folder)
    before, expected = contents(folder), loop.steps()
    place, name = FAILURES[what]
    working = getattr(place, name)
    if loop.accelerator.process_index == rank:
        setattr(place, name, no_space)
    with pytest.raises(ZeroCheckpointError, match=f"rank {rank} of 2 failed: .*No space left"):
        loop.save(folder)
    setattr(place, name, working)
    loop.accelerator.wait_for_everyone()
    assert contents(folder) == before, "the folder has changed"
    assert os.listdir(tmp_path) == ["state"], os.listdir(tmp_path)
    loop.load(folder)
    assert loop.steps() == expected, "the state before was not restored"
    loop.save(folder)
    commit.check_tensors(folder)


def _save_and_die(folder, rank, call):
    loop = Loop()
    loop.steps()
    loop.save(folder)
    loop.steps()
    count = _die_at(rank, call)
    loop.save(folder)
    return count[0]


def _load(folder):
    loop = Loop()
    loop.load(folder)
    return loop.steps()


def _losses_after_each_save():
    loop = Loop()
    loop.steps()
    return loop.steps(), loop.steps()


def test_a_rank_that_is_killed_while_saving_leaves_one_or_the_other(tmp_path):
    saved = run_ranks(_losses_after_each_save)[0]
    totals = run_ranks(_save_and_die, str(tmp_path / "whole/state"), 0, -1)
    draw = random.Random(3)
    points = [(rank, draw.randint(1, totals[rank])) for rank in (0, 1, 0, 1)] + [(0, totals[0] - k) for k in range(4)]
    for number, (rank, call) in enumerate(points):
        folder = tmp_path / str(number) / "state"
        with pytest.raises(pytest.fail.Exception):
            run_ranks(_save_and_die, str(folder), rank, call)
        losses = run_ranks(_load, str(folder))[0]
        assert losses in saved, f"killed at operation {call} of rank {rank}: neither state was read"


def put(folder, text):
    """A folder that is marked as complete."""
    folder.mkdir(parents=True)
    (folder / "scheduler.bin").write_text(text)
    commit.write_marker(folder, {})


def test_what_was_interrupted_between_the_renames_is_finished(tmp_path):
    built, final = tmp_path / "uncommitted/state", tmp_path / "state"
    put(built, "new")
    put(tmp_path / "uncommitted/state.replaced", "old")
    (tmp_path / "uncommitted/state.replaced/notes.txt").write_text("of the user")
    commit.finish_interrupted(built, final)
    assert (final / "scheduler.bin").read_text() == "new"
    assert (final / "notes.txt").exists() and os.listdir(tmp_path) == ["state"]

    put(tmp_path / "uncommitted/state.replaced", "older")
    (tmp_path / "uncommitted/state.replaced/more.txt").write_text("of the user")
    commit.finish_interrupted(built, final)
    assert (final / "scheduler.bin").read_text() == "new" and (final / "more.txt").exists()


def test_a_rename_that_fails_puts_back_what_was_there(tmp_path, monkeypatch):
    built, final = tmp_path / "uncommitted/state", tmp_path / "state"
    put(built, "new")
    put(final, "old")
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: no_space() if (a, b) == (built, final) else rename(a, b))
    with pytest.raises(OSError, match="No space"):
        commit.place(built, final)
    assert (final / "scheduler.bin").read_text() == "old"


@distributed(world_size=2)
def test_files_of_the_user_and_links_stay(tmp_path):
    loop, folder = Loop(), tmp_path / "elsewhere/state"
    main = loop.accelerator.is_main_process
    if main:
        (folder / "logs").mkdir(parents=True)
        (folder / "logs/events").write_text("of the user")
        (tmp_path / "link").symlink_to(folder)
    loop.accelerator.wait_for_everyone()
    for _ in range(2):
        loop.steps(1)
        loop.save(tmp_path / "link")
    assert (folder / "logs/events").read_text() == "of the user"
    assert (tmp_path / "link").is_symlink()
    expected = loop.steps()
    loop.load(tmp_path / "link")
    assert loop.steps() == expected


@distributed(world_size=2)
def test_a_folder_that_cannot_be_replaced_is_refused_before_anything_is_written(tmp_path):
    loop = Loop()
    if loop.accelerator.is_main_process:
        (tmp_path / "here/below").mkdir(parents=True)
        (tmp_path / "file").write_text("in the way")
    loop.accelerator.wait_for_everyone()
    os.chdir(tmp_path / "here/below")
    for place in (".", "..", tmp_path / "here"):
        with pytest.raises(ZeroCheckpointError, match="is the current folder, or above it, so it cannot be replaced"):
            loop.save(place)
    with pytest.raises(ZeroCheckpointError, match="file is a file: give a folder"):
        loop.save(tmp_path / "file")
    assert sorted(os.listdir(tmp_path)) == ["file", "here"] and os.listdir(tmp_path / "here") == ["below"]


# ------------------------------------------------------------------------------------------------ numbered checkpoints


@pytest.mark.parametrize("asynchronous", [False, True])
@distributed(world_size=2)
def test_the_limit_counts_when_the_new_checkpoint_is_complete(tmp_path, asynchronous):
    loop = Loop(asynchronous, project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    folder = tmp_path / "checkpoints"
    loop.steps()
    loop.save()
    expected = loop.steps()
    working = os.pwrite
    if loop.accelerator.process_index == 1:
        os.pwrite = no_space
    with pytest.raises(ZeroCheckpointError, match="rank 1 of 2 failed"):
        loop.save()
    os.pwrite = working
    loop.accelerator.wait_for_everyone()
    assert os.listdir(folder) == ["checkpoint_0"]
    loop.load()
    assert loop.steps() == expected
    loop.save()
    (left,) = folder.iterdir()
    assert left.name != "checkpoint_0" and commit.is_committed(left), left
    expected = loop.steps()
    loop.load()
    assert loop.steps() == expected
    loop.accelerator.project_configuration.iteration = int(left.name.removeprefix("checkpoint_"))
    with pytest.raises(ValueError, match=f"{left.name} exists"):
        loop.save()


@distributed(world_size=2)
def test_a_numbered_checkpoint_that_lacked_its_name_is_found(tmp_path):
    loop = Loop(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    loop.save()
    loop.steps()
    loop.save()
    expected = loop.steps()
    if loop.accelerator.is_main_process:
        (tmp_path / "uncommitted/checkpoint_5").mkdir(parents=True)  # torn
        (tmp_path / "checkpoints/checkpoint_1").rename(tmp_path / "uncommitted/checkpoint_1")
    loop.accelerator.wait_for_everyone()
    loop.load()
    assert loop.steps() == expected
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_0", "checkpoint_1"]


# ------------------------------------------------------------------------------------------------------- verification


def _change_step_count(path):
    content = path.read_bytes()
    changed = content.replace(rb"\"tensor\": 3.0", rb"\"tensor\": 9.0")
    assert changed != content
    path.write_bytes(changed)


def _zeros(path):
    content = bytearray(path.read_bytes())
    content[100:160] = bytes(60)
    path.write_bytes(content)


def _remove(path):
    path.unlink()


DAMAGES = {
    "step count": ("zero_state.safetensors", _change_step_count, "is damaged: it has other bytes"),
    "schedule": ("scheduler.bin", _zeros, "is damaged: it has other bytes"),
    "random state": ("random_states_1.pkl", _zeros, "is damaged: it has other bytes"),
    "lost": ("random_states_1.pkl", _remove, "is missing from a committed checkpoint"),
}


@distributed(world_size=2)
def test_what_was_changed_is_named_on_all_ranks(tmp_path):
    import shutil

    loop, folder = Loop(), tmp_path / "state"
    loop.steps()
    loop.save(folder)
    for name, (file, damage, words) in DAMAGES.items():
        copy = tmp_path / name
        if loop.accelerator.is_main_process:
            shutil.copytree(folder, copy)
            damage(copy / file)
        loop.accelerator.wait_for_everyone()
        with pytest.raises(ZeroCheckpointError, match=f"rank 0 of 2 failed: .*{file} {words}"):
            loop.load(copy)


@distributed(world_size=2)
def test_what_one_rank_alone_sees_damaged_is_named_on_all(tmp_path):
    """Ranks with folders of their own."""
    loop = Loop()
    loop.steps()
    for rank in range(2):
        loop.save(tmp_path / str(rank))
    if loop.accelerator.process_index == 1:
        _zeros(tmp_path / "1/scheduler.bin")
    with pytest.raises(ZeroCheckpointError, match="rank 1 of 2 failed: .*1/scheduler.bin is damaged"):
        loop.load(tmp_path / str(loop.accelerator.process_index))
