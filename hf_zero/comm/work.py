"""A collective under way: what it carries, how to wait for it, and where its result goes."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_zero.comm.watchdog import Watchdog


@dataclass(frozen=True)
class Tag:
    """What a collective carries: a name for people, and a number that tells it from others under way."""

    name: str
    number: int = 0


UNTAGGED = Tag("a tensor")

# Takes a chunk of a reduction's result: its first element, counted in what this rank owns, and the values, which are
# only valid during the call.
OnChunk = Callable[[int, Tensor], None]


class Handle(Protocol):
    """What torch.distributed answers for an asynchronous collective."""

    def wait(self) -> object: ...


def nothing() -> None:
    """Nothing is left to be done."""


@dataclass
class Landing:
    """What a transport has begun: wait for every handle, then call `finish`, which brings values to their place."""

    handles: Sequence[Handle] = ()
    finish: Callable[[], None] = nothing

    def wait(self) -> None:
        """For what was begun."""
        for handle in self.handles:
            handle.wait()


class Work:
    """A collective under way. `wait` may be called any number of times.

    Args:
        landing: what the transport has begun.
        kind, what: its name for people is "`kind` of `what`".
        watchdog: told while this process waits.
        waited: where the seconds of standing still are added up, by kind.
    """

    def __init__(
        self,
        landing: Landing | None = None,
        kind: str = "",
        what: str = "",
        *,
        watchdog: Watchdog | None = None,
        waited: dict[str, float] | None = None,
    ) -> None:
        self._landing = landing
        self._kind, self._what, self._watchdog = kind, what, watchdog
        self._waited = defaultdict(float) if waited is None else waited

    def advance(self) -> None:
        """Begin what follows when this is over (see `Route`): nothing."""

    def wait(self) -> None:
        """Block (on NCCL: the compute stream) until the result is in its place."""
        if self._landing is None:
            return
        landing, self._landing = self._landing, None
        began = time.perf_counter()
        if torch.autograd._profiler_enabled():  # a label costs as much as a short wait
            with torch.profiler.record_function(f"hf_zero::{self._kind} of {self._what}"):
                self._wait_and_finish(landing)
        else:
            self._wait_and_finish(landing)
        self._waited[self._kind] += time.perf_counter() - began

    def _wait_and_finish(self, landing: Landing) -> None:
        if self._watchdog is None:
            landing.wait()
        else:
            self._watchdog.wait(f"{self._kind} of {self._what}", landing.wait)
        landing.finish()


class Route(Work):
    """Collectives one after another, each begun when the one before is over: the hops of one move.

    Ranks that share a later hop must come to it in the same order as to others, so it begins where the caller says
    so (`advance`, `wait`), and not when the one before happens to be over.
    """

    def __init__(self, first: Work, *more: Callable[[], Work]) -> None:
        self._hop, self._more = first, deque(more)

    def advance(self) -> None:
        """Wait for the hop under way and begin the next one, if there is one; a hop may be a route itself."""
        if self._more:
            self._hop.wait()
            self._hop = self._more.popleft()()
        else:
            self._hop.advance()

    def wait(self) -> None:
        while self._more:
            self.advance()
        self._hop.wait()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)
