"""A save that goes on in a thread holds the values of its moment, and its failure is raised on every rank."""

import errno
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

import hf_zero
from hf_zero.checkpoint import commit
from hf_zero.checkpoint.background import BackgroundSaves
from hf_zero.checkpoint.model_folder import save_folder
from hf_zero.checkpoint.safetensors_file import SlicedFile
from hf_zero.checkpoint.training_state import save_state
from hf_zero.errors import ZeroCheckpointError
from tests.ranks.test_checkpoint import trainer_for
from tests.support import zoo
from tests.support.harness import LIMIT, distributed, run_ranks


def in_threads(before):
    """Have `before` called before everything that a thread, not training itself, writes to a file."""
    write = os.pwrite

    def pwrite(*args):
        if threading.current_thread() is not threading.main_thread():
            before()
        return write(*args)

    os.pwrite = pwrite


def no_space():
    raise OSError(errno.ENOSPC, "No space left on device")


class AtStep(TrainerCallback):
    """Calls something at the end of a step."""

    def __init__(self, step, call):
        self.step, self.call = step, call

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.call()


def trained(folder, asynchronous, stage=3, **arguments):
    """Six steps with a save after the third, whose writing waits until the fifth is over."""
    trainer = trainer_for(folder, stage, 6, per_device_train_batch_size=2, zero_async_save=asynchronous, **arguments)
    if asynchronous:
        gate = threading.Event()
        trainer.add_callback(AtStep(5, gate.set))
        in_threads(lambda: gate.wait(LIMIT))
        trainer.add_callback(AtStep(4, lambda: check_uncommitted(folder)))
    trainer.train()


def check_uncommitted(folder):
    assert not (Path(folder) / "checkpoint-3").exists(), "the save was over before training went on"


@pytest.mark.parametrize("stage, bf16", [(3, False), (3, True), (1, True)])
def test_the_files_are_those_of_a_save_that_training_waits_for(tmp_path, stage, bf16):
    for asynchronous in (False, True):
        run_ranks(trained, str(tmp_path / str(asynchronous)), asynchronous, stage, bf16=bf16)
    names = [path.name for path in (tmp_path / "False/checkpoint-3").iterdir()]
    assert sorted(names) == sorted(path.name for path in (tmp_path / "True/checkpoint-3").iterdir())
    for step in (3, 6):
        ours, theirs = (tmp_path / f"{which}/checkpoint-{step}" for which in (True, False))
        commit.check_files(ours)
        commit.check_tensors(ours)
        for name in ("model.safetensors", "zero_state.safetensors", "scheduler.pt", "rng_state_1.pth", "config.json"):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), f"step {step}: {name}"


def _fail_in_a_thread(folder, steps):
    trainer = trainer_for(folder, 3, steps, per_device_train_batch_size=2, save_steps=2, zero_async_save=True)
    trainer.add_callback(AtStep(3, trainer.accelerator.saves.finish))  # the save after step 2 shall succeed
    if os.environ["RANK"] == "1":
        trainer.add_callback(AtStep(3, lambda: in_threads(no_space)))
    try:
        trainer.train()
    except ZeroCheckpointError as error:
        return trainer.state.global_step, str(error)


@pytest.mark.parametrize("steps, raised_at", [(8, 6), (4, 4)])
def test_a_failure_is_raised_on_all_ranks_at_the_next_save_or_at_the_end(tmp_path, steps, raised_at):
    for step, message in run_ranks(_fail_in_a_thread, str(tmp_path), steps):
        assert step == raised_at, step
        assert "checkpoint-4 was not written: rank 1 of 2 failed" in message and "No space" in message, message
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["checkpoint-2"]
    commit.check_tensors(tmp_path / "checkpoint-2")


def _end_while_saving(folder, fails):
    """A write is held up until somebody waits for it."""
    arguments = {"save_steps": 3 if fails else 4, "save_total_limit": 1}
    trainer = trainer_for(folder, 3, 4, per_device_train_batch_size=2, zero_async_save=True, **arguments)
    awaited = threading.Event()
    in_threads(awaited.wait)
    finish = trainer.accelerator.saves.finish

    def finish_at_last():
        awaited.set()
        finish()

    trainer.accelerator.saves.finish = finish_at_last
    if fails:
        trainer.add_callback(AtStep(4, no_space))
    try:
        trainer.train()
    except OSError:
        assert fails
    return sorted(path.name for path in Path(folder).iterdir() if path.is_dir())


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_training_waits(tmp_path, fails):
    """Also where it is an error: what was under way is completed."""
    wanted = ["checkpoint-3"] if fails else ["checkpoint-4"]
    for folders in run_ranks(_end_while_saving, str(tmp_path), fails):
        assert folders == wanted, folders
    commit.check_tensors(tmp_path / wanted[0])


