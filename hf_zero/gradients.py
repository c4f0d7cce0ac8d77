"""Gradients of one flat buffer: unreduced sums as they arrive, and their reduction into the masters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

import torch
from torch import Tensor, nn

from hf_zero import access
from hf_zero.errors import ZeroRuntimeError
from hf_zero.flat_buffer import FlatBuffer
from hf_zero.loss_scale import LossScaler
from hf_zero.masters import Piece
from hf_zero.pending import Pending


class GradientBuffer:
    """Collects the gradients of a trainable buffer's parameters and reduces them over ranks.

    Where a reduction reads from many places (`FlatBuffer.reduces_parts`), gradients stay where autograd has left them.
    Elsewhere they are copied into one flat tensor (laid out as the parameters, in `reduce_dtype`) as they arrive, so
    that each parameter's own gradient lives only for a moment. Sums outlive a backward pass where micro-batches
    accumulate locally.
    """

    def __init__(self, buffer: FlatBuffer, reduce_dtype: torch.dtype, scaler: LossScaler | None = None) -> None:
        self.buffer, self.scaler = buffer, scaler
        # An fp64 model keeps its precision; everything else is reduced as configured.
        self.reduce_dtype = torch.float64 if buffer.dtype == torch.float64 else reduce_dtype
        self._in_place = buffer.reduces_parts
        self._flat: Tensor | None = None
        self._rooms: Sequence[Tensor] = ()  # `_flat`, cut where parameters begin
        self._sums: dict[int, Tensor] = {}  # by parameter: unreduced, flat, in `_flat` if there is one
        self._arrived: set[int] = set()  # parameters whose gradient came in this backward pass
        # Parameters of which backward passes may have left unreduced sums, here or elsewhere: the same on every rank.
        self.unreduced: frozenset[int] = frozenset()
        self._all = frozenset(range(len(buffer.params)))
        self.numel = buffer.layout.padded_numel  # that a reduction moves
        self.used: set[int] = set()  # parameters whose gradient came since the last optimizer step
        self._pending: Pending | None = None

    @property
    def held(self) -> list[Tensor]:
        """The tensors that hold what is collected."""
        return list(self._sums.values()) if self._flat is None else [self._flat]

    def add(self, index: int, grad: Tensor) -> None:
        """Take the gradient of parameter `index` over; a second one in the same window is added.

        Raises ZeroRuntimeError where it comes after its reduction, which the other ranks may not repeat.
        """
        if not self.unreduced:
            raise ZeroRuntimeError(
                f"a gradient of '{self.buffer.names[index]}' came after all calls of its module were over: a "
                "checkpointed function reads the parameter outside of its module. Use checkpointing with "
                "use_reentrant=False"
            )
        if grad.is_sparse:
            grad = grad.to_dense()
        self._arrived.add(index)
        self.used.add(index)
        layout = self.buffer.layout
        if index in self._sums:
            self._sums[index].add_(grad.reshape(-1))
        elif self._in_place or (self._flat is None and grad.numel() == layout.padded_numel):
            own = grad.is_contiguous() and grad.dtype == self.reduce_dtype and not grad.requires_grad
            self._sums[index] = (grad if own else self._copy(grad)).view(-1)
        else:
            if self._flat is None:
                make = torch.zeros if layout.has_padding else torch.empty
                self._flat = make(layout.padded_numel, dtype=self.reduce_dtype, device=grad.device)
                self._rooms = self._flat.split_with_sizes(layout.extents)
            self._sums[index] = self._room(index).copy_(grad.reshape(-1))

    def _copy(self, grad: Tensor) -> Tensor:
        return grad.detach().to(self.reduce_dtype, memory_format=torch.contiguous_format, copy=True)

    def _room(self, index: int) -> Tensor:
        room, numel = self._rooms[index], self.buffer.layout.numels[index]
        return room if room.numel() == numel else room[:numel]

    def begin_reduce(self) -> None:
        """Start the reduction of everything collected; parameters without a gradient contribute zeros."""
        self.finish_reduce()
        self._pending = self.buffer.reduce(self._parts(), self._unscale)
        self.drop()

    @property
    def is_awaited(self) -> bool:
        """Whether this rank's backward pass still has to compute a gradient of one of the parameters."""
        if len(self._arrived) == len(self._all):
            return False
        return any(access.gets_gradient(self.buffer.params[index]) for index in self._all - self._arrived)

    def _parts(self) -> list[Tensor]:
        """Everything collected, end to end as the parameters are laid out, with zeros for what is missing."""
        layout = self.buffer.layout
        if self._flat is not None:
            for index in set(range(len(layout.shapes))) - self._sums.keys():
                self._room(index).zero_()
            return [self._flat]
        parts, at = [], 0
        found = [(layout.offsets[index], self._sums[index]) for index in sorted(self._sums)]
        for offset, values in [*found, (layout.padded_numel, None)]:
            if offset > at:
                parts.append(torch.zeros(offset - at, dtype=self.reduce_dtype, device=self.buffer.full.device))
            if values is not None and values.numel():
                parts.append(values)
                at = offset + values.numel()
        return parts

    @property
    def reduces_beside(self) -> bool:
        """Whether a reduction is under way that goes on by itself."""
        return self._pending is not None and self._pending.beside

    def finish_reduce(self) -> None:
        """Wait for a reduction under way, whose result is added to the gradients of the masters."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    # -- single parameters, for people ----------------------------------------------------------------------------

    @property
    def _unscale(self) -> float:
        return 1.0 if self.scaler is None else 1.0 / self.scaler.scale

    def local(self, param: nn.Parameter) -> Tensor | None:
        """This rank's unreduced sum for one parameter."""
        index = self.buffer.index_of(param)
        if index not in self._sums:
            return None
        return self._sums[index].view(self.buffer.layout.shapes[index]) * self._unscale

    def whole(self, param: nn.Parameter) -> Tensor:
        """The mean over ranks for one parameter; a collective of the whole buffer."""
        flats = [piece.weight.grad for piece in self.buffer.pieces]
        return self.buffer.gather_flat(flats, self.buffer.master_dtype)[self.buffer.index_of(param)]

    def put(self, param: nn.Parameter, value: Tensor | None) -> None:
        """Replace the gradient of one parameter; every rank gives the same value."""
        index, flat = self.buffer.index_of(param), None if value is None else value.detach().reshape(-1)
        if index in self._sums:
            self._sums[index].copy_(torch.zeros(()) if flat is None else flat / self._unscale)
        for piece in self.buffer.pieces:
            begin = self.buffer.begin + piece.start
            for span in self.buffer.layout.spans(begin, self.buffer.begin + piece.stop):
                if span.index == index and piece.weight.grad is not None:
                    part = piece.weight.grad[span.offset : span.offset + span.numel]
                    part.copy_(torch.zeros(()) if flat is None else flat[span.start : span.start + span.numel])
        if value is None:
            self.used.discard(index)

    def unused_spans(self) -> Iterator[tuple[Piece, int, int]]:
        """The parameters that got no gradient on this rank, as (piece, start, stop in it)."""
        if len(self.used) == len(self.buffer.params):
            return
        for piece in self.buffer.pieces:
            begin = self.buffer.begin + piece.start
            for span in self.buffer.layout.spans(begin, self.buffer.begin + piece.stop):
                if span.index not in self.used:
                    yield piece, span.offset, span.offset + span.numel

    def mark_stepped(self, held: Set[nn.Parameter]) -> None:
        """An optimizer has stepped the parameters `held`: whether they get a gradient is noted afresh."""
        self.used = {index for index in self.used if self.buffer.params[index] not in held}

    def begin_backward(self) -> None:
        self._arrived.clear()
        self.expect()

    def expect(self) -> None:
        """Gradients may come, on this rank or another."""
        self.unreduced = self._all

    def drop(self) -> None:
        """Forget what was collected and not reduced."""
        self._flat, self._rooms = None, ()
        self._sums.clear()
        self.unreduced = frozenset()

    def drop_sums(self, held: Set[nn.Parameter]) -> None:
        """Forget what was collected for the parameters `held`."""
        dropped = {index for index, param in enumerate(self.buffer.params) if param in held}
        for index in dropped:
            self._sums.pop(index, None)
            self.used.discard(index)
        if not self._sums:
            self._flat, self._rooms = None, ()
        self.unreduced -= dropped

    def forget(self) -> None:
        """Leave the parameters as if they had got no gradient since the last step."""
        self.drop()
        self.used.clear()
        for piece in self.buffer.pieces:
            piece.weight.grad = None
