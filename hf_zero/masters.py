"""Flat fp32 master weights with their gradients: one tensor per optimizer group, from which weights are cast."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class MasterGroup:
    """What this rank owns of one optimizer group, laid out [unit][slice], and the gradient of it.

    `weight` is the only parameter that the optimizer sees for the group. `weight.grad` exists from the first
    reduction of a step until `zero_grad`.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.zeros(numel, dtype=dtype, device=device).requires_grad_()
        self.written: set[int] = set()  # offsets of the pieces that the gradient already holds

    def make_grad(self) -> Tensor:
        """The gradient, with room for all pieces."""
        if self.weight.grad is None:
            self.weight.grad = torch.empty_like(self.weight, requires_grad=False)
            self.written.clear()
        return self.weight.grad


@dataclass(frozen=True, eq=False)
class Piece:
    """Elements [start, stop) of what a rank owns of one buffer, kept at `offset` of a master group."""

    start: int
    stop: int
    group: MasterGroup
    offset: int

    @property
    def weight(self) -> Tensor:
        return self.group.weight.detach()[self.offset : self.offset + self.stop - self.start]

    @property
    def grad(self) -> Tensor | None:
        grad = self.group.weight.grad
        return None if grad is None else grad[self.offset : self.offset + self.stop - self.start]

    def add_grad(self, at: int, values: Tensor, scale: float) -> None:
        """Add `scale * values` to the gradient of the elements from `at` on.

        A reduction brings a piece whole, in parts, from its start on. The first one writes, so nothing needs zeroing.
        """
        first = self.offset + at - self.start
        target = self.group.make_grad()[first : first + values.numel()]
        if self.offset in self.group.written:
            target.add_(values, alpha=scale)
            return
        torch.mul(values, scale, out=target)
        if at + values.numel() == self.stop:
            self.group.written.add(self.offset)


class Untouched:
    """Keeps an optimizer step from changing parameters that got no gradient at all, as torch skips a `grad` of None.

    A flat tensor cannot leave elements out of a step (weight decay and momentum would move them), so their weights and
    state are put aside before it and put back after it. The step count is the group's.
    """

    def __init__(self) -> None:
        self._saved: list[tuple[Tensor, Tensor]] = []

    def put_aside(self, group: MasterGroup, state: dict[str, object], start: int, stop: int) -> None:
        """Note elements [start, stop) of `group`, unless some rank sent a gradient for them."""
        if group.weight.grad is None or group.weight.grad[start:stop].any():
            return
        flats = [value for value in state.values() if isinstance(value, Tensor) and value.shape == group.weight.shape]
        for flat in [group.weight.detach(), *flats]:
            self._saved.append((flat[start:stop], flat[start:stop].clone()))

    def put_back(self) -> None:
        for target, value in self._saved:
            target.copy_(value)
        self._saved.clear()
