"""Gradients of one flat buffer: unreduced sums as they arrive, and their reduction into the master groups."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hf_zero.comm import Pending
from hf_zero.flat_buffer import FlatBuffer
from hf_zero.loss_scale import LossScaler
from hf_zero.masters import Piece


class GradientBuffer:
    """Collects the gradients of a trainable buffer's parameters and reduces them over ranks.

    Gradients are copied into `partial` (laid out as the parameters, in `reduce_dtype`) as autograd delivers them, so
    that each parameter's own gradient lives only for a moment. `partial` outlives a backward pass where micro-batches
    accumulate locally.
    """

    def __init__(self, buffer: FlatBuffer, reduce_dtype: torch.dtype, scaler: LossScaler | None = None) -> None:
        self.buffer, self.scaler = buffer, scaler
        # An fp64 model keeps its precision; everything else is reduced as configured.
        self.reduce_dtype = torch.float64 if buffer.dtype == torch.float64 else reduce_dtype
        self.partial: Tensor | None = None
        self._views: list[Tensor] = []
        self._written: set[int] = set()  # parameters with a sum in `partial`
        self._arrived: set[int] = set()  # parameters whose gradient came in this backward pass
        self.used: set[int] = set()  # parameters whose gradient came since the last optimizer step
        self._pending: Pending | None = None

    @property
    def complete(self) -> bool:
        """Whether every parameter's gradient came in this backward pass."""
        return len(self._arrived) == len(self.buffer.params)

    def add(self, index: int, grad: Tensor) -> None:
        """Take the gradient of parameter `index` over; a second one in the same window is added."""
        if grad.is_sparse:
            grad = grad.to_dense()
        self._arrived.add(index)
        self.used.add(index)
        if self.partial is None and self._fits(grad):
            self.partial = grad.view(-1)  # the only parameter here: its gradient needs no copy
            self._views = self.buffer.views(self.partial)
            self._written.add(index)
            return
        if self.partial is None:
            layout = self.buffer.layout
            make = torch.zeros if layout.has_padding else torch.empty
            self.partial = make(layout.padded_numel, dtype=self.reduce_dtype, device=grad.device)
            self._views = self.buffer.views(self.partial)
        if index in self._written:
            self._views[index].add_(grad)
        else:
            self._views[index].copy_(grad)
            self._written.add(index)

    def _fits(self, grad: Tensor) -> bool:
        whole = grad.numel() == self.buffer.layout.padded_numel and grad.is_contiguous()
        return whole and grad.dtype == self.reduce_dtype and not grad.requires_grad

    def begin_reduce(self) -> None:
        """Start the reduction of everything collected; parameters without a gradient contribute zeros."""
        self.finish_reduce()
        if self.partial is None:
            self.partial = torch.zeros(
                self.buffer.layout.padded_numel, dtype=self.reduce_dtype, device=self.buffer.full.device
            )
        else:
            for index, view in enumerate(self._views):
                if index not in self._written:
                    view.zero_()
        self._pending = self.buffer.reduce(self.partial)
        self.drop()

    def finish_reduce(self) -> None:
        """Wait for a reduction under way and add its result to the gradients of the masters."""
        if self._pending is not None:
            self.buffer.accumulate(self._pending.wait(), self._unscale)
            self._pending = None

    # -- single parameters, for people ----------------------------------------------------------------------------

    @property
    def _unscale(self) -> float:
        return 1.0 if self.scaler is None else 1.0 / self.scaler.scale

    def local(self, param: nn.Parameter) -> Tensor | None:
        """This rank's unreduced sum for one parameter."""
        index = self.buffer.index_of(param)
        return self._views[index] * self._unscale if index in self._written else None

    def whole(self, param: nn.Parameter) -> Tensor:
        """The mean over ranks for one parameter; a collective of the whole buffer."""
        flats = [piece.grad for piece in self.buffer.pieces]
        return self.buffer.gather_flat(flats, self.buffer.master_dtype)[self.buffer.index_of(param)]

    def put(self, param: nn.Parameter, value: Tensor | None) -> None:
        """Replace the gradient of one parameter; every rank gives the same value."""
        index, flat = self.buffer.index_of(param), None if value is None else value.detach().reshape(-1)
        if index in self._written:
            self._views[index].copy_(torch.zeros(()) if value is None else value / self._unscale)
        for piece in self.buffer.pieces:
            begin = self.buffer.begin + piece.start
            for span in self.buffer.layout.spans(begin, self.buffer.begin + piece.stop):
                if span.index == index and piece.grad is not None:
                    part = piece.grad[span.offset : span.offset + span.numel]
                    part.copy_(torch.zeros(()) if flat is None else flat[span.start : span.start + span.numel])
        if value is None:
            self.used.discard(index)

    def unused_spans(self) -> Iterator[tuple[Piece, int, int]]:
        """The parameters that got no gradient on this rank, as (piece, start, stop in its master group)."""
        if len(self.used) == len(self.buffer.params):
            return
        for piece in self.buffer.pieces:
            begin = self.buffer.begin + piece.start
            for span in self.buffer.layout.spans(begin, self.buffer.begin + piece.stop):
                if span.index not in self.used:
                    start = piece.offset + span.offset
                    yield piece, start, start + span.numel

    def end_backward(self) -> None:
        self._arrived.clear()

    def drop(self) -> None:
        """Forget what was collected and not reduced."""
        self.partial, self._views = None, []
        self._written.clear()
        self._arrived.clear()
