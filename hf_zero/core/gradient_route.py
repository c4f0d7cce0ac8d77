"""The way of one buffer's gradients from unreduced sums on every rank to the masters of their owners."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from hf_zero.comm.mesh import Mesh, NodeSum
from hf_zero.comm.work import OnChunk, Route, Tag, Work
from hf_zero.core.extents import node_bounds
from hf_zero.core.layout import FlatLayout
from hf_zero.core.placement import MOVES, Move, Placement


class GradientRoute:
    """Reduces over ranks, in one hop or several, as the pair of placements says.

    Args:
        at_rest: the placement of the masters.
        on_chunk: called with (scale, first element, values) of what belongs to this rank's masters.

    Attributes:
        takes_parts: whether `reduce` takes gradients from where they are (else one flat tensor).
        node_sum: sums that have come as far as the node and no further; None where there is one hop.
    """

    def __init__(
        self,
        layout: FlatLayout,
        mesh: Mesh,
        tag: Tag,
        at_rest: Placement,
        on_chunk: Callable[[float, int, Tensor], None],
    ) -> None:
        self._layout, self._mesh, self._tag, self._on_chunk = layout, mesh, tag, on_chunk
        self._scatters = MOVES[Placement.PARTIAL, at_rest] is Move.REDUCE_SCATTER
        self.takes_parts = mesh.takes_parts and (self._scatters or not mesh.world.shares)
        self.node_sum: NodeSum | None = None
        if mesh.hops > 1 and self._scatters:
            low, high = node_bounds(layout, mesh.topology)
            self.node_sum = NodeSum(high - low)

    def reduce(self, parts: Sequence[Tensor], scale: float, *, to_owner: bool = True) -> Work:
        """Deliver `scale` times the mean over ranks, once it is waited for.

        `parts` are unreduced gradients, flat and end to end as the parameters are laid out. Without `to_owner` they go
        as far as the node, where they are kept for the next time.
        """
        if not self._layout.padded_numel:
            return Work()
        if not self._scatters:
            return self._mesh.reduce(parts, self._take(scale), self._tag)
        if self.node_sum is None:
            return self._mesh.scatter(parts, self._take(scale), self._tag)
        inside = self._mesh.scatter(parts, self.node_sum.add, self._tag)
        return Route(inside, functools.partial(self.go_on, scale)) if to_owner else inside

    def go_on(self, scale: float) -> Work:
        """As `reduce`, with the sums that were kept on the node."""
        assert self.node_sum is not None
        return self._mesh.scatter_on(self.node_sum.take(), self._take(scale), self._tag)

    def _take(self, scale: float) -> OnChunk:
        return functools.partial(self._on_chunk, scale / self._mesh.world.world_size)

    def drop(self, indices: Collection[int]) -> None:
        """Forget the sums of some parameters that were kept on the node."""
        if self.node_sum is None or self.node_sum.values is None:
            return
        if len(indices) == len(self._layout.shapes):
            self.node_sum.values = None
            return
        for span in self._layout.spans(*node_bounds(self._layout, self._mesh.topology)):
            if span.index in indices:
                self.node_sum.values[span.offset : span.offset + span.numel] = 0
