"""Writes sliced files into a folder, by all ranks at once, so that they appear only when all of them are complete."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from hf_zero.checkpoint.background import SaveJob
from hf_zero.checkpoint.checksum import combine
from hf_zero.checkpoint.safetensors_file import BUFFER_BYTES, Part, SlicedFile
from hf_zero.checkpoint.slice_writer import SliceWriter
from hf_zero.comm.communicator import Communicator
from hf_zero.errors import ZeroCheckpointError, ZeroDamageError, ZeroError


Computed = Callable[[], Iterable[Part]]


class Parts(Protocol):
    """Gives this rank's parts, always the same ones."""

    def __call__(self, *, closed: bool = False, in_memory: bool | None = None) -> Iterable[Part]:
        """Values of `closed` parts have a shape only, and nothing is read for them.

        `in_memory` chooses parts whose values rest in memory, or those whose values do not (None: all).
        """


_TEMPORARY = ".tmp"


def on_all_ranks(comm: Communicator, action: Callable[[], object]) -> None:
    """Run `action` on every rank; when it fails on one, raise ZeroCheckpointError on all of them. A collective.

    It is a ZeroDamageError on all ranks where it is one on any of them.
    """
    error = None
    try:
        action()
    except Exception as caught:  # whatever it is, the others wait for this rank
        error = caught
    kind = ZeroDamageError if isinstance(error, ZeroDamageError) else ZeroCheckpointError
    told = comm.all_gather_object(None if error is None else (kind, comm.rank, _describe(error)))
    failures = sorted(filter(None, told), key=lambda failure: failure[0] is not ZeroDamageError)
    if failures:
        kind, rank, text = failures[0]
        raise kind(f"rank {rank} of {comm.world_size} failed: {text}") from error


