"""Counts what one rank sends: calls, bytes by kind and link, seconds of standing still."""

from __future__ import annotations

from collections import Counter, defaultdict

from hf_zero.comm.topology import Link


class Traffic:
    """Counters of one communicator, by kind of collective ("all_gather", "reduce_scatter", ...).

    Attributes:
        calls: collectives begun.
        sent: bytes that this rank sent, by (kind, link).
        waited: seconds that this process stood still, by kind of collective ("all-gather", ...).
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sent: Counter[tuple[str, Link]] = Counter()
        self.waited: defaultdict[str, float] = defaultdict(float)

    def count(self, kind: str, near: int, far: int = 0) -> None:
        """Note one collective of which this rank sends `near` bytes inside its node and `far` to other nodes."""
        self.calls[kind] += 1
        self.sent[kind, Link.NODE] += near
        if far:
            self.sent[kind, Link.NET] += far

    @property
    def bytes_sent(self) -> Counter[str]:
        """Bytes by kind, over all links."""
        total: Counter[str] = Counter()
        for (kind, _), nbytes in self.sent.items():
            total[kind] += nbytes
        return total

    @property
    def bytes_between_nodes(self) -> int:
        """Bytes of all kinds to ranks on other nodes."""
        return sum(nbytes for (_, link), nbytes in self.sent.items() if link is Link.NET)

    def clear(self) -> None:
        """Begin counting anew; the seconds go on."""
        self.calls.clear()
        self.sent.clear()
