"""Which rank has which masters, where these are no equal slices, and what of them lies in which slice: arithmetic."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hf_zero.comm.topology import Topology
from hf_zero.core.layout import FlatLayout, Span
from hf_zero.core.placement import MOVES, OF_WHOLE_MATRICES, Move, Placement


# Runs meet on multiples of so many elements, a cache line of fp32: shares are exact, and vectors are loaded whole.
_LINE = 16


def balance(numels: Sequence[int], ranks: int, weights: Sequence[float] = ()) -> list[int]:
    """The owner of each matrix, by its number of elements: the largest first, each to who has least so far.

    What a rank has is measured by its weight, if there are any. At equal ones at most 4/3 of the best balance there is
    (longest processing time first, Graham 1969, SIAM J. Appl. Math. 17).
    """
    loads = [(0.0, -weight, rank) for rank, weight in enumerate(weights or [1] * ranks)]
    heapq.heapify(loads)
    owners = [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        load, weight, rank = loads[0]
        owners[index] = rank
        heapq.heapreplace(loads, (load - numels[index] / weight, weight, rank))
    return owners


def cut(total: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """Half-open ranges that cover [0, total), in proportion to the weights; they meet on multiples of a cache line."""
    ends = [end * total / sum(weights) for end in itertools.accumulate(weights)]
    cuts = [min(total, round(end / _LINE) * _LINE) for end in ends[:-1]]
    return list(itertools.pairwise([0, *cuts, total]))


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements [start, stop) of a buffer of which one rank has the masters.

    Attributes:
        owner: the number of this rank.
        params: the parameters that lie in it, with a part at least.
        is_matrix: it is one whole parameter, stepped in its shape; otherwise a flat run of one optimizer group.
    """

    owner: int
    start: int
    stop: int
    params: tuple[int, ...]
    is_matrix: bool


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """The pieces of one buffer with their owners, and the slices in which their elements lie otherwise.

    Attributes:
        pieces: in an order that all ranks have.
        slices: what each of the ranks that share one copy holds, as half-open element ranges of the buffer, by their
            numbers; a single one where every rank holds all and is its own owner.
        own: the number of this rank.
    """

    pieces: Sequence[Piece]
    slices: Sequence[tuple[int, int]]
    own: int

    @classmethod
    def arrange(
        cls,
        layout: FlatLayout,
        topology: Topology,
        at_rest: Placement,
        owners: Mapping[int, int],
        labels: Mapping[int, Hashable] | None = None,
    ) -> Ownership:
        """What follows from `owners` of matrices for a buffer whose masters are otherwise placed as `at_rest`.

        Parameters with `labels` lie in runs, one for each label, of ranges in proportion to the topology's weights.
        """
        all_keep_the_same = MOVES[at_rest, OF_WHOLE_MATRICES[at_rest]] is Move.STAY
        if all_keep_the_same:
            owners, slices, own = dict.fromkeys(owners, 0), [(0, layout.padded_numel)], 0
        else:
            ranks = topology.shard_ranks
            slices = [layout.slice_bounds(topology.slice_of(rank)) for rank in ranks]
            own = ranks.index(topology.rank)
        pieces = [_matrix(layout, index, owner) for index, owner in owners.items()]
        if labels:
            assert not all_keep_the_same, "weights are for what is shared out"
            pieces += _runs(layout, topology.weights, slices, labels)
        return cls(pieces=pieces, slices=slices, own=own)

    @property
    def mine(self) -> list[int]:
        """The numbers of the pieces that this rank owns."""
        return [number for number, piece in enumerate(self.pieces) if piece.owner == self.own]

    @property
    def params(self) -> set[int]:
        """The parameters that lie in pieces."""
        return {index for piece in self.pieces for index in piece.params}

    def spans(self, holder: int, owner: int, among: Collection[int]) -> list[Span]:
        """What `holder` has in its slice of the pieces of `owner` with parameters `among` these.

        `Span.index` is the number of the piece, `Span.start` counts in it, and `Span.offset` in the slice.
        """
        low, high = self.slices[holder]
        found = []
        for number, piece in enumerate(self.pieces):
            begin, end = max(low, piece.start), min(high, piece.stop)
            if begin < end and piece.owner == owner and any(index in among for index in piece.params):
                found.append(Span(index=number, start=begin - piece.start, offset=begin - low, numel=end - begin))
        return found


def _matrix(layout: FlatLayout, index: int, owner: int) -> Piece:
    start = layout.offsets[index]
    return Piece(owner=owner, start=start, stop=start + layout.numels[index], params=(index,), is_matrix=True)


def _runs(
    layout: FlatLayout, weights: Sequence[float], slices: Sequence[tuple[int, int]], labels: Mapping[int, Hashable]
) -> Iterator[Piece]:
    """Runs of one label each, in ranges that lie in the order of the slices, so that most elements stay on their rank.

    Padding between two labels is in no run.
    """
    order = sorted(range(len(slices)), key=lambda number: slices[number])
    total = max(offset + numel for offset, numel in zip(layout.offsets, layout.numels, strict=True))
    ranges = cut(total, [weights[number] for number in order])
    for owner, (low, high) in zip(order, ranges, strict=True):
        for label, group in itertools.groupby(layout.spans(low, high), key=lambda span: labels.get(span.index)):
            spans = list(group)
            if label is not None:
                start, stop = low + spans[0].offset, low + spans[-1].offset + spans[-1].numel
                params = tuple(span.index for span in spans)
                yield Piece(owner=owner, start=start, stop=stop, params=params, is_matrix=False)