def _die_while_saving(folder):
    trainer = trainer_for(folder, 3, 6, per_device_train_batch_size=2, save_steps=2, zero_async_save=True)
    trainer.add_callback(AtStep(3, trainer.accelerator.saves.finish))
    trainer.add_callback(AtStep(3, lambda: in_threads(lambda: threading.Event().wait(LIMIT))))
    trainer.add_callback(AtStep(5, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    trainer.train()


def _resume(folder):
    trainer = trainer_for(folder, 3, 6, per_device_train_batch_size=2, save_steps=2, zero_async_save=True)
    trainer.train(resume_from_checkpoint=True)
    return sorted(path.name for path in Path(folder).iterdir() if path.is_dir())


def test_a_kill_during_the_writing_leaves_the_checkpoint_before_it(tmp_path):
    with pytest.raises(pytest.fail.Exception):
        run_ranks(_die_while_saving, str(tmp_path))
    assert (tmp_path / "uncommitted/checkpoint-4").is_dir() and not (tmp_path / "checkpoint-4").exists()
    commit.check_tensors(tmp_path / "checkpoint-2")
    assert run_ranks(_resume, str(tmp_path))[0] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


@distributed(world_size=2)
def test_the_copy_takes_the_bytes_that_the_rank_writes(tmp_path, monkeypatch):
    from hf_zero.checkpoint import staging

    kept = []
    keep = staging.Staged.keep

    def count(self, parts):
        before = len(self.kept or ())
        keep(self, parts)
        kept.extend(part[3] for part in self.kept[before:])

    monkeypatch.setattr(staging.Staged, "keep", count)
    model = zoo.build("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    engine = hf_zero.shard(model, optimizer, {"zero_stage": 3, "mixed_precision": "bf16"})
    engine.backward(model(**zoo.batch("llama", dist.get_rank(), 0)).loss)
    optimizer.step()
    saves = BackgroundSaves()
    is_main = dist.get_rank() == 0
    with saves.save(engine.comm, is_main, asynchronous=True) as job:
        save_folder(model, tmp_path, job, lambda folder, state_dict: None)
        save_state(tmp_path, engine.buffers, engine.bindings, job)
        sizes = [tensor.untyped_storage().nbytes() for tensor in kept]
        shares = [None, None]
        dist.all_gather_object(shares, sum(sizes))
        elements = sum(p.numel() for p in model.parameters())
        # 2 bytes of weights, 4 of masters, 8 of AdamW's state; slices differ by their padding only.
        assert sum(shares) == 14 * elements and max(shares) < 1.1 * 14 * elements / 2, (shares, elements)
        kept.clear()
    saves.wait()
    for name in ("model.safetensors", "zero_state.safetensors"):
        SlicedFile.open(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "zero_state.safetensors"]


@distributed(world_size=2)
def test_accelerate_saves_its_state_in_a_thread(tmp_path):
    plugin = hf_zero.ZeroPlugin(zero_stage=3, async_save=True)
    accelerator = hf_zero.ZeroAccelerator(zero_plugin=plugin)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def steps():
        losses = []
        for seed in range(3):
            draw = torch.Generator().manual_seed(seed + accelerator.process_index)
            loss = model(torch.randn(4, 8, generator=draw)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    steps()
    gate = threading.Event()
    in_threads(gate.wait)
    folder = tmp_path / "state"
    accelerator.save_state(str(folder))
    after = steps()
    assert not commit.is_committed(folder), "the save was over before training went on"
    gate.set()
    accelerator.load_state(str(folder))  # waits for the save
    commit.check_tensors(folder)
    assert steps() == after

    in_threads(no_space)
    accelerator.save_state(str(folder))
    with pytest.raises(ZeroCheckpointError, match=r"state was not written: rank 0 of 2 failed: .*No space"):
        accelerator.end_training()
    accelerator.load_state(str(folder))  # the one before stays
    assert steps() == after
