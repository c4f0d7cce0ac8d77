"""One rank: nothing is moved."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hf_zero.comm.transport import Take, Transport
from hf_zero.comm.work import Landing, Tag


class Alone(Transport):
    """The transport of a group of one rank."""

    rank, size = 0, 1
    name = "one rank, nothing is sent"
    overlaps = False
    takes_parts = True

    def gather(self, flat: Tensor, tag: Tag, shard: Sequence[Tensor]) -> Landing:
        return Landing()

    def exchange(self, parts: Sequence[Tensor], numel: int, tag: Tag, take: Take) -> Landing:
        def finish() -> None:
            at = 0
            for part in parts:
                take(0, at, part)
                at += part.numel()

        return Landing((), finish)

    def hand_over(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: Tag) -> Landing:
        return Landing()
