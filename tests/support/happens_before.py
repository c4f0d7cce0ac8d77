"""Checks what ranks enqueue for every order in which devices may run it: no deadlock, no mix-up, no early release.

Each rank has one stream of computation, in the order of its log, and one stream per communicator. A collective starts
on a rank once that rank's computation has come to its launch and the communicator's call before it has ended; it ends
when all members have started it. `Wait` makes the computation go on after that end. A copy between host and device is
a call of one member. These rules leave one partial order of starts and ends, whatever the speed of each device, so one
replay that takes every rank as far as it can get finds what can go wrong in any run. The replay keeps, for each rank,
the last call of each communicator whose end lies before everything that follows (a vector clock): memory that a later
call uses must not be touched.

Transports that block the host obey weaker rules: messages are told apart by tags instead of their order, and a host
that waits holds up the same work as a stream that waits. What passes here cannot hang there.

What memory reuse needs is covered by releases: bytes go back to the pool of the one computing stream, so whoever gets
them next comes after the release in this order.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


Storage = int | str  # what names a storage in a log


class Region(NamedTuple):
    """Bytes [begin, end) of a storage."""

    storage: Storage
    begin: int = 0
    end: float = math.inf

    def meets(self, other: Region) -> bool:
        return self.storage == other.storage and self.begin < other.end and other.begin < self.end


@dataclass(frozen=True, eq=False)
class Collective:
    """One rank launches a collective on a communicator with the given members."""

    communicator: str
    kind: str
    label: str = ""  # what it carries, for people; the same on every rank
    numel: int = 0
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    members: tuple[int, ...] = (0, 1)
    tagged: bool = False  # on a host: nothing holds up calls of other communicators
    after: Collective | None = None  # a copy of this rank, which is over before it starts

    def __str__(self) -> str:
        return f"{self.kind} of {self.label}" if self.label else self.kind


@dataclass(frozen=True, eq=False)
class Wait:
    """The computation goes on after the end of a collective."""

    collective: Collective


@dataclass(frozen=True, eq=False)
class Compute:
    """An operation on the computing stream."""

    name: str
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    of_model: bool = True  # False: the engine's own copies and sums, which hide no collective


@dataclass(frozen=True, eq=False)
class Resize:
    """A storage has so many bytes from here on: allocated, or released (0)."""

    storage: Storage
    nbytes: int


@dataclass(frozen=True, eq=False)
class Free:
    """Nobody holds the storage any more."""

    storage: Storage


@dataclass(frozen=True, eq=False)
class Section:
    """A pass begins, for counts per pass."""

    name: str


Event = Collective | Wait | Compute | Resize | Free | Section
Log = list[Event]
Clock = dict[str, int]  # communicator -> its last call that has ended before


def problems(logs: list[Log]) -> list[str]:
    """Everything that can go wrong when the ranks of `logs` run together; empty if nothing can."""
    replay = _Replay(logs)
    replay.run()
    return [*replay.found, *(_differing_orders(logs) if not replay.found else [])]


class _Replay:
    """All ranks, each taken as far as it gets."""

    def __init__(self, logs: list[Log]) -> None:
        self.logs, self.found = logs, []
        self._at = [0] * len(logs)
        self._clocks: list[Clock] = [{} for _ in logs]
        self._numbers: list[dict[str, int]] = [defaultdict(int) for _ in logs]  # calls launched, by communicator
        self._place: dict[Collective, tuple[str, int]] = {}  # communicator and number of each launch
        self._started: dict[tuple[str, int], dict[int, tuple[Collective, Clock]]] = defaultdict(dict)
        self._ends: dict[str, list[Clock]] = defaultdict(list)
        self._using: list[dict[Storage, list[Collective]]] = [defaultdict(list) for _ in logs]  # perhaps still running
        self._members: dict[str, tuple[int, ...]] = {}  # of communicators, by the rank that used each first
        self._mixed: set[str] = set()  # communicators whose calls were found to differ

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.logs)):
                while self._at[rank] < len(self.logs[rank]) and self._step(rank):
                    self._at[rank] += 1
                    moved = True
        if any(at < len(log) for at, log in zip(self._at, self.logs, strict=True)):
            self._report_deadlock()
        else:
            self._report_lonely_calls()

    def _step(self, rank: int) -> bool:
        """Run the next event of a rank; False where it must wait for other ranks."""
        event = self.logs[rank][self._at[rank]]
        match event:
            case Collective():
                self._launch(rank, event)
            case Wait(collective):
                communicator, number = self._place[collective]
                if number >= len(self._ends[communicator]):
                    return False
                _merge(self._clocks[rank], self._ends[communicator][number])
            case Compute():
                self._touch(rank, event.name, event.reads, event.writes, self._clocks[rank])
            case Resize(storage, 0) | Free(storage):
                self._touch(rank, "its release", (), (Region(storage),), self._clocks[rank])
        return True

    def _launch(self, rank: int, call: Collective) -> None:
        members = self._members.setdefault(call.communicator, call.members)
        if members != call.members:
            self._mix_up(call.communicator, f"has ranks {members}, and ranks {call.members} on rank {rank}")
        clock = dict(self._clocks[rank])
        if call.after is not None:
            communicator, number = self._place[call.after]
            _merge(clock, self._ends[communicator][number])
        self._touch(rank, str(call), call.reads, call.writes, clock, call.communicator)
        place = (call.communicator, self._numbers[rank][call.communicator])
        self._numbers[rank][call.communicator] += 1
        self._place[call] = place
        self._started[place][rank] = (call, clock)
        for storage in {region.storage for region in (*call.reads, *call.writes)}:
            self._using[rank][storage].append(call)
        self._end_calls(call.communicator)

    def _end_calls(self, communicator: str) -> None:
        """End the communicator's calls, in their order, that all members have started."""
        ends = self._ends[communicator]
        while started := self._started.get((communicator, len(ends))):
            if not started.keys() >= set(self._members[communicator]):
                return
            self._compare(communicator, len(ends), {rank: call for rank, (call, _) in started.items()})
            end = dict(ends[-1]) if ends else {}
            for _, clock in started.values():
                _merge(end, clock)
            end[communicator] = len(ends)
            ends.append(end)

    def _compare(self, communicator: str, number: int, calls: dict[int, Collective]) -> None:
        if len({(call.kind, call.label, call.numel) for call in calls.values()}) > 1:
            each = (f"{call} ({call.numel} elements) on rank {rank}" for rank, call in sorted(calls.items()))
            self._mix_up(communicator, f"is in call {number} {', '.join(each)}")

    def _mix_up(self, communicator: str, what: str) -> None:
        """Note where a communicator differs between ranks first; the rest follows from that."""
        if communicator not in self._mixed:
            self._mixed.add(communicator)
            self.found.append(f"mismatch: communicator {communicator!r} {what}")

    def _touch(
        self,
        rank: int,
        name: str,
        reads: tuple[Region, ...],
        writes: tuple[Region, ...],
        clock: Clock,
        communicator: str = "",
    ) -> None:
        """Find collectives, not surely over, that still need the memory which is touched here."""
        for region, changes in [*((region, True) for region in writes), *((region, False) for region in reads)]:
            pending = self._using[rank].get(region.storage)
            if not pending:
                continue
            pending[:] = [call for call in pending if not self._is_over(call, self._clocks[rank])]
            for call in (call for call in pending if not self._is_over(call, clock)):
                written = any(map(region.meets, call.writes))
                clash = written or (changes and any(map(region.meets, call.reads)))
                # The calls of one communicator run one after another.
                if clash and call.communicator != communicator:
                    ours, its = "changes" if changes else "reads", "writing to" if written else "reading"
                    self.found.append(
                        f"race: rank {rank}: {name} {ours} storage {region.storage} while {call} may still be {its} it"
                    )

    def _is_over(self, call: Collective, clock: Clock) -> bool:
        communicator, number = self._place[call]
        return clock.get(communicator, -1) >= number

    def _report_deadlock(self) -> None:
        left = sum(len(log) - at for log, at in zip(self.logs, self._at, strict=True))
        lines = [f"deadlock: {left} of {sum(map(len, self.logs))} events never run"]
        for rank, (log, at) in enumerate(zip(self.logs, self._at, strict=True)):
            if at == len(log):
                lines.append(f"rank {rank} has ended")
                continue
            call = log[at].collective
            communicator, number = self._place[call]
            missing = sorted(set(call.members) - self._started[communicator, number].keys())
            why = f"that rank(s) {missing} have not launched" if missing else "behind calls that have not ended"
            lines.append(f"rank {rank} waits for {call}, call {number} of communicator {communicator!r}, {why}")
        self.found.append("\n  ".join(lines))

    def _report_lonely_calls(self) -> None:
        for (communicator, number), started in self._started.items():
            if number == len(self._ends[communicator]):  # the first that has not ended
                call = next(iter(started.values()))[0]
                missing = sorted(set(call.members) - started.keys())
                self.found.append(
                    f"mismatch: call {number} of communicator {communicator!r}, {call}, is made on rank(s) "
                    f"{sorted(started)} and never on {missing}"
                )


