"""The ways of saving and loading that the checkpoint benchmark compares: hf_zero, FSDP2, DeepSpeed, the disk."""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from benchmark_systems import DEEPSPEED, OPTIMIZER, Case, build_model, give_back_memory, make_batches
from torch import nn


STATE, WEIGHTS = "training state", "weights only"
BLOCK = 16 * 2**20
_PAGE = 4096


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to put the same thing on disk, and to take it from there. Both calls are collective."""

    system: str
    what: str  # STATE: weights and optimizer, to go on training; WEIGHTS: the model alone
    save: Callable[[Path], object]
    load: Callable[[Path], object] | None = None


def prepare(names: list[str], case: Case) -> list[Way]:
    """Every way of the systems named; each trains the same model for a step, so that the optimizer has a state."""
    ways: list[Way] = []
    for name in names:
        ways += SYSTEMS[name](build_model(case.size), case)
        give_back_memory()
    return ways


def missing(name: str) -> str | None:
    """Why a system does not take part, None where it does."""
    if name == "deepspeed" and importlib.util.find_spec(DEEPSPEED) is None:
        return "DeepSpeed is not installed"
    return None


def _batch(case: Case) -> dict:
    return make_batches(case, dist.get_rank(), 0)[0]


# -- hf_zero --------------------------------------------------------------------------------------------------------


def hf_zero_ways(model: nn.Module, case: Case) -> Iterator[Way]:
    import hf_zero

    accelerator = hf_zero.ZeroAccelerator(cpu=True, zero_plugin=hf_zero.ZeroPlugin(zero_stage=3))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), **OPTIMIZER))
    accelerator.backward(model(**_batch(case)).loss)
    optimizer.step()
    optimizer.zero_grad()
    yield Way(
        system="hf_zero",
        what=STATE,
        save=lambda folder: accelerator.save_state(str(folder)),
        load=lambda folder: accelerator.load_state(str(folder)),
    )
    yield Way(system="hf_zero", what=WEIGHTS, save=lambda folder: model.save_pretrained(folder), load=_from_pretrained)


def _from_pretrained(folder: Path) -> None:
    """A model is built anew and prepared: what a job that starts from pretrained weights does."""
    from transformers import AutoModelForCausalLM

    import hf_zero

    with hf_zero.zero_init({"zero_stage": 3}):
        model = AutoModelForCausalLM.from_pretrained(folder)
    engine = hf_zero.shard(model, None, {"zero_stage": 3})
    if engine.comm.watchdog is not None:
        engine.comm.watchdog.stop()


# -- FSDP2, as accelerate saves it ----------------------------------------------------------------------------------


def fsdp2_ways(model: nn.Module, case: Case) -> Iterator[Way]:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    model(**_batch(case)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    sharded, gathered = _Fsdp2(model, optimizer, full=False), _Fsdp2(model, optimizer, full=True)
    yield Way(system="FSDP2 sharded (DCP)", what=STATE, save=sharded.save_sharded, load=sharded.load_sharded)
    yield Way(
        system="FSDP2 gathered on rank 0",
        what=STATE,
        save=lambda folder: gathered.save_gathered(folder, ("model", "optimizer")),
        load=lambda folder: gathered.load_gathered(folder, ("model", "optimizer")),
    )
    yield Way(
        system="FSDP2 gathered on rank 0",
        what=WEIGHTS,
        save=lambda folder: gathered.save_gathered(folder, ("model",)),
        load=lambda folder: gathered.load_gathered(folder, ("model",)),
    )


class _Fsdp2:
    """accelerate's SHARDED_STATE_DICT and FULL_STATE_DICT: a state dict of the model and one of the optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, full: bool) -> None:
        from torch.distributed.checkpoint import state_dict as state

        options = state.StateDictOptions(full_state_dict=full, cpu_offload=full, broadcast_from_rank0=full)
        self.get = {
            "model": lambda: state.get_model_state_dict(model, options=options),
            "optimizer": lambda: state.get_optimizer_state_dict(model, optimizer, options=options),
        }
        self.set = {
            "model": lambda values: state.set_model_state_dict(model, values, options=options),
            "optimizer": lambda values: state.set_optimizer_state_dict(model, optimizer, values, options=options),
        }

    def save_sharded(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        for part, get in self.get.items():
            dcp.save({part: get()}, storage_writer=dcp.FileSystemWriter(folder / part))

    def load_sharded(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        for part, get in self.get.items():
            values = {part: get()}
            dcp.load(values, storage_reader=dcp.FileSystemReader(folder / part))
            self.set[part](values[part])

    def save_gathered(self, folder: Path, parts: tuple[str, ...]) -> None:
        for part in parts:
            values = self.get[part]()
            if dist.get_rank() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                torch.save(values, folder / f"{part}.bin")

    def load_gathered(self, folder: Path, parts: tuple[str, ...]) -> None:
        for part in parts:
            values = torch.load(folder / f"{part}.bin", weights_only=True) if dist.get_rank() == 0 else {}
            self.set[part](values)


# -- DeepSpeed ------------------------------------------------------------------------------------------------------


def deepspeed_ways(model: nn.Module, case: Case) -> Iterator[Way]:
    deepspeed = importlib.import_module(DEEPSPEED)
    settings = {
        "train_micro_batch_size_per_gpu": case.rows,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "stage3_gather_16bit_weights_on_model_save": True,
            "reduce_bucket_size": 10_000_000,  # its default takes 2 GB of each rank, whatever the model
        },
    }
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    engine.backward(engine(**_batch(case)).loss)
    engine.step()
    yield Way(
        system="DeepSpeed ZeRO-3",
        what=STATE,
        save=lambda folder: engine.save_checkpoint(str(folder)),
        load=lambda folder: engine.load_checkpoint(str(folder)),
    )
    yield Way(
        system="DeepSpeed save_16bit_model",
        what=WEIGHTS,
        save=lambda folder: engine.save_16bit_model(str(folder), "model.bin"),
    )


def remove_deepspeed_buffers() -> None:
    """Its collectives on CPU leave a buffer of each rank in shared memory, for ever."""
    for path in Path("/dev/shm").glob(f"deepspeed_*_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_*"):
        path.unlink()


# -- the bare disk --------------------------------------------------------------------------------------------------


def raw_ways(what: str, nbytes: int) -> list[Way]:
    """What the disk gives all ranks at once, each its part of one file: past the page cache, and through it."""
    return [
        Way(
            system=name,
            what=what,
            save=lambda folder, flag=flag: _raw_write(folder, nbytes, flag),
            load=lambda folder, flag=flag: _raw_read(folder, nbytes, flag),
        )
        for name, flag in (("raw, O_DIRECT", os.O_DIRECT), ("raw, page cache", 0))
    ]


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    """(position, size) of this rank's part, in whole pages as O_DIRECT wants them."""
    share = -(-nbytes // dist.get_world_size() // _PAGE) * _PAGE
    begin = dist.get_rank() * share
    for at in range(begin, begin + share, BLOCK):
        yield at, min(BLOCK, begin + share - at)


def _raw_write(folder: Path, nbytes: int, flag: int) -> None:
    descriptor = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | flag)
    for at, size in _pieces(nbytes):
        if os.pwrite(descriptor, memoryview(_block())[:size], at) != size:
            raise OSError(f"{folder / 'raw'}: short write")
    os.fsync(descriptor)
    os.close(descriptor)


def _raw_read(folder: Path, nbytes: int, flag: int) -> None:
    descriptor = os.open(folder / "raw", os.O_RDONLY | flag)
    for at, size in _pieces(nbytes):
        if os.preadv(descriptor, [memoryview(_block())[:size]], at) != size:
            raise OSError(f"{folder / 'raw'}: short read")
    os.close(descriptor)


_blocks: list[mmap.mmap] = []


def _block() -> mmap.mmap:
    """A buffer that starts on a page, of bytes that no disk can shrink; made once."""
    if not _blocks:
        _blocks.append(mmap.mmap(-1, BLOCK))
        _blocks[0].write(os.urandom(BLOCK))
    return _blocks[0]


SYSTEMS = {"hf_zero": hf_zero_ways, "fsdp2": fsdp2_ways, "deepspeed": deepspeed_ways}
