"""A part of what a rank owns, with its gradient, to which every reduction adds."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_zero.core.courier import Courier
from hf_zero.core.layout import FlatLayout, Span


class GradientShard:
    """Elements [start, stop) of what a rank owns of one buffer, all of one optimizer group, with their gradient.

    `weight.grad`, in fp32 (or fp64), exists from the first reduction of a step until `zero_grad`: gradients take their
    memory as backward proceeds, and not all at its beginning.

    Args:
        layout, begin: where it lies: `start` and `stop` count from element `begin` of the layout.
        weight: has the gradient; what its values are is for subclasses to say.
        courier: brings gradients to where the weight is.
    """

    def __init__(
        self, layout: FlatLayout, begin: int, start: int, stop: int, weight: Tensor, courier: Courier
    ) -> None:
        self.start, self.stop = start, stop
        self._layout, self._begin = layout, begin
        self.weight, self.courier = weight.requires_grad_(), courier
        self._written = False  # `weight.grad` holds the sum of a whole reduction at least

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def spans(self) -> Iterator[Span]:
        """The parts of parameters that lie in it; `Span.offset` counts from `start`."""
        return self._layout.spans(self._begin + self.start, self._begin + self.stop)

    @property
    def grad(self) -> Tensor | None:
        """The gradient, when everything that was reduced so far has arrived."""
        self.courier.land()
        return self.weight.grad

    def add_grad(self, at: int, values: Tensor, scale: float) -> None:
        """Add `scale * values` to the gradient of the elements from `at` on.

        A reduction brings all of a shard, in parts, from its start on. The first one writes: nothing needs zeroing.
        """
        grad = self._grad_to_change()
        if grad is None:
            grad = self.weight.grad = self._empty_grad()
            self._written = False
        target = grad[at - self.start : at - self.start + values.numel()]
        self.courier.down(values, functools.partial(_add if self._written else _write, target, scale))
        self._written = self._written or at + values.numel() == self.stop

    def set_grad(self, offset: int, values: Tensor) -> None:
        """Make `values` the gradient of the elements from `offset` on, counted in the shard."""
        grad = self._grad_to_change()
        self.courier.land()
        if grad is None:
            grad = self.weight.grad = self._empty_grad().zero_()
            self._written = True
        grad[offset : offset + values.numel()] = values

    def _grad_to_change(self) -> Tensor | None:
        return self.weight.grad

    def _empty_grad(self) -> Tensor:
        # Not `empty_like`: at rest the weight may be a shell.
        return torch.empty(self.numel, dtype=self.weight.dtype, device=self.weight.device)


def _write(grad: Tensor, scale: float, at: int, values: Tensor) -> None:
    target = grad[at : at + values.numel()]
    if values.dtype == grad.dtype:
        torch.mul(values, scale, out=target)
    else:  # a product in 16 bits would be rounded
        target.copy_(values).mul_(scale)


def _add(grad: Tensor, scale: float, at: int, values: Tensor) -> None:
    grad[at : at + values.numel()].add_(values, alpha=scale)
