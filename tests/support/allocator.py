"""A model of a caching allocator for one stream: how many bytes a log of allocations holds and reserves at its worst.

As torch's allocator does for large blocks: a request takes the smallest free block that it fits into, what is left
over stays a block of its own, neighbours that are free become one block, and a segment is asked for where nothing
fits and is kept. What is reserved and not held is fragmentation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.support.happens_before import Free, Log, Resize, Storage


@dataclass
class _Block:
    segment: int
    start: int
    nbytes: int


@dataclass
class CachingAllocator:
    """Sizes are rounded up to `granule` bytes."""

    granule: int = 512
    held: int = 0
    reserved: int = 0
    peak_held: int = 0
    _free: list[_Block] = field(default_factory=list)
    _taken: dict[Storage, _Block] = field(default_factory=dict)
    _segments: int = 0

    def resize(self, storage: Storage, nbytes: int) -> None:
        """Give a storage memory of another size; 0 bytes give all of it back."""
        self._give_back(storage)
        if not nbytes:
            return
        nbytes = -(-nbytes // self.granule) * self.granule
        self._taken[storage] = self._take(nbytes)
        self.held += nbytes
        self.peak_held = max(self.peak_held, self.held)

    def _take(self, nbytes: int) -> _Block:
        fitting = [block for block in self._free if block.nbytes >= nbytes]
        if not fitting:
            self._segments += 1
            self.reserved += nbytes
            return _Block(self._segments, 0, nbytes)
        found = min(fitting, key=lambda block: (block.nbytes, block.segment, block.start))
        self._free.remove(found)
        if found.nbytes > nbytes:
            self._free.append(_Block(found.segment, found.start + nbytes, found.nbytes - nbytes))
        return _Block(found.segment, found.start, nbytes)

    def _give_back(self, storage: Storage) -> None:
        block = self._taken.pop(storage, None)
        if block is None:
            return
        self.held -= block.nbytes
        for other in [other for other in self._free if other.segment == block.segment]:
            if other.start + other.nbytes == block.start or block.start + block.nbytes == other.start:
                self._free.remove(other)
                block = _Block(block.segment, min(block.start, other.start), block.nbytes + other.nbytes)
        self._free.append(block)


def replay(log: Log, granule: int = 512) -> CachingAllocator:
    """The allocator after everything that a rank's log allocates and gives back."""
    allocator = CachingAllocator(granule)
    for event in log:
        match event:
            case Resize(storage, nbytes):
                allocator.resize(storage, nbytes)
            case Free(storage):
                allocator.resize(storage, 0)
    return allocator
