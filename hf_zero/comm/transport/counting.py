"""The planner's transport: any number of ranks in one process, of which only the buffers are real."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_zero.comm.transport import Take, Transport
from hf_zero.comm.transport.group import receive_rooms
from hf_zero.comm.transport.reads import CACHED
from hf_zero.comm.work import Handle, Landing, Tag


class Counting(Transport):
    """Stands in for rank 0 of `size` ranks: results have the right place and size, and no values.

    Args:
        name: "nccl", "messages" or "reads": whose buffers are made.
        on_buffer: called with tensors that exist only for a move.
    """

    def __init__(self, size: int, name: str, *, on_buffer: Callable[[list[Tensor]], None]) -> None:
        assert name in ("nccl", "messages", "reads"), name
        self.rank, self.size, self.name = 0, size, name
        self.takes_parts, self.relays = name == "reads", name == "nccl"
        self.overlaps = not self.takes_parts
        self._on_buffer = on_buffer
        self._lent: Sequence[Tensor] = ()
        self._rooms: list[Tensor] = []  # as in `Reads`

    def split(self, groups: Sequence[Sequence[int]]) -> Counting:
        return Counting(len(groups[0]), self.name, on_buffer=self._on_buffer)

    def by_reads(self) -> Counting:
        """The same ranks, reading each other's memory."""
        return Counting(self.size, "reads", on_buffer=self._on_buffer)

    def gather(self, flat: Tensor, tag: Tag, shard: Sequence[Tensor]) -> Landing:
        return Landing()

    def exchange(self, parts: Sequence[Tensor], numel: int, tag: Tag, take: Take) -> Landing:
        received: list[Tensor] = []
        if not self.takes_parts:
            received = receive_rooms(list(parts[0].chunk(self.size)), self.rank)
        self._on_buffer([*parts, *received[1:]])

        def finish(parts: Sequence[Tensor] = parts) -> None:
            rooms = received
            if self.takes_parts:
                self._lent = parts  # until the others have read them, too
                if not self._rooms:
                    self._rooms = [parts[0].new_empty(CACHED) for _ in range(2)]
                    self._on_buffer(self._rooms)
                rooms = [self._rooms[min(rank, 1)] for rank in range(self.size)]
            for at in range(0, numel, rooms[0].numel()):
                for rank, room in enumerate(rooms):
                    take(rank, at, room[: numel - at])

        return Landing((), finish)

    def hand_over(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: Tag) -> Landing:
        self._on_buffer([*outgoing, *incoming])
        return Landing()

    def sums(self, dtype: torch.dtype) -> bool:
        return self.name == "nccl" and dtype == torch.float32

    def reduce_scatter(self, flat: Tensor, out: Tensor, tag: Tag) -> Handle:
        self._on_buffer([flat, out])
        return _Done()

    def all_reduce(self, flat: Tensor, tag: Tag) -> Handle:
        self._on_buffer([flat])
        return _Done()

    def fence(self, tag: Tag | None) -> Landing:
        self._lent = ()
        if tag is None:
            self._rooms = []
        return Landing()


class _Done:
    """A collective that is over at once."""

    def wait(self) -> None:
        """Nothing to wait for."""
