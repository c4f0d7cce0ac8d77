"""Which elements of a whole tensor a rank holds where tensor-parallel ranks share it out: arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class LocalPart:
    """The elements of a tensor of `shape` that this rank holds: `ranges` of dimension `dim`, one after the other.

    Attributes:
        ranges: half-open, in order; None: all of it.
        first: whether this is the first of the tensor-parallel ranks that hold the same elements.
    """

    shape: tuple[int, ...]
    dim: int = 0
    ranges: tuple[tuple[int, int], ...] | None = None
    first: bool = True

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.ranges is None:
            return self.shape
        length = sum(stop - start for start, stop in self.ranges)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def runs(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """Where local elements [start, start + numel) stand in the whole tensor: (offset, first element, numel).

        The runs are contiguous in both; `offset` counts from `start`.
        """
        if self.ranges is None:
            yield 0, start, numel
            return
        inner = math.prod(self.shape[self.dim + 1 :])
        row, whole_row = inner * self.local_shape[self.dim], inner * self.shape[self.dim]
        at, end = start, start + numel
        while at < end:
            outer, inside = divmod(at, row)
            for low, high in self.ranges:
                size = (high - low) * inner
                if inside < size:
                    count = min(size - inside, end - at)
                    yield at - start, outer * whole_row + low * inner + inside, count
                    at += count
                    break
                inside -= size


def evenly(length: int, pieces: int, number: int) -> tuple[int, int]:
    """The bounds of one of `pieces` parts of a dimension, as `torch.chunk` cuts it."""
    size = -(-length // pieces)
    return min(length, number * size), min(length, (number + 1) * size)


def shared_out(
    shape: tuple[int, ...], dim: int, ranks: int, rank: int, blocks: int = 1, first: bool = True
) -> LocalPart:
    """The part of one of `ranks` ranks that share out dimension `dim`, or each of `blocks` equal parts of it."""
    dim %= len(shape)
    ranges = []
    for block in range(blocks):
        low, high = evenly(shape[dim], blocks, block)
        start, stop = evenly(high - low, ranks, rank)
        ranges.append((low + start, low + stop))
    return LocalPart(shape, dim, tuple(ranges), first)
