"""The parts of a buffer's parameters that this rank holds, beside the other tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from hf_zero.comm import dtensors
from hf_zero.comm.local_part import LocalPart
from hf_zero.comm.mesh import Mesh
from hf_zero.core.grad_norm import ROW
from hf_zero.core.gradient_shard import GradientShard


class TensorParts:
    """What this rank holds of each parameter, which is all of it without tensor parallelism."""

    def __init__(self, names: Sequence[str], params: Sequence[nn.Parameter], mesh: Mesh) -> None:
        self._mesh = mesh
        rank = 0 if mesh.tensor is None else mesh.tensor.rank
        self._parts = [dtensors.part_of(*named, rank) for named in zip(names, params, strict=True)]
        self._all_count = all(part.first for part in self._parts)

    def __getitem__(self, index: int) -> LocalPart:
        return self._parts[index]

    @property
    def local_shapes(self) -> list[tuple[int, ...]]:
        return [part.local_shape for part in self._parts]

    def placed(self, index: int, start: int, values: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Where elements of what this rank holds of a parameter, from `start` on, stand in the whole of it.

        Yields (first element, part of `values`).
        """
        for offset, at, numel in self._parts[index].runs(start, values.numel()):
            yield at, values[offset : offset + numel]

    def agree(self, flat: Tensor, views: Sequence[Tensor]) -> None:
        """Make the first rank's values everybody's who holds the same; `views` of `flat` are one per parameter."""
        self._mesh.world.broadcast(flat)
        if self._mesh.tensor is not None:
            whole = [view for view, part in zip(views, self._parts, strict=True) if part.ranges is None]
            self._mesh.tensor.broadcast_all(whole)

    def counted(self, shard: GradientShard) -> Iterator[Tensor]:
        """What of a shard's gradient this rank counts in a sum over all ranks: nothing is counted twice.

        It is cut where rows of the norm begin in the shard, so that they are the same however masters are cut.
        """
        grad = shard.weight.grad
        if grad is not None and self._all_count:
            yield grad
        elif grad is not None:
            for span in shard.spans():
                if self._parts[span.index].first:
                    yield from grad[span.offset : span.offset + span.numel].tensor_split([-span.offset % ROW])
