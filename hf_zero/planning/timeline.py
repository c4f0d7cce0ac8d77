"""When everything that a rank enqueues would run: the longest path through a step is its time."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_zero.planning.costs import COPIES, Machine
from hf_zero.planning.enqueued import Behind, Event, Mark, Move, Read, Wait
from hf_zero.tools.operations import Operation


COMPUTE = "computation"
_UNSEEN = 1 / 1000  # of a step: about a pixel of a drawing


@dataclass(frozen=True, slots=True)
class Span:
    """Something that runs on one stream for a while; in seconds."""

    stream: str
    name: str
    start: float
    stop: float


@dataclass
class Timeline:
    """One step among others like it, in seconds.

    Attributes:
        seconds: of the whole step.
        computing: in which operations run.
        exposed: in which the computation waits for collectives, by kind and what they carry.
        launching: in which the computation waits for the host to launch something.
        moving: of all collectives, hidden or not, by kind.
        spans: what runs when, from the beginning of the step.
        parts: what begins when ("forward", "backward", "optimizer"), in order.
    """

    seconds: float = 0.0
    computing: float = 0.0
    launching: float = 0.0
    exposed: Counter[tuple[str, str]] = field(default_factory=Counter)
    moving: Counter[str] = field(default_factory=Counter)
    spans: list[Span] = field(default_factory=list)
    parts: list[tuple[str, float]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """What a drawing needs, as plain values: `lanes` are when a stream is busy, without gaps that nobody sees."""
        lanes: defaultdict[str, list[list[float]]] = defaultdict(list, {COMPUTE: []})
        borders = [start for _, start in self.parts]
        for span in self.spans:
            lane = lanes[span.stream]
            near = bool(lane) and span.start - lane[-1][1] < self.seconds * _UNSEEN
            if near and bisect_right(borders, lane[-1][0]) == bisect_right(borders, span.start):
                lane[-1][1] = span.stop
            else:
                lane.append([span.start, span.stop])
        waits = {f"{kind} of {label}": seconds for (kind, label), seconds in self.exposed.most_common()}
        return {
            "seconds": self.seconds,
            "computing": self.computing,
            "launching": self.launching,
            "waits": waits,
            "lanes": dict(lanes),
            "parts": self.parts,
        }

    def write_trace(self, path: Path) -> None:
        """A file for chrome://tracing and Perfetto (Trace Event Format)."""
        streams = list(dict.fromkeys(span.stream for span in self.spans))
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": stream}}
            for number, stream in enumerate(streams)
        ]
        events += [
            {
                "ph": "X",
                "name": span.name,
                "pid": 0,
                "tid": streams.index(span.stream),
                "ts": span.start * 1e6,
                "dur": (span.stop - span.start) * 1e6,
            }
            for span in self.spans
        ]
        path.write_text(json.dumps({"traceEvents": events}))


def replay(events: list[Event], machine: Machine) -> Timeline:
    """Run a log of steps on a machine; the last one comes back, which has others before it.

    [Note: streams] The host launches operations and collectives in the order of the log. Operations run one after
    another, not before they are launched. Collectives of a channel run one after another, not before what was
    launched ahead of them is computed, and have the link that they cross to themselves. CPU ranks run operations
    themselves, and stand still while they wait for messages. Reads of other ranks' memory take the reader's own time,
    when it waits for them.
    """
    run = _Replay(machine)
    for event in events:
        run.take(event)
    return run.steps[-2]


class _Replay:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.steps = [Timeline()]  # what is before the first one, too
        self._host = self._compute = self._began = 0.0
        self._channels: defaultdict[str, float] = defaultdict(float)
        self._links: defaultdict[bool, float] = defaultdict(float)
        self._ends: dict[Move, float] = {}
        self._gate = 0.0  # when the next collective may begin

    def take(self, event: Event) -> None:
        match event:
            case Operation():
                self._operate(event)
            case Move():
                self._launch(event)
            case Wait(move, host):
                self._wait(move, host)
            case Behind(move):
                self._gate = self._ends[move]
            case Read():
                self._host = max(self._host, self._compute)
            case Mark("step"):
                self._begin_step()
            case Mark(name):
                self.steps[-1].parts.append((name, max(self._host, self._compute) - self._began))

    def _begin_step(self) -> None:
        now = max(self._host, self._compute)
        self.steps[-1].seconds = now - self._began
        self.steps.append(Timeline())
        self._began = now

    def _operate(self, operation: Operation) -> None:
        if operation.on_host and not self.machine.host_computes:
            self._compute_on_host(operation)
            return
        self._host += self.machine.launch
        start = max(self._host, self._compute)
        seconds = self.machine.operation_seconds(operation)
        beside = min(seconds, max(0.0, max(self._links.values(), default=0.0) - start))
        seconds += beside * self.machine.contention
        self.steps[-1].launching += start - self._compute
        self.steps[-1].computing += seconds
        self._note(COMPUTE, operation.name, start, start + seconds)
        self._compute = start + seconds
        if self.machine.host_computes:
            self._host = self._compute

    def _compute_on_host(self, operation: Operation) -> None:
        """Nothing more is launched until it is over, so that the device stands still when it has done all before."""
        start = self._host
        self._host += self.machine.operation_seconds(operation)
        self._note("host", operation.name, start, self._host)
        self._stand_still("step on the host", "state", self._host)

    def _stand_still(self, kind: str, label: str, until: float) -> None:
        if until > self._compute:
            self.steps[-1].exposed[kind, label] += until - self._compute
            self._compute = until

    def _copy(self, move: Move) -> None:
        """On a lane of its own, beside collectives and computation."""
        before = self._host if move.by == "disk" else max(self._host, self._compute)
        start = max(before, self._channels[move.channel])
        self._ends[move] = self._channels[move.channel] = start + self.machine.move_seconds(move)
        self.steps[-1].moving[move.kind] += self._ends[move] - start
        self._note(move.channel, move.kind, start, self._ends[move])

    def _launch(self, move: Move) -> None:
        self._host += self.machine.launch
        if move.by in COPIES:
            self._copy(move)
            return
        if move.by == "reads":
            return
        between, gate = self.machine.nodes_of(move) > 1, self._gate
        self._gate = 0.0
        start = max(self._host, self._compute, self._channels[move.channel], self._links[between], gate)
        stop = start + self.machine.move_seconds(move)
        self._ends[move] = self._channels[move.channel] = self._links[between] = stop
        self.steps[-1].moving[move.kind] += stop - start
        self._note(move.channel, f"{move.kind} of {move.label}", start, stop)

    def _wait(self, move: Move, host: bool) -> None:
        if move.by in COPIES:
            self._stand_still(move.kind, move.label, self._ends[move])
            self._host = max(self._host, self._ends[move]) if host else self._host
            return
        if move.by == "reads":
            start = max(self._host, self._compute)
            stop = start + self.machine.move_seconds(move)
            self.steps[-1].moving[move.kind] += stop - start
            self._note(move.channel, f"{move.kind} of {move.label}", start, stop)
        else:
            start, stop = self._compute, self._ends[move]
        if stop > start:
            self.steps[-1].exposed[move.kind, move.label] += stop - start
            self._compute = stop
        if move.by != "nccl":
            self._host = max(self._host, self._compute)

    def _note(self, stream: str, name: str, start: float, stop: float) -> None:
        self.steps[-1].spans.append(Span(stream, name, start - self._began, stop - self._began))