def _describe(error: Exception) -> str:
    """What an error says; what a `KeyError` says needs to be told what it is."""
    says = isinstance(error, OSError | ValueError | RuntimeError) and str(error)
    return str(error) if says else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the system and of libraries, which often leave it out, name what cannot be written."""
    try:
        yield
    except ZeroError:
        raise
    except Exception as error:
        raise ZeroCheckpointError(f"{path} cannot be written: {_describe(error)}") from error


def add_up(comm: Communicator, sums: Mapping[str, int]) -> dict[str, int]:
    """The checksums of whole tensors from what every rank has written or read of them; a collective."""
    total: dict[str, int] = {}
    for part in comm.all_gather_object(dict(sums)):
        for name, value in part.items():
            total[name] = combine(total.get(name, 0), value)
    return total


@dataclass(frozen=True, kw_only=True)
class Writers:
    """Which ranks create files, and whether all ranks write into the files of the first of them."""

    creators: tuple[int, ...]
    shared: bool


def find_writers(folder: Path, job: SaveJob) -> Writers:
    """Try out who sees whose files in `folder`; a collective.

    Raises ZeroCheckpointError on all ranks where one cannot create a file.
    """
    comm, is_main = job.comm, job.is_main
    token = uuid.uuid4().hex if comm.rank == 0 else None
    token = comm.all_gather_object(token)[0]
    mine = folder / f".probe-{token}-{comm.rank}"

    def create() -> None:
        if is_main:
            folder.mkdir(parents=True, exist_ok=True)
            mine.touch()

    try:
        on_all_ranks(comm, create)
        seen = {int(path.name.rsplit("-", 1)[1]) for path in folder.glob(f".probe-{token}-*")}
        views = comm.all_gather_object((is_main, seen))
    finally:
        if is_main:
            with contextlib.suppress(OSError):
                mine.unlink(missing_ok=True)
    mains = [rank for rank, (main, _) in enumerate(views) if main]
    creators = tuple(rank for rank in mains if not any(other < rank for other in views[rank][1]))
    return Writers(creators=creators, shared=all(creators[0] in seen for _, seen in views))


@dataclass(kw_only=True)
class Staged:
    """Files under temporary names: complete, or `kept` for `complete` to write."""

    folder: Path
    files: Mapping[str, SlicedFile]
    comm: Communicator
    writers: Writers
    kept: list[Part] | None = None  # copies of what this rank is to write
    early: SliceWriter | None = None  # has written what is not to be copied to memory
    summed: bool = True
    sums: dict[str, int] = field(default_factory=dict)  # checksums of all tensors, if `summed`, once they are written

    @property
    def creates(self) -> bool:
        """Whether this rank creates and renames files."""
        return self.comm.rank in self.writers.creators

    def _temporary(self, name: str) -> Path:
        return self.folder / (name + _TEMPORARY)

    def create(self) -> None:
        """Make the files, with their final sizes; those that a killed save has left behind make room for them."""
        if not self.creates:
            return
        families = {family(name) for name in self.files}
        for path in self.folder.glob("*" + _TEMPORARY):
            if family(path.name.removesuffix(_TEMPORARY)) in families:
                path.unlink()
        promised = sum(_unwritten(path) for path in self.folder.glob("*" + _TEMPORARY))
        needed = sum(file.nbytes for file in self.files.values())
        free = shutil.disk_usage(self.folder).free - promised
        if needed > free:
            raise ZeroCheckpointError(f"{self.folder} has {free:,} bytes free, and {needed:,} are to be written")
        for name, file in self.files.items():
            with naming(self._temporary(name)):
                file.create(self._temporary(name))

    def keep(self, parts: Iterable[Part]) -> None:
        """Copy the parts to host memory, in the dtype of their file; `complete` writes them."""
        self.kept = self.kept or []
        for file, name, start, values in parts:
            dtype = self.files[file].tensors[name][0]
            self.kept.append((file, name, start, values.detach().to(device="cpu", dtype=dtype, copy=True)))

    def write_early(self, parts: Iterable[Part]) -> None:
        """Write parts that would take memory if they were kept; `complete` writes all others."""
        self.early = self._writer()
        _fill(self.early, parts)

    def _writer(self) -> SliceWriter:
        return SliceWriter(self.files, {name: self._temporary(name) for name in self.files}, self.summed)

    def write(self, parts: Parts, computed: Computed = tuple) -> None:
        """Write this rank's parts into the files; a collective."""
        writer = self._writer()
        if self.writers.shared:
            # One after the other: all ranks take part in making the second.
            on_all_ranks(self.comm, lambda: _fill(writer, parts()))
            on_all_ranks(self.comm, lambda: _fill(writer, computed()))
        else:
            made = list(computed())
            for given in (parts, lambda **_: made):
                everybody = broadcast_parts(given, lambda file, name: self.files[file].tensors[name][0], self.comm)
                taken = (part for part in everybody if self.creates)
                on_all_ranks(self.comm, functools.partial(_fill, writer, taken))
        sums = dict(writer.sums)
        if self.early is not None:
            writer.nbytes += self.early.nbytes
            for name, value in self.early.sums.items():
                sums[name] = combine(sums.get(name, 0), value)
        per_rank = self.comm.all_gather_object(writer.nbytes)
        _check_complete(self.files, per_rank, self.writers)
        counts = self.writers.shared or self.comm.rank == self.writers.creators[0]
        self.sums.update(add_up(self.comm, sums if counts else {}))

    def complete(self) -> None:
        """Write what was kept; a collective."""
        if self.kept is not None:
            try:
                kept = self.kept
                self.write(lambda *, closed=False, **_: list(kept) if closed else _released(kept))
            except BaseException:
                self.discard()
                raise

    def rename(self) -> None:
        """Give the files their names."""
        for name in self.files if self.creates else ():
            os.replace(self._temporary(name), self.folder / name)

    def commit(self) -> None:
        """Complete the files and give them their names; a collective."""
        self.complete()
        on_all_ranks(self.comm, self.rename)

    def discard(self) -> None:
        """Remove them."""
        for name in self.files if self.creates else ():
            with contextlib.suppress(OSError):
                self._temporary(name).unlink(missing_ok=True)


def family(name: str) -> str:
    """The name of a weight file without its number: whatever the number of files is, they replace each other."""
    return re.sub(r"-\d{5}-of-\d{5}(?=\.safetensors$)", "", name)


def _unwritten(path: Path) -> int:
    """How many bytes of a file that has its final size are still to come."""
    status = path.stat()
    return max(0, status.st_size - 512 * status.st_blocks)


