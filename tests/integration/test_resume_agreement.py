"""`resume_from_checkpoint=True` takes the same checkpoint on all ranks, also where each has folders of its own."""

import os
import shutil

import pytest

from hf_zero.checkpoint import commit
from hf_zero.errors import ZeroCheckpointError
from tests.ranks.test_checkpoint import train, trainer_for
from tests.ranks.test_commit_marker import check, make_checkpoint, newest
from tests.support.harness import distributed, run_ranks


def own_folder(folder):
    """A run's folder of this rank, as of a node that shares no disk with the others."""
    own = folder / os.environ["RANK"]
    own.mkdir()
    return own


def make(run_folder, *steps):
    for step in steps:
        make_checkpoint(run_folder / f"checkpoint-{step}")


@distributed(world_size=2)
def test_the_newest_that_all_ranks_have(tmp_path):
    run = own_folder(tmp_path)
    make(run, *([3, 6, 9] if run.name == "0" else [3, 6]))
    if run.name == "0":
        (run / "checkpoint-6" / commit.MARKER).unlink()
    assert newest(run) == run / "checkpoint-3"


@distributed(world_size=2)
def test_none_on_one_rank_is_an_error_on_all(tmp_path):
    run = own_folder(tmp_path)
    make(run, *([3] if run.name == "0" else []))
    with pytest.raises(
        ZeroCheckpointError, match=r"no complete checkpoint .*checkpoint-3 \(rank\(s\) \[1\] of 2 do not"
    ):
        newest(run)


@distributed(world_size=2)
def test_one_that_lacked_its_name_on_one_rank(tmp_path):
    """A kill between the renames of two nodes."""
    run = own_folder(tmp_path)
    make(run, 3, 6)
    if run.name == "1":
        (run / "uncommitted").mkdir()
        (run / "checkpoint-6").rename(run / "uncommitted/checkpoint-6")
    assert newest(run) == run / "checkpoint-6"


@distributed(world_size=2)
def test_a_rank_with_a_folder_of_its_own_reads_all_of_it(tmp_path):
    run = own_folder(tmp_path)
    make(run, 3, 6)
    path = run / "checkpoint-6/model.safetensors"
    if run.name == "1":  # the tensor that rank 0 reads where ranks share the work
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert newest(run, lambda folder, share, shares: check(folder)) == run / "checkpoint-3"


def _train_on_two_nodes(folder, resume, lost):
    own = folder / os.environ["RANK"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if resume and own.name == "1":
        shutil.rmtree(own / lost)
    return train(str(own), 3, 2, resume=resume, save_on_each_node=True)


def test_a_run_on_two_nodes_goes_on_from_what_both_have(tmp_path):
    whole = run_ranks(_train_on_two_nodes, tmp_path, None, None)
    assert (tmp_path / "0/checkpoint-6").is_dir() and (tmp_path / "1/checkpoint-6").is_dir()
    resumed = run_ranks(_train_on_two_nodes, tmp_path, True, "checkpoint-6")
    for before, after in zip(whole, resumed, strict=True):
        assert after == {step: before[step] for step in (4, 5, 6)}, (before, after)


def _resume_from_a_path(folder):
    trainer = trainer_for(folder, 3, 6, per_device_train_batch_size=2, save_steps=6)
    trainer.train(resume_from_checkpoint=folder + "/checkpoint-2")


def test_a_complete_checkpoint_that_lacked_its_name_is_not_removed(tmp_path):
    """Nor does a file that somebody else has left there make a save fail."""
    run_ranks(train, str(tmp_path), 3, 2, 4, save_steps=2)
    aside = tmp_path / "uncommitted"
    aside.mkdir()
    (tmp_path / "checkpoint-4").rename(aside / "checkpoint-4")
    (aside / "checkpoint-5").mkdir()
    (aside / ".nfs0001").touch()
    run_ranks(_resume_from_a_path, str(tmp_path))
    for step in (2, 4, 6):
        commit.check_files(tmp_path / f"checkpoint-{step}")
    assert os.listdir(aside) == [".nfs0001"]
