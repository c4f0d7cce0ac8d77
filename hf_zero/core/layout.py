"""Lays parameters end to end in one flat range and says which part of it each rank owns: arithmetic only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar


# Every parameter and every rank's slice starts on this boundary, so that vector loads and BLAS see the same alignment
# as in a tensor of their own (bitwise equal results depend on it on CPU).
ALIGNMENT_BYTES = 256

_Label = TypeVar("_Label")


@dataclass(frozen=True)
class Span:
    """A part of one parameter: elements [start, start + numel) of it, found at `offset` of some flat range."""

    index: int
    start: int
    offset: int
    numel: int


class FlatLayout:
    """Offsets of parameters with the given shapes in a flat range cut into `world_size` equal slices.

    `alignment` is in elements. `padded_numel` is a multiple of `world_size * cuts * alignment`, so that each slice has
    `cuts` equal parts.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], world_size: int, alignment: int, cuts: int = 1) -> None:
        self.shapes = [tuple(shape) for shape in shapes]
        self.numels = [math.prod(shape) for shape in self.shapes]
        self.world_size = world_size
        self.alignment = alignment
        self.offsets: list[int] = []
        end = 0
        for numel in self.numels:
            self.offsets.append(end)
            end += -(-numel // alignment) * alignment
        self.slice_numel = -(-end // (world_size * cuts * alignment)) * cuts * alignment
        self.padded_numel = self.slice_numel * world_size

    @property
    def numel(self) -> int:
        """Elements of all parameters, padding left out."""
        return sum(self.numels)

    @property
    def extents(self) -> list[int]:
        """Elements from the start of each parameter to the start of the next, or to the end."""
        return [stop - start for start, stop in itertools.pairwise([*self.offsets, self.padded_numel])]

    @property
    def has_padding(self) -> bool:
        return self.padded_numel != self.numel

    def slice_bounds(self, rank: int) -> tuple[int, int]:
        """The half-open element range that `rank` owns."""
        return rank * self.slice_numel, (rank + 1) * self.slice_numel

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        """The parts of parameters inside [begin, end); `Span.offset` counts from `begin`."""
        for index, (offset, numel) in enumerate(zip(self.offsets, self.numels, strict=True)):
            low, high = max(begin, offset), min(end, offset + numel)
            if low < high:
                yield Span(index=index, start=low - offset, offset=low - begin, numel=high - low)

    def gaps(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The ranges of [begin, end) that hold no parameter, counted from `begin`."""
        at = 0
        for span in self.spans(begin, end):
            if at < span.offset:
                yield at, span.offset
            at = span.offset + span.numel
        if at < end - begin:
            yield at, end - begin

    def runs(self, begin: int, end: int, labels: Sequence[_Label]) -> list[tuple[_Label, int, int]]:
        """Cut [begin, end) into (label, start, stop) runs, one label per parameter, positions counted from `begin`.

        Padding goes to the run before it (or, at the very start, to the first run), so the runs cover the range.
        """
        cuts: list[tuple[_Label, int]] = []  # (label, start)
        for span in self.spans(begin, end):
            label = labels[span.index]
            if not cuts:
                cuts.append((label, 0))
            elif cuts[-1][0] != label:
                cuts.append((label, span.offset))
        if not cuts:
            cuts.append((labels[-1], 0))
        stops = [start for _, start in cuts[1:]] + [end - begin]
        return [(label, start, stop) for (label, start), stop in zip(cuts, stops, strict=True) if stop > start]
