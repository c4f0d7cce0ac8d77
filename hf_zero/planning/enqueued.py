"""Writes down what one rank of the planner enqueues: operations with their cost, collectives, waits for them.

Ranks are symmetric, so one rank stands for all: what another would enqueue differs in which slice it owns only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.comm.transport import Take, Transport
from hf_zero.comm.work import Handle, Landing, Tag
from hf_zero.planning.remembered import is_composed, is_trial
from hf_zero.tools.operations import Operation, describe, tensors_in


@dataclass(frozen=True, eq=False)
class Move:
    """One collective, or one copy to or from another place, is launched.

    Attributes:
        kind: "all-gather", "exchange", "reduce-scatter" or "all-reduce"; of copies "download", "upload", "disk read"
            or "disk write".
        label: what it carries, for people.
        nbytes: that each rank of the group sends to every other one; of copies, all.
        members: ranks of the group, numbered over all ranks.
        channel: collectives of one channel run one after another.
        by: whose way of moving: "nccl", "messages" or "reads"; of copies "bus" or "disk".
    """

    kind: str
    label: str
    nbytes: int
    members: tuple[int, ...]
    channel: str
    by: str


@dataclass(frozen=True, slots=True)
class Wait:
    """The computation goes on after the end of a collective or copy; `host`: the process itself does."""

    move: Move
    host: bool = False


@dataclass(frozen=True, slots=True)
class Behind:
    """The next collective begins after the end of a copy, and the computation goes on."""

    move: Move


@dataclass(frozen=True, slots=True)
class Mark:
    """A part of the step begins: "step", "forward", "backward" or "optimizer"."""

    name: str


@dataclass(frozen=True, slots=True)
class Read:
    """The host asks for a value on the device, and waits for it."""


Event = Operation | Move | Wait | Behind | Mark | Read


@dataclass
class Enqueued:
    """The log of a rank; `is_apart` says whether a tensor is in the host's memory, and not in the device's."""

    events: list[Event] = field(default_factory=list)
    is_apart: Callable[[Tensor], bool] = lambda tensor: False

    def mark(self, name: str) -> None:
        """A part of the step begins."""
        self.events.append(Mark(name))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Operations inside are written down."""
        with _Operations(self):
            yield

    def copy(self, kind: str, nbytes: int, by: str) -> _Awaited:
        """Write down that a copy begins; the host may wait for it."""
        move = Move(kind, "state", nbytes, (0,), kind if by == "bus" else by, by)
        self.events.append(move)
        return _Awaited(move, self.events, host=True)

    def noting(self, transport: Transport) -> Transport:
        """`transport`, with its moves written down."""
        return Noting(transport, self.events, tuple(range(transport.size)))


# -- operations -------------------------------------------------------------------------------------------------------


class _Operations(TorchDispatchMode):
    def __init__(self, log: Enqueued) -> None:
        super().__init__()
        self._events, self._is_apart = log.events, log.is_apart

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_composed(types):
            return NotImplemented
        if is_trial(types):
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            self._events.append(Read())
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        operation = describe(func, args, kwargs, result)
        if operation is not None:
            read = tensors_in(args)
            apart = bool(read) and self._is_apart(read[0])
            self._events.append(replace(operation, on_host=True) if apart else operation)
        return result


# -- collectives ------------------------------------------------------------------------------------------------------


def _listed(members: tuple[int, ...]) -> str:
    """0, 1; 0 to 7; 0, 8, ... 1016: no two groups of one rank have the same."""
    if members == tuple(range(members[0], members[-1] + 1)):
        return f"{members[0]} to {members[-1]}"
    return ", ".join(map(str, members)) if len(members) < 4 else f"{members[0]}, {members[1]}, ... {members[-1]}"


class _Awaited:
    """In the place of what a transport answers for a collective under way."""

    def __init__(self, move: Move, events: list[Event], inner: Sequence[Handle] = (), host: bool = False) -> None:
        self.move, self._events, self._inner, self._host = move, events, inner, host

    def wait(self) -> None:
        for handle in self._inner:
            handle.wait()
        self._events.append(Wait(self.move, self._host))


class Noting(Transport):
    """In front of a transport: writes down its moves."""

    def __init__(self, inner: Transport, events: list[Event], members: tuple[int, ...]) -> None:
        self.rank, self.size, self.name = inner.rank, inner.size, inner.name
        self.overlaps, self.takes_parts = inner.overlaps, inner.takes_parts
        self._inner, self._events, self._members = inner, events, members

    def split(self, groups: Sequence[Sequence[int]]) -> Noting:
        mine = next(group for group in groups if self.rank in group)
        return Noting(self._inner.split(groups), self._events, tuple(self._members[rank] for rank in mine))

    def by_reads(self) -> Noting:
        """The same ranks, reading each other's memory."""
        return Noting(self._inner.by_reads(), self._events, self._members)

    def _begin(self, kind: str, tag: Tag, nbytes: int, channel: str, *, is_read: bool = False) -> Move:
        by = "messages" if self.name == "reads" and not is_read else self.name  # as `Reads` does, which is one
        move = Move(kind, tag.name, nbytes, self._members, f"{channel} of ranks {_listed(self._members)}", by)
        self._events.append(move)
        return move

    def _noted(self, landing: Landing, move: Move) -> Landing:
        return Landing([_Awaited(move, self._events, landing.handles)], landing.finish)

    def gather(self, flat: Tensor, tag: Tag, shard: Sequence[Tensor]) -> Landing:
        move = self._begin("all-gather", tag, flat.nbytes // self.size, "gathers", is_read=True)
        return self._noted(self._inner.gather(flat, tag, shard), move)

    def exchange(self, parts: Sequence[Tensor], numel: int, tag: Tag, take: Take) -> Landing:
        move = self._begin("exchange", tag, numel * parts[0].itemsize, "reductions", is_read=True)
        return self._noted(self._inner.exchange(parts, numel, tag, take), move)

    def hand_over(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: Tag) -> Landing:
        nbytes = max(tensor.nbytes for tensor in (*outgoing, *incoming))  # unequal ones wait for the longest
        move = self._begin("exchange", tag, nbytes, "exchanges")
        return self._noted(self._inner.hand_over(outgoing, incoming, tag), move)

    def sums(self, dtype: torch.dtype) -> bool:
        return self._inner.sums(dtype)

    def reduce_scatter(self, flat: Tensor, out: Tensor, tag: Tag) -> Handle:
        move = self._begin("reduce-scatter", tag, out.nbytes, "reductions")
        return _Awaited(move, self._events, [self._inner.reduce_scatter(flat, out, tag)])

    def all_reduce(self, flat: Tensor, tag: Tag) -> Handle:
        move = self._begin("all-reduce", tag, flat.nbytes // self.size, "reductions")
        return _Awaited(move, self._events, [self._inner.all_reduce(flat, tag)])

    def all_reduce_scalars(self, values: Tensor, largest: bool) -> None:
        move = self._begin("all-reduce", Tag("scalars"), values.nbytes, "gathers")
        self._events.append(Wait(move))

    def fence(self, tag: Tag | None) -> Landing:
        return self._inner.fence(tag)