def _released(parts: list[Part]) -> Iterator[Part]:
    """The parts in order; each one's memory is free when the next is asked for."""
    parts.reverse()
    while parts:
        yield parts.pop()


def stage(
    folder: Path,
    files: Mapping[str, SlicedFile],
    parts: Parts,
    job: SaveJob,
    computed: Computed = tuple,
) -> Staged:
    """Write `files` under temporary names; each rank gives the parts that it owns. A collective.

    `computed` gives further parts, in the making of which all ranks take part by iterating.

    All ranks write into the same files where they share a file system, and nothing is sent. Where they do not, the
    parts travel to the ranks that create files, one buffer at a time. For a thread, parts that rest in memory are only
    copied, and `commit`, which it is to call, writes them; others, and those that travel, are written at once.
    Raises ZeroCheckpointError on all ranks, before the first byte, where their files are not the same.
    """
    comm, later = job.comm, job.later
    _check_same_files(files, comm)
    staged = Staged(folder=folder, files=files, comm=comm, writers=find_writers(folder, job), summed=job.sums)
    try:
        on_all_ranks(comm, staged.create)
        if later is not None and staged.writers.shared:
            on_all_ranks(comm, lambda: staged.write_early(parts(in_memory=False)))
            on_all_ranks(comm, lambda: staged.keep(parts(in_memory=True)))
            on_all_ranks(comm, lambda: staged.keep(computed()))
        else:
            staged.write(parts, computed)
    except BaseException:
        staged.discard()
        raise
    if later is not None:
        staged.comm = later.comm
        later.leftovers.append(staged.discard)
    return staged


def _check_same_files(files: Mapping[str, SlicedFile], comm: Communicator) -> None:
    """Every rank writes where its own header puts a tensor."""
    mine = {name: hashlib.sha256(file.header).hexdigest() for name, file in files.items()}
    theirs = comm.all_gather_object(mine)
    different = [rank for rank, other in enumerate(theirs) if other != theirs[0]]
    if different:
        raise ZeroCheckpointError(
            f"ranks {different} have another model than rank 0 (names, shapes or dtypes): nothing was written"
        )


def _fill(writer: SliceWriter, parts: Iterable[Part]) -> None:
    try:
        for part in parts:
            writer.put(*part)
    finally:
        writer.close()


def _check_complete(files: Mapping[str, SlicedFile], per_rank: list[int], writers: Writers) -> None:
    wanted = sum(file.nbytes - len(file.header) for file in files.values())
    counts = [sum(per_rank)] if writers.shared else [per_rank[rank] for rank in writers.creators]
    for count in counts:
        if count != wanted:
            raise ZeroCheckpointError(
                f"{count:,} bytes of tensors were written, but the files {sorted(files)} need {wanted:,}: the ranks "
                "do not agree on what they own"
            )


def broadcast_parts(parts: Parts, dtype_of: Callable[[str, str], torch.dtype], comm: Communicator) -> Iterator[Part]:
    """Yield the parts of all ranks on every rank, one buffer at a time; a collective.

    Raises ZeroCheckpointError on all ranks, at the end, where one cannot read its own.
    """
    described = [(file, name, start, values.numel()) for file, name, start, values in parts(closed=True)]
    mine, device = iter(parts()), comm.device
    error: Exception | None = None
    for rank, theirs in enumerate(comm.all_gather_object(described)):
        for file, name, start, numel in theirs:
            own = None
            if rank == comm.rank and error is None:
                try:
                    own = next(mine)[3].detach().reshape(-1)
                except Exception as caught:  # whatever it is, the others wait for the rest
                    error = caught
            dtype = dtype_of(file, name)
            step = max(1, BUFFER_BYTES // dtype.itemsize)
            for at in range(0, numel, step):
                count = min(step, numel - at)
                if own is not None:
                    buffer = own[at : at + count].to(device=device, dtype=dtype, copy=True)
                else:
                    buffer = torch.empty(count, dtype=dtype, device=device)
                yield file, name, start + at, comm.broadcast(buffer, rank)

    def judge() -> None:
        if error is not None:
            raise error

    on_all_ranks(comm, judge)
