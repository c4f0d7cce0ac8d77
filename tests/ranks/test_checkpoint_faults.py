"""A run that is killed, or whose disk fails, while it saves: nothing incomplete has a final name, and resume works."""

import os
import random
import re
import signal
from pathlib import Path

import pytest

from hf_zero.checkpoint import commit
from tests.ranks.test_checkpoint import train
from tests.support.harness import run_ranks


# What a save does to a folder; a fault may come before any of these calls.
_CALLS = ("open", "pwrite", "fsync", "replace", "rename", "unlink", "rmdir")


def _die_at(rank, call):
    """Kill this process, if it is `rank`, at its `call`-th file operation; -1 counts them only."""
    count = [0]

    def counted(original):
        def wrapper(*args, **kwargs):
            count[0] += 1
            if count[0] >= call > 0 and int(os.environ["RANK"]) == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return wrapper

    for name in _CALLS:
        setattr(os, name, counted(getattr(os, name)))
    return count


def _train_and_die(folder, asynchronous, rank, call):
    """Save at steps 2 and 4; the fault comes while step 4 is saved. Returns how many operations that takes."""
    from tests.ranks.test_checkpoint import trainer_for

    arguments = {"save_steps": 2, "zero_async_save": asynchronous}
    trainer = trainer_for(folder, 3, 4, per_device_train_batch_size=2, **arguments)
    save = trainer._save_checkpoint
    counts = []

    def save_and_die(*args):
        if trainer.state.global_step == 4:
            trainer.accelerator.saves.wait()
            counts.append(_die_at(rank, call))
        save(*args)

    trainer._save_checkpoint = save_and_die
    trainer.train()
    return counts[0][0]


def _resume(folder):
    from tests.ranks.test_checkpoint import trainer_for

    trainer = trainer_for(folder, 3, 6, per_device_train_batch_size=2, save_steps=2)
    trainer.train(resume_from_checkpoint=True)
    return [entry["step"] for entry in trainer.state.log_history if "loss" in entry]


def _kill_and_resume(folder, asynchronous, rank, call):
    with pytest.raises(pytest.fail.Exception):
        run_ranks(_train_and_die, str(folder), asynchronous, rank, call)
    final = [path for path in folder.iterdir() if re.fullmatch(r"checkpoint-\d+", path.name)]
    assert final, f"killed at operation {call} of rank {rank}: no checkpoint is left"
    for path in final:
        commit.check_files(path)
        commit.check_tensors(path)
    assert run_ranks(_resume, str(folder))[0] == [1, 2, 3, 4, 5, 6]
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert folders == ["checkpoint-2", "checkpoint-4", "checkpoint-6"], folders


def _points(folder, asynchronous, number, seed):
    """Seeded (rank, operation) pairs over the whole save."""
    totals = run_ranks(_train_and_die, str(folder), asynchronous, 0, -1)
    assert min(totals) > 3, totals
    draw = random.Random(seed)
    ranks = [draw.randrange(2) for _ in range(number)]
    return [(rank, draw.randint(1, totals[rank])) for rank in ranks]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_is_killed_while_saving(tmp_path, asynchronous):
    for number, (rank, call) in enumerate(_points(tmp_path / "whole", asynchronous, 4, seed=1)[:2]):
        (tmp_path / str(number)).mkdir()
        _kill_and_resume(tmp_path / str(number), asynchronous, rank, call)


@pytest.mark.exhaustive
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_is_killed_at_fifty_points(tmp_path, asynchronous):
    for number, (rank, call) in enumerate(_points(tmp_path / "whole", asynchronous, 50, seed=2)):
        (tmp_path / str(number)).mkdir()
        _kill_and_resume(tmp_path / str(number), asynchronous, rank, call)


# ---------------------------------------------------------------------------------------------------- damaged folders


def _error_of_resuming(folder, resume):
    try:
        return train(folder, 3, 2, steps=6, resume=resume)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def flip(path, name):
    from hf_zero.checkpoint.safetensors_file import SlicedFile

    position = SlicedFile.open(path).position(name, 5) + 1
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


def test_damage_is_named_or_skipped(tmp_path):
    folder = tmp_path / "run"
    run_ranks(train, str(folder), 3, 2, 6)
    newest = folder / "checkpoint-6"
    flip(newest / "zero_state.safetensors", "model.norm.weight.exp_avg")
    message = run_ranks(_error_of_resuming, str(folder), str(newest))[1]
    assert "zero_state.safetensors is damaged: tensor 'model.norm.weight.exp_avg'" in message, message
    # With `True` the one before it is taken, and saving step 6 again replaces the damaged one.
    losses = run_ranks(_error_of_resuming, str(folder), True)[0]
    assert sorted(losses) == [4, 5, 6], losses
    commit.check_tensors(newest)

    flip(newest / "model.safetensors", "lm_head.weight")
    message = run_ranks(_error_of_resuming, str(folder), str(newest))[0]
    assert "model.safetensors is damaged: tensor 'lm_head.weight'" in message, message
    (newest / "scheduler.pt").unlink()
    message = run_ranks(_error_of_resuming, str(folder), str(newest))[0]
    assert "scheduler.pt is missing from a committed checkpoint" in message, message
    (folder / "checkpoint-3" / commit.MARKER).unlink()
    message = run_ranks(_error_of_resuming, str(folder), True)[0]
    assert "no complete checkpoint" in message and "checkpoint-3 (" in message and "checkpoint-6 (" in message, message


def _save_to(folder):
    import hf_zero
    from hf_zero.errors import ZeroCheckpointError
    from tests.support import zoo

    model = zoo.build("llama")
    hf_zero.shard(model, None, {"zero_stage": 3})
    try:
        model.save_pretrained(folder)
    except ZeroCheckpointError as error:
        return str(error)
    return "saved"


def _save_with_a_full_disk(folder):
    import errno

    written, original = [0], os.pwrite

    def pwrite(descriptor, data, position):
        written[0] += len(data)
        if written[0] > 20_000 and os.environ["RANK"] == "1":
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(descriptor, data, position)

    os.pwrite = pwrite
    return _save_to(folder)


def test_a_full_disk_leaves_what_was_there(tmp_path):
    run_ranks(_save_to, str(tmp_path / "model"))
    before = (tmp_path / "model/model.safetensors").read_bytes()
    message = run_ranks(_save_with_a_full_disk, str(tmp_path / "model"))[0]
    assert "rank 1 of 2 failed" in message and "No space left" in message, message
    assert (tmp_path / "model/model.safetensors").read_bytes() == before
    assert not [path for path in (tmp_path / "model").iterdir() if path.name.endswith(".tmp")]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    Path(tmp_path / "file").write_text("in the way")
    message = run_ranks(_save_to, str(tmp_path / "file/model"))[1]
    assert "rank 0 of 2 failed" in message and "file/model" in message, message
