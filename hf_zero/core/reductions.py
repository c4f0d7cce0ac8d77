"""The reductions of a backward pass: in one order on all ranks, at moments that all ranks share, few at a time."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable

from hf_zero.core.gradients import GradientBuffer
from hf_zero.core.unit import Unit


class Reductions:
    """Reduces units last one first, which is about the order in which backward comes to them.

    Args:
        overlap: reductions go on under what follows, up to two layers' worth of elements at a time (a larger one by
            itself), and one for each hop, so that every hop has a layer of backward to go on under.
    """

    def __init__(self, units: Iterable[Unit], *, overlap: bool) -> None:
        self._queue = [(unit, gradient) for unit in reversed(list(units)) for gradient in unit.gradients]
        self._in_hops = any(gradient.buffer.gradient_route.node_sum is not None for _, gradient in self._queue)
        self._next = 0  # how many of `_queue` were begun in this backward pass
        self._under_way: deque[GradientBuffer] = deque()
        self._numel = 0  # of what is under way
        sizes = [sum(gradient.numel for gradient in unit.gradients) for unit in units if unit.gradients]
        layers = max((gradient.buffer.mesh.hops for _, gradient in self._queue), default=0)
        self._room = max(2, layers) * statistics.median_high(sizes) if sizes and overlap else 0

    def begin(self, has_left: Callable[[Unit], bool], *, to_owner: bool) -> None:
        """Begin what backward has left behind, as far as the order allows; see `GradientBuffer.begin_reduce`.

        A gradient that is still to come (its parameter was also read before its module was called) is waited for.
        """
        while self._next < len(self._queue):
            unit, gradient = self._queue[self._next]
            if not has_left(unit) or gradient.is_awaited:
                if gradient.numel > self._room:  # what is made next is large by itself
                    self.wait()
                return
            self._next += 1
            self._begin(unit, gradient, to_owner)

    def _begin(self, unit: Unit, gradient: GradientBuffer, to_owner: bool) -> None:
        if self._in_hops and gradient is unit.gradients[0]:
            for earlier in self._under_way:  # a layer of backward has gone by since its last hop
                earlier.advance_reduce()
        while self._under_way and self._numel + gradient.numel > self._room:
            self._finish_oldest()
        gradient.begin_reduce(to_owner=to_owner)
        self._under_way.append(gradient)
        self._numel += gradient.numel
        if not self._room:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        gradient = self._under_way.popleft()
        self._numel -= gradient.numel
        gradient.finish_reduce()

    def begin_backward(self) -> None:
        self._next = 0
        for _, gradient in self._queue:
            gradient.begin_backward()

    def come_to(self, units: Iterable[Unit]) -> None:
        """Backward goes through modules of these units: what was reduced before is reduced again at the end."""
        for unit in units:
            for gradient in unit.gradients:
                gradient.expect()

    @property
    def missing(self) -> bool:
        """Whether anything is not reduced yet; the same on every rank."""
        return any(gradient.unreduced or (self._in_hops and gradient.is_on_node) for _, gradient in self._queue)

    def finish(self, *, to_owner: bool = True) -> None:
        """Reduce everything that is not reduced yet, and wait for it."""
        for unit, gradient in self._queue:
            if gradient.unreduced or (self._in_hops and to_owner and gradient.is_on_node):
                self._begin(unit, gradient, to_owner)
        self.wait()

    def wait(self) -> None:
        """Let what is under way come to its end."""
        while self._under_way:
            self._finish_oldest()
