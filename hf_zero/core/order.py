"""The order of hooked calls: recorded in a forward pass, expected in the next; how far backward has come; limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hf_zero.core.unit import Unit


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far ahead and how long values are held at stage 3, in elements; DeepSpeed's stage3_* keys of these names."""

    overlap: bool = True  # gather ahead and reduce behind, instead of waiting for each collective
    prefetch: int = 1  # gathered ahead: the next unit always (but for 0), further ones as long as they fit
    live: int = 10**9  # beyond this many no further ones are gathered ahead, and none are kept
    reuse: int = 0  # kept after forward if used again before this many others


@dataclass(eq=False)
class HookPoint:
    """A hooked module and the units that its forward needs."""

    name: str
    units: list[Unit]
    reads_weights_in_backward: bool
    is_root: bool
    received: dict[int, int] = field(default_factory=dict)  # of the call under way: id and version of each input


class Place(NamedTuple):
    """A moment in a forward pass, which backward comes back to."""

    calls: int  # of hooked modules that have begun by then, in all passes
    trace: list[HookPoint]  # the calls of this pass...
    end: int  # ...of which so many have begun by then


class ForwardOrder:
    """Tells what comes next, as long as a pass follows the one before; else nothing, and the new order is learnt.

    A pass is known by the module that it begins with: the model itself, or a part of it that is called directly.
    """

    def __init__(self) -> None:
        self.calls = 0  # of hooked modules so far, recomputation included
        self.forget()

    def forget(self) -> None:
        """Start from nothing: the hook points or their units have changed."""
        self._known: dict[HookPoint, list[HookPoint]] = {}  # the last passes, by their first call
        self._trace: list[HookPoint] | None = None  # the pass under way
        self._expected: list[HookPoint] = []  # the one before that began alike
        self._on_track = False
        self.here = Place(self.calls, [], 0)
        self.begin_backward()

    # -- forward --------------------------------------------------------------------------------------------------

    def begins_at(self, point: HookPoint) -> bool:
        """Whether a call outside of the model's own forward belongs to a new pass."""
        return not self._trace or self._trace[0] is point

    def begin(self, point: HookPoint) -> None:
        self.complete()
        self._trace, self._expected, self._on_track = [], self._known.get(point, []), True

    def visit(self, point: HookPoint) -> None:
        assert self._trace is not None, "a pass is under way"
        at = len(self._trace)
        self._trace.append(point)
        self._on_track = self._on_track and at < len(self._expected) and self._expected[at] is point
        self._move(self._trace, at + 1)

    def _move(self, trace: list[HookPoint], end: int) -> None:
        self.calls += 1
        self.here = Place(self.calls, trace, end)

    @property
    def is_open(self) -> bool:
        """Whether a pass is under way."""
        return self._trace is not None

    def note_read(self) -> int:
        """Number a use of parameters that is not a call."""
        self.calls += 1
        self.here = self.here._replace(calls=self.calls)
        return self.calls

    def complete(self) -> None:
        """The pass is over."""
        if self._trace:
            self._known[self._trace[0]] = self._trace
        self._trace, self._on_track = None, False

    def upcoming(self, then_backward: bool) -> Iterator[HookPoint]:
        """What follows the point visited last: the rest of forward and, if asked for, backward."""
        if self._on_track and self._trace is not None:
            yield from self._expected[len(self._trace) :]
            if then_backward:
                yield from _backward(self._expected, len(self._expected))

    # -- backward -------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        self._way: list[HookPoint] = []  # the pass that backward goes through...
        self._left = 0  # ...and how much of it is left

    def reach(self, place: Place) -> None:
        """Backward has come to `place`. Outputs of the model that lie inside of it do not lead back up."""
        if place.trace is not self._way or place.end < self._left:
            self._way, self._left = place.trace, place.end

    def upcoming_in_backward(self, point: HookPoint) -> Iterator[HookPoint]:
        """What follows `point`, whose gradient has come."""
        for earlier in _backward(self._way, self._left):
            if earlier is not point:
                yield earlier

    def recompute(self, point: HookPoint) -> Iterator[HookPoint]:
        """Backward calls `point` again. What follows: the rest of what is recomputed, then backward."""
        at = next((at for at in reversed(range(self._left)) if self._way[at] is point), None)
        if at is None:
            self._move([], 0)
            return iter(())
        self._move(self._way, at + 1)
        return itertools.chain(self._way[at + 1 : self._left], _backward(self._way, at))


def _backward(trace: list[HookPoint], end: int) -> Iterator[HookPoint]:
    """The first `end` calls, last one first, without those whose backward reads no weights."""
    for at in reversed(range(end)):
        if trace[at].reads_weights_in_backward and not trace[at].is_root:
            yield trace[at]


class Progress:
    """Which units backward has left behind: it has come back to a place in forward before their first use.

    Nothing else counts, so it is the same on all ranks that make the same calls, whatever gradients arrive.
    """

    _reached: float
    _went_back: bool

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._first: dict[Unit, int] = {}  # the call that first used a unit, of all that backward may come back to
        self.end_backward()

    def begin_forward(self) -> None:
        if self._went_back:
            self._first.clear()
            self._went_back = False

    def use(self, units: Iterable[Unit], call: int) -> None:
        """The forward pass under way uses units in that call, or the recomputation of one does."""
        for unit in units:
            self._first.setdefault(unit, call)

    def forget_since(self, calls: int) -> None:
        """Backward will not come to what was called after that many calls."""
        self._first = {unit: first for unit, first in self._first.items() if first <= calls}

    def reach(self, calls: int) -> bool:
        """Backward has come back to where so many calls had begun; whether it was not as far before."""
        further = calls < self._reached
        self._reached = min(self._reached, calls)
        return further

    def has_left(self, unit: Unit) -> bool:
        return self._first.get(unit, math.inf) > self._reached

    def end_backward(self) -> None:
        self._reached, self._went_back = math.inf, True
