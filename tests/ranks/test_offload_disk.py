"""State on disk: bytes are counted, memory is given back, files are the same, and faults are errors with a place."""

import contextlib
import errno
import gc
import json
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.checkpoint import staging
from hf_zero.checkpoint.saving import consolidated_state_dict
from hf_zero.core import direct_file, homes
from hf_zero.core.direct_file import whole_pages
from hf_zero.core.engine import engine_of
from hf_zero.core.placement import Place
from hf_zero.errors import ZeroError, ZeroRuntimeError
from tests.ranks.test_checkpoint import trainer_for
from tests.support.harness import run_ranks
from tests.support.open_files import held_in, left_in
from tests.support.resident import used_bytes
from tests.support.small_disk import SIZE, on_a_small_disk


WIDTH = 512  # a matrix of this width is worth a way to the disk on each of two ranks


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.matrix = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return torch.tanh(self.matrix(x))


class Net(nn.Module):
    def __init__(self, depth, width=WIDTH):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def shard(folder, depth=5, stage=3, places=("optimizer",), width=WIDTH, **config):
    torch.manual_seed(0)
    model = Net(depth, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for kind in places:
        config |= {f"offload_{kind}_device": "nvme", f"offload_{kind}_nvme_path": str(folder)}
    return model, optimizer, hf_zero.shard(model, optimizer, {"zero_stage": stage, **config})


def train(model, optimizer, engine, steps, width=WIDTH):
    for step in range(steps):
        x = torch.randn(2, width, generator=torch.Generator().manual_seed(step))
        engine.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def shards_of(engine):
    return [shard for buffer in engine.buffers for shard in (*buffer.resting.masters, *buffer.resting.weights)]


def moved(engine, settles=True):
    """Bytes by kind since the file was made, everything that was begun being over."""
    if settles:
        engine.settle()
    for one in shards_of(engine):
        if one.place is Place.DISK:
            one._shelf._written.wait()
            one._shelf._fetched.wait()
    return dict(engine.homes.optimizer.file.moved)


def _count(folder, places):
    model, optimizer, engine = shard(folder, places=places, offload_buffer_count=2)
    train(model, optimizer, engine, 2)
    before = moved(engine, settles=False)
    train(model, optimizer, engine, 3)
    after = moved(engine, settles=False)
    engine.settle()
    settled = moved(engine)
    with torch.no_grad():
        model.eval()(torch.randn(2, WIDTH))
    evaluated = moved(engine)
    for weight in optimizer.param_groups[0]["params"]:
        state = optimizer.state[weight]
        assert weight.isnan().all() and state["exp_avg"].isnan().all(), "at rest nothing is in memory"
    assert not any(
        value.isnan().any() for state in optimizer.state_dict()["state"].values() for value in state.values()
    )
    held = engine.homes.optimizer.held()
    report = json.loads(json.dumps(hf_zero.memory_report(model).to_dict()))["elsewhere"]
    assert sum(report["disk"].values()) == held[Place.DISK], report
    engine.undo()
    return {kind: (after[kind] - before[kind], evaluated[kind] - settled[kind]) for kind in ("read", "write")}, held


@pytest.mark.parametrize("places", [("optimizer",), ("optimizer", "param")])
def test_a_step_moves_24_bytes_of_each_parameter_and_an_evaluation_none_of_them(places, tmp_path):
    steps, units, slice_ = 3, 5, 4 * WIDTH * WIDTH // 2
    slots = 2  # what is last in a pass may still be in one of these in the next
    for found, held in run_ranks(_count, tmp_path, places):
        (read, read_by_evaluation), (written, written_by_evaluation) = found["read"], found["write"]
        copies = 1 if len(places) == 2 else 0
        assert written == steps * units * (3 + copies) * slice_ and written_by_evaluation == 0
        # New weights are gathered as they are written. Backward reads them, but for those that it comes to first.
        assert read == steps * (3 * units + copies * (units - slots)) * slice_
        assert (units - slots) * copies * slice_ <= read_by_evaluation <= units * copies * slice_
        assert held[Place.DISK] == units * (3 + copies) * whole_pages(slice_)
        assert held[Place.HOST] <= 2 * 3 * whole_pages(slice_)


def _read_in_backward(folder):
    """Bytes that a backward pass and the step behind it have read, and the bytes of a step."""
    model, optimizer, engine = shard(folder, offload_buffer_count=2)
    train(model, optimizer, engine, 2)
    found = []
    for _ in range(2):
        begin = moved(engine, settles=False)["read"]
        loss = model(torch.randn(2, WIDTH)).square().mean()
        before = moved(engine, settles=False)["read"]
        engine.backward(loss)
        behind = moved(engine, settles=False)["read"]
        optimizer.step()
        optimizer.zero_grad()
        found.append((behind - before, moved(engine, settles=False)["read"] - begin))
    return found[1]


def test_backward_reads_what_buffers_hold_of_the_next_steps_states(tmp_path):
    units, slots, states = 5, 2, 3 * 4 * WIDTH * WIDTH // 2
    for found in run_ranks(_read_in_backward, tmp_path):
        assert found == (slots * states, units * states)


def _memory(folder, places):
    """Anonymous memory after some steps, without what only the C library keeps; in fp32, masters may be weights."""
    options = {"offload_buffer_count": 2, "mixed_precision": "bf16"}
    model, optimizer, engine = shard(folder, places=places, depth=6, width=2048, **options)
    train(model, optimizer, engine, 2, width=2048)
    engine.settle()
    return used_bytes()


def test_what_is_on_disk_is_not_in_memory(tmp_path):
    numel = 6 * 2048 * 2048
    (plain,) = run_ranks(_memory, tmp_path, (), world_size=1)
    (offloaded,) = run_ranks(_memory, tmp_path, ("optimizer",), world_size=1)
    slots = 2 * 12 * 4 * 2**20
    assert plain - offloaded >= 0.9 * 12 * numel - slots, (plain / 1e6, offloaded / 1e6)


def _ends(folder, how):
    assert held_in(folder) == ([], [])
    model, optimizer, engine = shard(folder, places=("optimizer", "param"))
    train(model, optimizer, engine, 2)
    assert all(held_in(folder))
    if how == "undo":
        engine.undo()
    elif how == "exception":
        with pytest.raises(RuntimeError):
            model(torch.randn(2, WIDTH + 1))
    if how == "build":
        with pytest.raises(ValueError, match="already sharded"):
            hf_zero.shard(model, None, {"zero_stage": 3, **_on(folder)})
    # A collection may come at any moment: here, as a thread begins, under a lock that ends of threads need (to 3.12).
    lock = getattr(threading, "_shutdown_locks_lock", None) if how == "inside" else None
    with lock or contextlib.nullcontext():
        del model, optimizer, engine
        gc.collect()
    return left_in(folder)


def _on(folder):
    return {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": str(folder)}


@pytest.mark.parametrize("how", ["undo", "forgotten", "exception", "build", "inside"])
def test_no_thread_and_no_descriptor_outlives_an_engine(how, tmp_path):
    for found in run_ranks(_ends, tmp_path, how, timeout=120):
        assert found == ([], []), found


def _full(disk, depth):
    try:
        shard(disk, depth=depth)
    except ZeroRuntimeError as error:
        return str(error)


@pytest.mark.parametrize("depth, when", [(5, "masters"), (3, "states")])
@on_a_small_disk
def test_a_full_disk_is_an_error_on_all_ranks_before_training(disk, depth, when):
    assert 4 * depth * WIDTH * WIDTH > SIZE or when == "states"
    first, second = run_ranks(_full, disk, depth)
    assert first == second and first is not None
    assert first.startswith("rank ") and f"'{disk}' has no room" in first and "are free (No space left" in first
    assert os.statvfs(disk).f_bfree * os.statvfs(disk).f_frsize == SIZE


def _without_a_file(folder):
    if dist.get_rank() == 1:

        def fail(place):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

        direct_file._open_unnamed = fail
    with pytest.raises(ZeroRuntimeError) as caught:
        shard(folder)
    gc.collect()
    return str(caught.value), left_in(folder)


def test_a_folder_that_one_rank_does_not_have_is_an_error_on_all(tmp_path):
    first, second = run_ranks(_without_a_file, tmp_path, timeout=60)
    assert first == second
    message, found = first
    assert message.startswith(f"rank 1: no file can be made in '{tmp_path}': No such file"), message
    assert found == ([], [])


def _fail(folder, call):
    model, optimizer, engine = shard(folder, stage=3, offload_buffer_count=2)
    train(model, optimizer, engine, 2)
    moved(engine)

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    setattr(direct_file.os, call, fail)
    messages = []
    for _ in range(2):
        with pytest.raises(ZeroRuntimeError) as caught:
            train(model, optimizer, engine, 2)
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("kind, call", [("read", "preadv"), ("write", "pwrite")])
def test_a_disk_that_fails_ends_training_with_position_and_reason(kind, call, tmp_path):
    (messages,) = run_ranks(_fail, tmp_path, call, world_size=1)
    for message in messages:
        assert f"cannot {kind} " in message and str(tmp_path) in message and "[Errno 5]" in message, message


def _fail_on_one(folder, call, calls, places):
    """The error of this rank, and the file's threads and descriptors that are left."""
    model, optimizer, engine = shard(folder, stage=3, places=places, offload_buffer_count=2)
    train(model, optimizer, engine, 2)
    moved(engine)
    original, left, rank = getattr(os, call), [calls], engine.comm.rank

    def fail(*args):
        left[0] -= 1
        if left[0] < 0 and rank == 1:
            raise OSError(errno.EIO, "Input/output error")
        return original(*args)

    setattr(direct_file.os, call, fail)
    with pytest.raises(ZeroRuntimeError) as caught:
        train(model, optimizer, engine, 3)
    message = str(caught.value)
    del model, optimizer, engine, caught
    gc.collect()
    return message, left_in(folder)


@pytest.mark.parametrize("places", [("optimizer",), ("optimizer", "param")])
@pytest.mark.parametrize("kind, call, calls", [("read", "preadv", 4), ("read", "preadv", 0), ("write", "pwrite", 7)])
def test_a_disk_that_fails_on_one_rank_ends_training_on_all(kind, call, calls, places, tmp_path):
    first, second = run_ranks(_fail_on_one, tmp_path, call, calls, places)
    assert first == second
    message, found = first
    assert message.startswith(f"rank 1: cannot {kind} ") and f"in '{tmp_path}'" in message, message
    assert " at position " in message and "[Errno 5]" in message, message
    assert found == ([], []), "an engine that is forgotten leaves nothing"


def _save_apart(engine, folder):
    """As ranks do whose folders are not the same."""
    whole = staging.find_writers

    def apart(folder, job):
        return staging.Writers(creators=whole(folder, job).creators, shared=False)

    staging.find_writers = apart
    engine.save_checkpoint(folder)


def _load_and_train(engine, folder):
    engine.load_checkpoint(folder)
    train(engine.model, engine.optimizers[0], engine, 1)


OUTSIDE = {
    "save": lambda engine, folder: engine.save_checkpoint(folder / "new"),
    "save apart": lambda engine, folder: _save_apart(engine, folder / "new"),
    "load": lambda engine, folder: _load_and_train(engine, folder / "saved"),
    "state_dict": lambda engine, folder: engine.optimizers[0].state_dict(),
    "gather": lambda engine, folder: consolidated_state_dict(engine.model, keep=True),
    "undo": lambda engine, folder: engine.undo(),
}


def _fail_outside(folder, disk, what, call, owes, code):
    """The error of this rank in what is done between passes, with a step that is owed or without."""
    model, optimizer, engine = shard(disk, stage=3, places=("optimizer", "param"), offload_buffer_count=2)
    train(model, optimizer, engine, 2)
    engine.save_checkpoint(folder / "saved")
    train(model, optimizer, engine, 1)
    if not owes:
        moved(engine)
    if engine.comm.rank == 1:
        left, original = [2], getattr(direct_file, call)

        def fail(*args):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(code, os.strerror(code))
            return original(*args)

        setattr(direct_file, call, fail)  # checkpoints are read and written by others
    with pytest.raises(ZeroError) as caught:
        OUTSIDE[what](engine, folder)
    return str(caught.value)


@pytest.mark.parametrize(
    "what, call, owes",
    [
        ("save", "read_all", False),
        ("save", "read_all", True),
        ("save", "write_all", True),
        ("save apart", "read_all", False),
        ("load", "read_all", False),
        ("load", "write_all", True),
        ("state_dict", "read_all", True),
        ("state_dict", "write_all", True),
        ("gather", "read_all", False),
        ("undo", "read_all", True),
    ],
)
def test_a_disk_that_fails_on_one_rank_between_passes_is_an_error_on_all(what, call, owes, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    code = errno.ENOSPC if call == "write_all" else errno.EIO
    first, second = run_ranks(_fail_outside, tmp_path, disk, what, call, owes, code, timeout=60)
    assert first == second
    assert "rank 1" in first and f"cannot {call.removesuffix('_all')} " in first and f"in '{disk}'" in first, first
    assert " at position " in first and f"[Errno {code}]" in first, first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "saved"], "nothing half-written stays"
    assert not any(disk.iterdir())


def _save(folder, disk, asynchronous, resume=None):
    homes.LEAST_ON_DISK = 1  # the model is tiny
    places = (
        {} if disk is None else {"zero_offload_optimizer_device": "nvme", "zero_offload_optimizer_nvme_path": disk}
    )
    trainer = trainer_for(
        folder, 3, 3 if resume is None else 6, per_device_train_batch_size=2, zero_async_save=asynchronous, **places
    )
    trainer.train(resume_from_checkpoint=resume)
    places = {shard.place for shard in shards_of(engine_of(trainer.model))}
    assert (Place.DISK in places) == (disk is not None), places
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).rglob("*.safetensors")}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_are_the_same_bytes_and_resume_either_way(asynchronous, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    plain, offloaded = str(tmp_path / "plain"), str(tmp_path / "offloaded")
    assert run_ranks(_save, plain, None, asynchronous) == run_ranks(_save, offloaded, str(disk), asynchronous)
    files = _files(f"{plain}/checkpoint-3")
    assert len(files) == 2 and files == _files(f"{offloaded}/checkpoint-3")
    run_ranks(_save, plain, str(disk), asynchronous, f"{plain}/checkpoint-3")
    run_ranks(_save, offloaded, None, asynchronous, f"{offloaded}/checkpoint-3")
    assert _files(f"{plain}/checkpoint-6") == _files(f"{offloaded}/checkpoint-6")
    assert not list(disk.iterdir())
