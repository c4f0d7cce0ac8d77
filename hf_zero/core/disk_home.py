"""Flat tensors that rest on disk: read into a slot of host memory when they are opened, written back behind.

[Note: shells] At rest each tensor is a shell, one element expanded to its shape: right shape and dtype, four bytes,
NaN when read, an error when written to. Opening makes its data a part of a slot; it stays the same object, which
optimizers know it by.

[Note: order on disk] Nobody waits for a write before the same shelf is opened again. A read of other bytes into the
memory that is being written is told of the write, and begins when it has ended. A write that failed leaves its shelf
without values: every later `open` raises.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import mmap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.core.courier import AtOnce, Courier
from hf_zero.core.direct_file import PAGE, DirectFile, Extent, Transfer, whole_pages
from hf_zero.core.disk_failures import DiskFailures
from hf_zero.core.heap import heap
from hf_zero.core.placement import Place


class _Use(enum.Enum):
    NOTHING = enum.auto()
    CLOSED = enum.auto()  # values that are on disk as well, or on their way there
    FETCHED = enum.auto()  # values that are read ahead, or on their way here
    OPEN = enum.auto()


class _Slot:
    """Host memory for one shelf at a time, page-aligned."""

    def __init__(self) -> None:
        self.shelf: DiskShelf | None = None
        self.use, self.turn = _Use.NOTHING, 0
        self.busy = Transfer([])  # what still reads or writes the memory
        self.pages = _map(PAGE)

    def grow(self, nbytes: int) -> bool:
        """Have room for `nbytes`; whether other pages, with the same values, took the place of the present ones."""
        if nbytes <= len(self.pages):
            return False
        self.busy.end()
        old, self.pages = self.pages, _map(nbytes)
        memoryview(self.pages)[: len(old)] = memoryview(old)
        return True

    def bytes(self, start: int, nbytes: int) -> memoryview:
        return memoryview(self.pages)[start : start + nbytes]


def _map(nbytes: int) -> mmap.mmap:
    """Memory that forked processes, as the workers of a data loader are, do not get.

    A page that both had when a read was under way could keep its old values in this process.
    """
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    return pages


class Slots:
    """Memory for what is open, read ahead or being written: `count` slots, and more only while more are open."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._slots: list[_Slot] = []
        self._wanted: dict[DiskShelf, None] = {}  # to be read ahead when there is room, in this order
        self._turn = 0

    @property
    def nbytes(self) -> int:
        return sum(len(slot.pages) for slot in self._slots)

    def take(self, shelf: DiskShelf, urgent: bool) -> _Slot | None:
        """A slot for `shelf`; where it is not urgent, None rather than one that holds what others have read ahead."""
        slot = self._idle(urgent)
        if slot is not None:
            if slot.shelf is not None:
                slot.shelf.lose_slot()
            slot.shelf = shelf
        return slot

    def want(self, shelf: DiskShelf) -> None:
        """Have `shelf` read ahead as soon as there is room."""
        self._wanted[shelf] = None
        self._fetch_wanted()

    def forget(self, shelf: DiskShelf) -> None:
        """It is here, or gone."""
        self._wanted.pop(shelf, None)

    def _fetch_wanted(self) -> None:
        while self._wanted and next(iter(self._wanted)).fetch_ahead():
            del self._wanted[next(iter(self._wanted))]

    def _idle(self, urgent: bool) -> _Slot | None:
        by_use: dict[_Use, list[_Slot]] = {use: [] for use in _Use}
        for slot in sorted(self._slots, key=lambda slot: slot.turn):
            by_use[slot.use].append(slot)
        if by_use[_Use.NOTHING]:
            return by_use[_Use.NOTHING][0]
        if len(self._slots) >= self.count:
            if by_use[_Use.CLOSED]:
                return by_use[_Use.CLOSED][0]  # its write has had most time
            if not urgent:
                return None
            if by_use[_Use.FETCHED]:
                return by_use[_Use.FETCHED][-1]  # it is needed last
        self._slots.append(_Slot())
        return self._slots[-1]

    def mark(self, slot: _Slot, use: _Use) -> None:
        """Say what a slot is used for from now on."""
        self._turn += 1
        slot.use, slot.turn = use, self._turn
        if slot.shelf is not None and (
            use is _Use.NOTHING or (use is _Use.CLOSED and len(self._slots) > self.count)  # was one too many
        ):
            slot.shelf.lose_slot()
            slot.shelf, slot.use = None, _Use.NOTHING
        if slot.use is _Use.NOTHING and len(self._slots) > self.count:
            self._slots.remove(slot)
        if slot.use in (_Use.NOTHING, _Use.CLOSED):
            self._fetch_wanted()


