"""The moves between placements for ranks that read each other's memory: nothing is sent and nothing is staged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hf_zero.comm.peer_memory import MAX_RANGES, PeerMemory
from hf_zero.comm.work import OnChunk, wide


# Kinds of offers.
_GATHER, _REDUCE = 0, 1

# A sum over ranks is made in parts that stay in the processor's cache (elements).
CACHED = 1 << 17


class Read:
    """An offer to every peer under way, and what this rank does when every peer has made its own."""

    def __init__(self, peers: PeerMemory, kind: int, tag: int, finish: Callable[[], None]) -> None:
        self._peers, self._key = peers, (kind, tag)
        self.finish = finish

    def wait(self) -> None:
        self._peers.expect(*self._key)


class Settling:
    """Waits until no peer reads what was offered for gathers of one tag (None: of any)."""

    def __init__(self, peers: PeerMemory, tag: int | None) -> None:
        self._peers, self._tag = peers, tag

    def wait(self) -> None:
        self._peers.settle(_GATHER, self._tag)


class PeerTransport:
    """All-gather and reduce-scatter by reading."""

    def __init__(self, rank: int, peers: PeerMemory) -> None:
        self.rank, self.world_size, self.peers = rank, len(peers.ranks) + 1, peers
        self._room: dict[tuple[torch.dtype, bool], Tensor] = {}  # for what is read and for sums: kept until `settle`

    def settle(self, tag: int | None) -> Settling:
        """See `Communicator.settle`."""
        if tag is None:
            self._room.clear()  # a step ends here: nothing of it rests in memory
        return Settling(self.peers, tag)

    def all_gather(self, flat: Tensor, tag: int, rest: Sequence[Tensor]) -> Read:
        """See `Communicator.all_gather`."""
        slices = flat.chunk(self.world_size)
        own = slices[self.rank]
        if not rest or rest[0].dtype != own.dtype or len(rest) > MAX_RANGES:
            rest = [own.clone()]  # who uses the values may write to them before all peers have read
        self.peers.offer(_GATHER, tag, dict.fromkeys(self.peers.ranks, rest))

        def finish() -> None:
            for step in range(1, self.world_size):  # each rank begins with another one
                peer = (self.rank + step) % self.world_size
                self.peers.read(peer, _GATHER, tag, slices[peer])
                self.peers.give_back(peer, _GATHER, tag)

        return Read(self.peers, _GATHER, tag, finish)

    def reduce_scatter(self, parts: Sequence[Tensor], numel: int, tag: int, deliver: OnChunk) -> Read:
        """See `Communicator.reduce_scatter`; slices have `numel` elements. The sum is made in rank order."""
        slices = [_cut(parts, rank * numel, (rank + 1) * numel) for rank in range(self.world_size)]
        if max(len(slice_) for slice_ in slices) > MAX_RANGES:
            slices = [[torch.cat(slice_)] for slice_ in slices]
        self.peers.offer(_REDUCE, tag, {peer: slices[peer] for peer in self.peers.ranks})

        def finish() -> None:
            dtype, at = wide(parts[0].dtype), 0
            for own in _chunks(slices[self.rank], CACHED):
                deliver(at, self._sum(own, at * own.itemsize, tag, dtype))
                at += own.numel()
            for peer in self.peers.ranks:
                self.peers.give_back(peer, _REDUCE, tag)

        return Read(self.peers, _REDUCE, tag, finish)

    def _sum(self, own: Tensor, start: int, tag: int, dtype: torch.dtype) -> Tensor:
        """`own`, which lies at byte `start` of this rank's slice, plus what the peers offer for it, in rank order."""
        total, room = None, self._room_for(own.numel(), dtype)
        for rank in range(self.world_size):
            value = own
            if rank != self.rank:
                value = self._room_for(own.numel(), own.dtype, spare=True)
                self.peers.read(rank, _REDUCE, tag, value, start)
            total = room.copy_(value) if total is None else total.add_(value)
        return total

    def _room_for(self, numel: int, dtype: torch.dtype, spare: bool = False) -> Tensor:
        """Memory that is used again and again: fresh pages would cost as much as what is done with them."""
        key = (dtype, spare)
        if key not in self._room:
            self._room[key] = torch.empty(CACHED, dtype=dtype)
        return self._room[key][:numel]


def _chunks(parts: Sequence[Tensor], numel: int) -> Iterator[Tensor]:
    """Tensors that lie end to end, in chunks of at most `numel` elements; small ones are put together."""
    held, room = [], numel
    for part in parts:
        while part.numel() > room:
            held.append(part[:room])
            part = part[room:]
            yield held[0] if len(held) == 1 else torch.cat(held)
            held, room = [], numel
        held.append(part)
        room -= part.numel()
    yield held[0] if len(held) == 1 else torch.cat(held)


def _cut(parts: Sequence[Tensor], begin: int, end: int) -> list[Tensor]:
    """Elements [begin, end) of tensors that lie end to end."""
    found, at = [], 0
    for part in parts:
        low, high = max(begin, at), min(end, at + part.numel())
        if low < high:
            found.append(part[low - at : high - at])
        at += part.numel()
    return found
