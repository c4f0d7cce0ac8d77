"""Flat fp32 master weights with their gradients, from which the weights of a buffer are cast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hf_zero.core.layout import FlatLayout, Span


class MasterShard:
    """Elements [start, stop) of what a rank owns of one buffer, all of one optimizer group, in fp32 (or fp64).

    `weight` is what the optimizer sees of them: a flat leaf. `weight.grad` exists from the first reduction of a step
    until `zero_grad`: gradients take their memory as backward proceeds, and not all at its beginning.
    """

    def __init__(
        self, layout: FlatLayout, begin: int, start: int, stop: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.start, self.stop = start, stop
        self._layout, self._begin = layout, begin
        self.weight = torch.zeros(stop - start, dtype=dtype, device=device).requires_grad_()
        self._written = False  # `weight.grad` holds the sum of a whole reduction at least

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def values(self) -> Tensor:
        return self.weight.detach()

    def spans(self) -> Iterator[Span]:
        """The parts of parameters that lie in it; `Span.offset` counts from `start`."""
        return self._layout.spans(self._begin + self.start, self._begin + self.stop)

    def add_grad(self, at: int, values: Tensor, scale: float) -> None:
        """Add `scale * values` to the gradient of the elements from `at` on.

        A reduction brings all of a shard, in parts, from its start on. The first one writes: nothing needs zeroing.
        """
        if self.weight.grad is None:
            self.weight.grad = torch.empty_like(self.weight, requires_grad=False)
            self._written = False
        target = self.weight.grad[at - self.start : at - self.start + values.numel()]
        if self._written:
            target.add_(values, alpha=scale)
            return
        torch.mul(values, scale, out=target)
        self._written = at + values.numel() == self.stop

    def set_grad(self, offset: int, values: Tensor) -> None:
        """Make `values` the gradient of the elements from `offset` on, counted in the shard."""
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight, requires_grad=False)
            self._written = True
        self.weight.grad[offset : offset + values.numel()] = values


class SkippedParams:
    """Keeps an optimizer step from changing parameters that got no gradient at all, as torch skips a `grad` of None.

    A flat tensor cannot leave elements out of a step (weight decay and momentum would move them), so their weights and
    state are saved before it and restored after it; state that the step has made anew is cleared. The step count is
    that of all. Whether another rank sent a gradient is left to the device, for which the host need not wait.
    """

    def __init__(self) -> None:
        self._saved: list[tuple[MasterShard, int, int, Tensor, dict[str | None, Tensor]]] = []

    def save(self, shard: MasterShard, state: dict[str, object], start: int, stop: int) -> None:
        """Keep elements [start, stop) of the shard, to be put back if no rank sent a gradient for them."""
        if shard.weight.grad is None:
            return
        sent = shard.weight.grad[start:stop].any()
        values = {kind: flat[start:stop].clone() for kind, flat in _flats(shard, state)}
        self._saved.append((shard, start, stop, sent, values))

    def restore(self, states: Mapping[Tensor, dict[str, object]]) -> None:
        """Undo what the step has done to them; `states` is the optimizer's state now."""
        for shard, start, stop, sent, values in self._saved:
            for kind, flat in _flats(shard, states.get(shard.weight, {})):
                now = flat[start:stop]
                now.copy_(torch.where(sent, now, values.get(kind, torch.zeros_like(now))))
        self._saved.clear()


def _flats(shard: MasterShard, state: dict[str, object]) -> Iterator[tuple[str | None, Tensor]]:
    """The weights of a shard (as None) and those of its optimizer state that are as long."""
    yield None, shard.values
    for kind, value in state.items():
        if isinstance(value, Tensor) and value.shape == shard.weight.shape:
            yield kind, value
