"""How fast the disk of a folder reads and writes, by the files that offloaded state is kept in."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from hf_zero.core.direct_file import DirectFile, Extent, Transfer, whole_pages


# What an optimizer step of AdamW moves for a parameter that this machine keeps: weight and two moments, in fp32, are
# read and written.
STEP_BYTES = 24
_PIECE = 48 << 20  # read or written at a time, as the state of 4 Mi parameters is


@dataclass(frozen=True, kw_only=True)
class DiskSpeed:
    """Bytes per second, and whether the page cache was passed by; `both` counts both ways together."""

    read: float
    write: float
    both: float
    direct: bool

    def step_seconds(self, parameters: float) -> float:
        """The least time of an AdamW step of so many parameters whose state is on this disk."""
        return STEP_BYTES * parameters / self.both


def measure(folder: str | os.PathLike, nbytes: int = 1 << 30) -> DiskSpeed:
    """Write, read, and do both at once, with `nbytes` in each direction.

    Raises ZeroRuntimeError where the folder takes no such file.
    """
    file = DirectFile(folder)
    try:
        piece = whole_pages(min(_PIECE, nbytes))
        extents = [file.allocate(piece) for _ in range(max(2, nbytes // piece))]
        buffers = [memoryview(mmap.mmap(-1, piece)) for _ in range(4)]
        for buffer in buffers:  # disks may leave out what is zero, or was never touched
            buffer[:] = os.urandom(piece)
        write = _rate(extents, buffers[:2], file.write)
        read = _rate(extents, buffers[:2], file.read)
        both = _rate(extents, buffers, file.write, file.read)
        return DiskSpeed(read=read, write=write, both=both, direct=file.direct)
    finally:
        file.close()


def _rate(extents: list[Extent], buffers: list[memoryview], *moves: Callable[[Extent, memoryview], Transfer]) -> float:
    """Bytes per second of all moves together, each over all extents, with two pieces of each under way."""
    under_way: list[Transfer] = []
    began = time.perf_counter()
    for index in range(len(extents)):
        for number, move in enumerate(moves):
            if len(under_way) == len(buffers):
                under_way.pop(0).wait()
            extent = extents[(index + number * len(extents) // 2) % len(extents)]  # moves at once are of other places
            under_way.append(move(extent, buffers[2 * number + index % 2]))
    for transfer in under_way:
        transfer.wait()
    return len(moves) * sum(extent.nbytes for extent in extents) / (time.perf_counter() - began)
