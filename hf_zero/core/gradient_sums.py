"""Unreduced sums of one rank's gradients, by parameter: where they lie, and how they come there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import torch
from torch import Tensor

from hf_zero.core.layout import FlatLayout


# Gradients are copied into the flat tensor as soon as those that wait for it have this share of its elements: it takes
# three kernels at most, and little is held twice.
_SHARE = 1 / 3


class GradientSums:
    """Sums of gradients as they arrive, flat and in `dtype`.

    Where a reduction reads from many places (`in_place`), gradients stay where autograd has left them. Elsewhere they
    are copied into one flat tensor, laid out as the parameters are, a few at a time; that of a lone parameter is it.

    Args:
        first: the dtype, not wider than `dtype`, in which a gradient may stay until something is added to it.
    """

    def __init__(
        self, layout: FlatLayout, dtype: torch.dtype, device: torch.device, *, first: torch.dtype, in_place: bool
    ) -> None:
        self._layout, self._dtype, self._device, self._first = layout, dtype, device, first
        self._most = _SHARE * layout.numel
        stays = (0, layout.padded_numel)
        self._in_place = {index for index, numel in enumerate(layout.numels) if in_place or numel in stays}
        # `_flat` is cut into parameters and what lies between them.
        gaps = (extent - numel for extent, numel in zip(layout.extents, layout.numels, strict=True))
        self._cuts = [cut for each in zip(layout.numels, gaps, strict=True) for cut in each]
        self._has_gaps = layout.has_padding
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._flat: Tensor | None = None
        self._rooms: Sequence[Tensor] = ()  # `_flat`, cut where parameters begin
        self._sums: dict[int, Tensor] = {}  # in `_flat` if there is one
        self._waiting: dict[int, Tensor] = {}  # gradients, flat, to be brought into `_flat`
        self._waiting_numel = 0

    @property
    def held(self) -> list[Tensor]:
        """The tensors that hold what is collected."""
        return [*(self._sums.values() if self._flat is None else [self._flat]), *self._waiting.values()]

    @property
    def indices(self) -> Set[int]:
        """The parameters that have a sum."""
        self.bring()
        return self._sums.keys()

    def __getitem__(self, index: int) -> Tensor:
        self.bring()
        return self._sums[index]

    def discard(self, indices: Iterable[int]) -> None:
        """Forget the sums of some parameters."""
        self.bring()
        for index in indices:
            self._sums.pop(index, None)

    def add(self, index: int, grad: Tensor, *, shared: bool = False) -> None:
        """Add a gradient to that of its parameter; others may have its memory (`shared`), or it is given away."""
        if index in self._in_place:
            if index in self._sums:
                self.widened(index).add_(grad.reshape(-1))
            else:
                fits = grad.dtype in (self._first, self._dtype)
                own = fits and not shared and grad.is_contiguous() and not grad.requires_grad
                self._sums[index] = (grad if own else self._copy(grad)).view(-1)
            return
        if index in self._waiting:
            self.bring()
        self._waiting[index] = grad.detach().reshape(-1) if grad.requires_grad else grad.reshape(-1)
        self._waiting_numel += self._layout.numels[index]
        if self._waiting_numel >= self._most or shared:
            self.bring()

    def _copy(self, grad: Tensor) -> Tensor:
        dtype = grad.dtype if grad.dtype == self._first else self._dtype
        return grad.detach().to(dtype, memory_format=torch.contiguous_format, copy=True)

    def widened(self, index: int) -> Tensor:
        """The sum of a parameter, which can take what is added or written to it."""
        self._sums[index] = self[index].to(self._dtype)
        return self._sums[index]

    def bring(self) -> None:
        """Copy or add what waits, if anything does, to its place in the flat tensor."""
        waiting, sums = self._waiting, self._sums
        if not waiting:
            return
        if self._flat is None:
            self._flat = torch.empty(self._layout.padded_numel, dtype=self._dtype, device=self._device)
            pieces = self._flat.split_with_sizes(self._cuts)
            self._rooms = pieces[::2]
            if self._has_gaps:
                torch._foreach_zero_(pieces[1::2])
        copied: tuple[list[Tensor], list[Tensor]] = [], []
        added: tuple[list[Tensor], list[Tensor]] = [], []
        for index, grad in waiting.items():
            targets, sources = added if index in sums else copied
            targets.append(sums.setdefault(index, self._rooms[index]))
            sources.append(grad)
        if copied[0]:
            torch._foreach_copy_(*copied)
        if added[0]:
            torch._foreach_add_(*added)
        self._waiting, self._waiting_numel = {}, 0

    def parts(self) -> list[Tensor]:
        """Everything collected, end to end as the parameters are laid out, with zeros for what is missing."""
        self.bring()
        layout = self._layout
        if self._flat is not None:
            if len(self._sums) < len(self._rooms):
                torch._foreach_zero_([room for index, room in enumerate(self._rooms) if index not in self._sums])
            return [self._flat]
        parts, at = [], 0
        found = [(layout.offsets[index], self._sums[index]) for index in sorted(self._sums)]
        for offset, values in [*found, (layout.padded_numel, None)]:
            if offset > at:
                parts.append(torch.zeros(offset - at, dtype=self._first, device=self._device))
            if values is not None and values.numel():
                parts.append(values)
                at = offset + values.numel()
        return parts
