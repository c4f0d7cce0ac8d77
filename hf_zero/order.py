"""The order in which a model calls its hooked modules: recorded in one forward pass, expected in the next."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from hf_zero.unit import Unit


@dataclass(eq=False)
class HookPoint:
    """A hooked module and the units that its forward needs."""

    name: str
    units: list[Unit]
    reads_weights_in_backward: bool
    is_root: bool
    received: dict[int, int] = field(default_factory=dict)  # of the call under way: id and version of each input

    @functools.cached_property
    def announces_backward(self) -> bool:
        """Whether the gradients of its outputs are hooked: its weights are released by then, or backward begins."""
        return self.is_root or (self.reads_weights_in_backward and any(unit.sharded for unit in self.units))


class ForwardOrder:
    """Tells what comes next, as long as a pass follows the one before; else nothing, and the new order is learnt."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start from nothing: the hook points or their units have changed."""
        self._known: list[HookPoint] = []  # the last complete forward
        self._trace: list[HookPoint] = []  # the forward under way
        self._on_track = False
        self._backward_at = 0  # how far backward has come down `_known`

    def begin(self) -> None:
        self._trace, self._on_track = [], True

    def visit(self, point: HookPoint) -> None:
        at = len(self._trace)
        self._trace.append(point)
        self._on_track = self._on_track and at < len(self._known) and self._known[at] is point

    def complete(self) -> None:
        """The forward is over; backward comes next."""
        self._known, self._on_track = self._trace, False
        self._backward_at = len(self._known)

    def upcoming(self, then_backward: bool) -> Iterator[HookPoint]:
        """What follows the point visited last: the rest of forward and, if asked for, backward."""
        if self._on_track:
            yield from self._known[len(self._trace) :]
            if then_backward:
                yield from self._backward_from(len(self._known))

    def upcoming_in_backward(self, point: HookPoint) -> Iterator[HookPoint]:
        """What follows `point` in backward; nothing where the graph is not the last forward's."""
        at = self._backward_at - 1
        while at >= 0 and self._known[at] is not point:
            at -= 1
        if at >= 0:
            self._backward_at = at
            yield from self._backward_from(at)

    def _backward_from(self, at: int) -> Iterator[HookPoint]:
        for point in reversed(self._known[:at]):
            if point.reads_weights_in_backward and not point.is_root:
                yield point