def _merge(clock: Clock, other: Clock) -> None:
    for communicator, number in other.items():
        clock[communicator] = max(clock.get(communicator, -1), number)


def _differing_orders(logs: list[Log]) -> list[str]:
    """Pairs of ranks that launch on the communicators they share in different orders.

    Where devices cannot hold the kernels of both, or have one queue for all launches, that is a deadlock by itself.
    """
    found = []
    for one, other in itertools.combinations(range(len(logs)), 2):
        mine, theirs = (
            [
                event
                for event in logs[rank]
                if isinstance(event, Collective) and not event.tagged and {one, other} <= set(event.members)
            ]
            for rank in (one, other)
        )
        for number, (left, right) in enumerate(zip(mine, theirs, strict=True)):
            if left.communicator != right.communicator:
                found.append(
                    f"order: launch {number} is {left} (communicator {left.communicator!r}) on rank {one}, and "
                    f"{right} (communicator {right.communicator!r}) on rank {other}"
                )
                break
    return found


def exposed_gathers(log: Log) -> dict[str, list[str]]:
    """By section: what all-gathers of units carried that the model waited for and no work of its own could hide.

    Gathers that are waited for at one place are one entry.
    """
    section, work = "", 0
    launched: dict[Collective, int] = {}
    found: dict[str, dict[int, list[str]]] = defaultdict(dict)
    for event in log:
        match event:
            case Section(name):
                section = name
                found[section] = {}
            case Compute(of_model=True):
                work += 1
            case Collective(kind="all-gather") if event.label:
                launched[event] = work
            case Wait(collective) if launched.get(collective) == work:
                found[section].setdefault(work, []).append(collective.label)
    return {name: [" + ".join(labels) for labels in places.values()] for name, places in found.items()}


def too_many_exposed(log: Log, allowed: int = 1) -> dict[str, list[str]]:
    """Passes of the last micro-batch that wait for more gathers than allowed with nothing to do meanwhile."""
    exposed = exposed_gathers(log)
    last = list(exposed)[-1].split()[-1]
    return {name: labels for name, labels in exposed.items() if name.endswith(f" {last}") and len(labels) > allowed}


def reductions_under_way(log: Log) -> Iterator[tuple[Event, float]]:
    """Every event, and the bytes that reductions hold which have been launched by then and not waited for."""
    held: dict[Collective, float] = {}
    for event in log:
        match event:
            case Collective(kind="reduce-scatter" | "all-to-all"):
                held[event] = sum(region.end - region.begin for region in (*event.reads, *event.writes))
            case Wait(collective):
                held.pop(collective, None)
        yield event, sum(held.values())