@dataclass(frozen=True)
class _Region:
    """Where one kind lies: on disk, and in the slot."""

    extent: Extent
    start: int
    dtype: torch.dtype
    shape: torch.Size


class DiskShelf:
    """Tensors of one number of elements, `flats` by kind, that rest and travel together."""

    def __init__(self, home: DiskHome, numel: int, flats: Mapping[str, Tensor]) -> None:
        assert numel, "what has no elements needs no disk"
        self.numel = numel
        self.flats: dict[str, Tensor] = {}
        self._home, self._file, self._slots = home, home.file, home.slots
        self._regions: dict[str, _Region] = {}
        self._end = 0  # bytes of a slot that all kinds take
        self._slot: _Slot | None = None
        self._in_slot: set[str] = set()  # kinds whose values the slot holds, once `_fetched` is over
        self._shown: set[str] = set()  # kinds whose tensors are parts of the slot
        self._changed: set[str] = set()
        self._opened = 0
        self._fetched, self._written = Transfer([]), Transfer([])
        with self.open(write=True):
            for kind, tensor in flats.items():
                self.add(kind, tensor)

    @contextlib.contextmanager
    def open(
        self, *, write: bool = False, kinds: Collection[str] | None = None, anew: bool = False
    ) -> Iterator[dict[str, Tensor]]:
        """Have the tensors of these kinds (None: all) hold their values inside; with `write`, keep what changes.

        May be nested. Raises ZeroRuntimeError where the disk fails, or has failed to take the values before; in a pass
        (see `DiskFailures`) that comes later, and the tensors have some memory meanwhile.
        """
        kinds = set(self.flats).intersection(self.flats if kinds is None else kinds)
        self._slots.forget(self)
        with self._home.failures.late(), self._file.waiting():
            self._written.wait()
        self._fetch(kinds, urgent=True, anew=anew)
        self._slots.mark(self._own_slot, _Use.OPEN)
        self._opened += 1
        try:
            with self._home.failures.late(), self._file.waiting():
                self._fetched.wait()
            self._show(kinds)
            if write:
                self._changed |= kinds
            yield self.flats
        finally:
            self._opened -= 1
            if not self._opened:
                self._close()

    def begin_fetch(self) -> None:
        """Have it read ahead of the next `open`, behind those for which this was asked before."""
        if not self._opened:
            self._slots.want(self)

    def fetch_ahead(self) -> bool:
        """Begin to read everything; False where no slot can be had."""
        begun = self._fetch(set(self.flats), urgent=False)
        if begun:
            self._slots.mark(self._own_slot, _Use.FETCHED)
        return begun

    @property
    def _own_slot(self) -> _Slot:
        assert self._slot is not None, "it has been taken, and is kept while it is open or read"
        return self._slot

    def _fetch(self, kinds: set[str], urgent: bool, anew: bool = False) -> bool:
        """Begin to read the kinds that the slot does not hold yet; False where there is no slot.

        With `anew` they get room only.
        """
        if self._slot is None:
            self._slot = self._slots.take(self, urgent)
            if self._slot is None:
                return False
            self._slot.grow(self._end)
        slot = self._slot
        missing = sorted(kinds - self._in_slot)
        if missing and anew:
            with self._file.waiting():
                slot.busy.end()
        elif missing:
            after = Transfer.of([slot.busy, self._written])
            self._fetched = Transfer.of([self._file.read(*self._places(kind), after) for kind in missing])
            slot.busy = self._fetched
        self._in_slot |= kinds
        return True

    def _places(self, kind: str) -> tuple[Extent, memoryview]:
        region = self._regions[kind]
        return region.extent, self._own_slot.bytes(region.start, region.extent.nbytes)

    def _show(self, kinds: Collection[str]) -> None:
        for kind in kinds:
            self.flats[kind].data = self._view(kind)
        self._shown |= set(kinds)

    def _view(self, kind: str) -> Tensor:
        region = self._regions[kind]
        with torch.inference_mode(False):
            pages = self._own_slot.pages
            flat = torch.frombuffer(pages, dtype=region.dtype, count=self.numel, offset=region.start)
            return flat.view(region.shape)

    def _close(self) -> None:
        for kind in self._shown:
            self.flats[kind].data = _shell(self.flats[kind].dtype).expand(self._regions[kind].shape)
        self._shown.clear()
        failed = next((transfer for transfer in (self._written, self._fetched) if transfer.failed), None)
        if failed is not None:
            self._in_slot.clear()  # to be read anew
            if self._changed:  # they are lost
                self._written = failed
                self._changed.clear()
        if self._changed:
            self._written = Transfer.of([self._file.write(*self._places(kind)) for kind in sorted(self._changed)])
            self._own_slot.busy = self._written
            self._changed.clear()
        self._slots.mark(self._own_slot, _Use.CLOSED if self._in_slot else _Use.NOTHING)

    def add(self, kind: str, tensor: Tensor) -> None:
        """Take a tensor over, in an `open`: a new kind, or one that takes the place of what was there.

        Its memory is given back at once. Raises ZeroRuntimeError where the disk is full, in a pass as in `open`.
        """
        assert self._opened and tensor.numel() == self.numel, (kind, tensor.shape)
        region = self._regions.get(kind)
        if region is None or region.dtype != tensor.dtype:
            extent = Extent(0, 0)  # where there is no room, nothing is moved
            with self._home.failures.late():
                extent = self._file.allocate(tensor.nbytes)
            if region is not None:
                self._file.free(region.extent)
            self._regions[kind] = _Region(extent, self._end, tensor.dtype, tensor.shape)
            self._end += whole_pages(tensor.nbytes)
            if self._own_slot.grow(self._end):
                self._show(self._shown)
        with self._file.waiting():
            self._own_slot.busy.end()  # the shelf before may have left in it what is still on its way to the disk
        self._view(kind).copy_(tensor.detach())
        heap.has_freed(tensor.nbytes)  # below, by whoever made it
        self.flats[kind] = tensor
        self._in_slot.add(kind)
        self._changed.add(kind)
        self._show([kind])

    def leave(self) -> None:
        """Give slot and disk back. The tensors stay shells."""
        assert not self._opened
        self._slots.forget(self)
        self._written.end()  # others write to these pages from now on
        if self._slot is not None:
            self._slots.mark(self._own_slot, _Use.NOTHING)
        for region in self._regions.values():
            self._file.free(region.extent)
        self._regions.clear()

    def lose_slot(self) -> None:
        """Another shelf takes the memory."""
        self._slot = None
        self._in_slot.clear()


