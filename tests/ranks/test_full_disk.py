"""A disk that is really full: the error names the file, nothing incomplete has a final name, and resuming works."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from hf_zero.checkpoint import commit
from hf_zero.checkpoint.safetensors_file import SlicedFile
from hf_zero.errors import ZeroCheckpointError
from tests.integration.test_async_save import AtStep
from tests.ranks.test_checkpoint import trainer_for
from tests.support.harness import run_ranks
from tests.support.small_disk import on_a_small_disk


def fill(disk, leave=0):
    """Use the disk up to `leave` bytes, from one rank."""
    if os.environ["RANK"] == "0":
        status = os.statvfs(disk)
        with suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:  # others may write meanwhile
            for _ in range(leave, status.f_bavail * status.f_frsize, 4096):
                file.write(bytes(4096))


def _after_checks(count, disk):
    """Fill the disk when its free space has been checked, and the `count`-th file is to be created."""
    create, calls = SlicedFile.create, [0]

    def fill_and_create(self, path):
        calls[0] += 1
        if calls[0] == count:
            fill(disk)
        create(self, path)

    SlicedFile.create = fill_and_create


def _full_at(disk, moment, asynchronous):
    """Save after steps 2 and 4; the disk is full at the second save. Returns the error."""
    arguments = {"save_steps": 2, "zero_async_save": asynchronous}
    trainer = trainer_for(str(disk / "run"), 3, 4, per_device_train_batch_size=2, **arguments)
    trainer.add_callback(AtStep(3, trainer.accelerator.saves.finish))  # the first save shall succeed
    if moment == "before":
        trainer.add_callback(AtStep(3, lambda: fill(disk, leave=64 * 1024)))
    elif moment in ("config", "small files"):
        name = {"config": "_save", "small files": "_save_rng_state"}[moment]
        save = getattr(trainer, name)

        def fill_and_save(*args, **kwargs):
            if trainer.state.global_step == 4:
                fill(disk)
            save(*args, **kwargs)

        setattr(trainer, name, fill_and_save)
    else:
        trainer.add_callback(AtStep(3, lambda: _after_checks({"weights": 1, "state": 2}[moment], disk)))
    try:
        trainer.train()
    except ZeroCheckpointError as error:
        return str(error)


def _resume(disk):
    trainer = trainer_for(str(disk / "run"), 3, 6, per_device_train_batch_size=2, save_steps=2)
    trainer.train(resume_from_checkpoint=True)
    return [entry["step"] for entry in trainer.state.log_history if "loss" in entry]


WORDS = {
    "before": "uncommitted/checkpoint-4 has 65,536 bytes free, and ",
    "weights": "{run}/uncommitted/checkpoint-4/model.safetensors.tmp cannot be written: [Errno 28] No space",
    "state": "{run}/uncommitted/checkpoint-4/zero_state.safetensors.tmp cannot be written: [Errno 28] No space",
    "config": "{run}/uncommitted/checkpoint-4 cannot be written: ",
    "small files": "{run}/uncommitted/checkpoint-4 cannot be written: ",
}


@pytest.mark.parametrize(
    "moment, asynchronous",
    [
        *(("before", False), ("weights", False), ("weights", True), ("state", False), ("state", True)),
        *(("config", False), ("small files", False), ("small files", True)),
    ],
)
@on_a_small_disk
def test_what_was_saved_before_stays(disk, moment, asynchronous):
    run: Path = disk / "run"
    for message in run_ranks(_full_at, disk, moment, asynchronous):
        assert message and "failed: " in message and WORDS[moment].format(run=run) in message, message
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-2"]
    commit.check_files(run / "checkpoint-2")
    commit.check_tensors(run / "checkpoint-2")
    left = list((run / "uncommitted").rglob("*.tmp"))
    assert not left, f"nobody will complete {left}"
    (disk / "filler").unlink()
    assert run_ranks(_resume, disk)[0] == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
