"""A collective under way: what it carries, how to wait for it, and where its result goes."""

from __future__ import annotations

import time
from collections import Counter
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
    tag: int = 0


UNTAGGED = Tag("a tensor")

# Takes a part of a reduction's result: its first element, counted in what this rank owns, and the values, which are
# only valid during the call.
OnChunk = Callable[[int, Tensor], None]


class Work(Protocol):
    """What torch.distributed answers for an asynchronous collective."""

    def wait(self) -> object: ...


class Work:
    """A collective under way. `wait` may be called any number of times.

    Args:
        works: what to wait for before `finish` can run.
        label: its name for people.
        beside: the transfer progresses without this thread. If it does not, waiting late gains nothing and holds
            memory.
        waited: where the seconds of standing still are added up, by the first word of the label.
    """

    def __init__(
        self,
        works: Sequence[Work] = (),
        finish: Callable[[], None] | None = None,
        label: str = "",
        *,
        monitor: Watchdog | None = None,
        waited: Counter[str] | None = None,
        beside: bool = True,
    ) -> None:
        self._works, self._finish = works, finish
        self.beside = beside
        self._label, self._monitor = label, monitor
        self._waited = Counter() if waited is None else waited

    def wait(self) -> None:
        if self._finish is None:
            return
        began = time.perf_counter()
        if torch.autograd._profiler_enabled():  # a label costs as much as a short wait
            with torch.profiler.record_function(f"hf_zero::{self._label}"):
                self._wait_and_finish()
        else:
            self._wait_and_finish()
        self._waited[self._label.partition(" ")[0]] += time.perf_counter() - began
        self._works, self._finish = (), None

    def _wait_and_finish(self) -> None:
        if self._monitor is None:
            self._wait_for_works()
        else:
            self._monitor.wait(self._label, self._wait_for_works)
        self._finish()

    def _wait_for_works(self) -> None:
        for work in self._works:
            work.wait()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


def deliver_parts(parts: Sequence[Tensor], deliver: OnChunk) -> None:
    """OnChunk tensors that lie end to end."""
    at = 0
    for part in parts:
        deliver(at, part.to(wide(part.dtype)))
        at += part.numel()
