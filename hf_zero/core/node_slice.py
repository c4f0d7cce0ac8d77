"""What a rank keeps of its node's weights where parameters are sharded over each node, and masters over all nodes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hf_zero.comm.mesh import Mesh
from hf_zero.comm.work import Tag, Work
from hf_zero.core.extents import node_bounds
from hf_zero.core.layout import FlatLayout


class NodeSlice:
    """This rank's share of the weights that its node keeps, in the dtype that they are computed in.

    Gathers take it from here and stay inside the node. Each owner's part follows its masters after a step. With
    quantised weights the difference is sent (`send_changes`), so that the error of one step is in the difference of
    the next, and all nodes keep the same bits: what they had before, and what they add, are the same everywhere.

    Attributes:
        values: flat; elements [begin, end) of the buffer.
        begin, end: the half-open range.
    """

    def __init__(self, layout: FlatLayout, mesh: Mesh, tag: Tag, dtype: torch.dtype, device: torch.device) -> None:
        self.begin, self.end = node_bounds(layout, mesh.topology)
        self.values = torch.empty(self.end - self.begin, dtype=dtype, device=device)
        self._mesh, self._tag = mesh, tag

    def own(self, begin: int, end: int) -> Tensor:
        """The part that this rank owns, elements [begin, end) of the buffer."""
        return self.values[begin - self.begin : end - self.begin]

    def send_changes(self, masters: Iterable[tuple[int, int, Tensor]], own: Tensor) -> Work:
        """Send how `masters`, (start, stop, values) counted in the own part, differ from it; add everybody's changes.

        The own part changes by what the others are sent, too.
        """
        changes = torch.zeros(own.numel(), dtype=torch.float32, device=own.device)
        with torch.no_grad():
            for start, stop, values in masters:
                changes[start:stop] = values
            changes.sub_(own)
        return self._mesh.refresh_by(changes, self.values, self._tag)