@functools.cache
def _shell(dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((), math.nan if dtype.is_floating_point or dtype.is_complex else 0, dtype=dtype)


class DiskHome:
    """Keeps shelves in one unnamed file, and what is open, ahead or behind in `buffers` slots of host memory."""

    place, device, is_near, keeps_memory = Place.DISK, torch.device("cpu"), False, False

    def __init__(
        self,
        file: DirectFile,
        buffers: int = 4,
        limit: int | None = None,
        least: int = 1,
        courier: Courier | None = None,
    ) -> None:
        self.file, self.limit, self.least = file, limit, least
        self.courier = courier or AtOnce()
        self.slots = Slots(buffers)
        self.failures = DiskFailures()  # of all homes of an engine

    def shelf(self, numel: int, flats: Mapping[str, Tensor]) -> DiskShelf:
        """Take over the values of flat tensors of `numel` elements each; they are shells afterwards."""
        return DiskShelf(self, numel, flats)

    @contextlib.contextmanager
    def reserved(self, nbytes: int) -> Iterator[None]:
        """Inside, that much of the file is in use; afterwards it is free, and the file's all the same."""
        extent = self.file.allocate(nbytes)
        try:
            yield
        finally:
            self.file.free(extent)

    def held(self) -> dict[Place, int]:
        """Bytes of the file, and of the slots in host memory."""
        return {Place.DISK: self.file.nbytes, Place.HOST: self.slots.nbytes}

    def close(self) -> None:
        """End the threads and give the disk back; nothing can be opened afterwards."""
        self.file.close()
