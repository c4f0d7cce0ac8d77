"""Moves for ranks that read each other's memory: nothing is sent and nothing is staged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_zero.comm.peer_memory import MAX_RANGES, PeerMemory
from hf_zero.comm.transport import Take, Transport
from hf_zero.comm.transport.group import GroupTransport
from hf_zero.comm.transport.messages import Messages
from hf_zero.comm.work import Landing, Tag


# Kinds of offers.
_GATHER, _REDUCE, _DEAL = 0, 1, 2

# A sum over ranks is made in chunks that stay in the processor's cache (elements).
CACHED = 1 << 17


class Offered:
    """Offers under way: over when every peer (or `source` alone) has made its own."""

    def __init__(self, peers: PeerMemory, kind: int, tag: Tag, source: int | None = None) -> None:
        self._peers, self._key = peers, (kind, tag.number)
        self._sources = peers.ranks if source is None else [source]

    def wait(self) -> None:
        self._peers.expect(*self._key, self._sources)


class Readers:
    """Waits until no peer reads what was offered of one kind and tag (None: of any)."""

    def __init__(self, peers: PeerMemory, tag: Tag | None, kind: int = _GATHER) -> None:
        self._peers, self._tag, self._kind = peers, tag, kind

    def wait(self) -> None:
        self._peers.wait_for_readers(self._kind, None if self._tag is None else self._tag.number)


class Reads(Messages):
    """All-gather and reduce-scatter by reading the peers' memory; everything else goes by messages."""

    name = "reads of each other's memory"
    overlaps = False
    takes_parts = True
    deals = True

    def __init__(self, messages: Messages, peers: PeerMemory) -> None:
        super().__init__(messages.group)
        self.peers = peers
        self._rooms: dict[tuple[torch.dtype, bool], Tensor] = {}  # for what is read: kept until a fence of all

    def split(self, groups: Sequence[Sequence[int]]) -> GroupTransport:
        """By messages: who reads whose memory is found out for each group."""
        return Messages(self.group).split(groups)

    def fence(self, tag: Tag | None) -> Landing:
        if tag is None:
            self._rooms.clear()  # a step ends here: nothing of it rests in memory
        return Landing([Readers(self.peers, tag)])

    def gather(self, flat: Tensor, tag: Tag, shard: Sequence[Tensor]) -> Landing:
        slices = flat.chunk(self.size)
        own = slices[self.rank]
        if not shard or shard[0].dtype != own.dtype or len(shard) > MAX_RANGES:
            shard = [own.clone()]  # who uses the values may write to them before all peers have read
        self.peers.offer(_GATHER, tag.number, dict.fromkeys(self.peers.ranks, shard))

        def finish() -> None:
            for step in range(1, self.size):  # each rank begins with another one
                peer = (self.rank + step) % self.size
                self.peers.read(peer, _GATHER, tag.number, slices[peer])
                self.peers.give_back(peer, _GATHER, tag.number)

        return Landing([Offered(self.peers, _GATHER, tag)], finish)

    def deal(self, given: Sequence[Tensor], wanted: Sequence[tuple[int, Tensor]], source: int, tag: Tag) -> Landing:
        if self.rank == source:
            given = given if len(given) <= MAX_RANGES else [torch.cat(list(given))]
            self.peers.offer(_DEAL, tag.number, dict.fromkeys(self.peers.ranks, given))
            return Landing([Readers(self.peers, tag, _DEAL)])

        def finish() -> None:
            for start, target in wanted:
                self.peers.read(source, _DEAL, tag.number, target, start * target.itemsize)
            self.peers.give_back(source, _DEAL, tag.number)

        return Landing([Offered(self.peers, _DEAL, tag, source)], finish)

    def exchange(self, parts: Sequence[Tensor], numel: int, tag: Tag, take: Take) -> Landing:
        slices = [_cut(parts, rank * numel, (rank + 1) * numel) for rank in range(self.size)]
        if max(map(len, slices)) > MAX_RANGES:
            slices = [[torch.cat(slice_)] for slice_ in slices]
        self.peers.offer(_REDUCE, tag.number, {peer: slices[peer] for peer in self.peers.ranks})

        def finish() -> None:
            at = 0
            for own in _chunks(slices[self.rank], CACHED):
                for rank in range(self.size):
                    values = own
                    if rank != self.rank:
                        values = self._room(own, first=rank == 0)
                        self.peers.read(rank, _REDUCE, tag.number, values, at * own.itemsize)
                    elif rank == 0:  # the sum is not made in a gradient
                        values = self._room(own, first=True).copy_(own)
                    take(rank, at, values)
                at += own.numel()
            for peer in self.peers.ranks:
                self.peers.give_back(peer, _REDUCE, tag.number)

        return Landing([Offered(self.peers, _REDUCE, tag)], finish)

    def _room(self, like: Tensor, first: bool) -> Tensor:
        """Memory that is used again and again: fresh pages would cost as much as what is done with them.

        What rank 0 gives has a room of its own, as the sum may be made in it.
        """
        key = (like.dtype, first)
        if key not in self._rooms:
            self._rooms[key] = torch.empty(CACHED, dtype=like.dtype)
        return self._rooms[key][: like.numel()]

    def close(self) -> None:
        self.peers.leave()


def connect_memory(transport: Transport) -> Transport:
    """For ranks of one machine: the same, by reading each other's memory; as it is where the system forbids that."""
    if not isinstance(transport, Messages):
        return transport.by_reads()
    peers = PeerMemory.connect(transport.rank, transport.all_gather_object)
    return transport if peers is None else Reads(transport, peers)


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
