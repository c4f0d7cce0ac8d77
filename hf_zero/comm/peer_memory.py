"""Lets the ranks of one machine read each other's memory: one copy, made by the kernel, and nothing in between.

[Note: offers] A rank *offers* memory under a kind and a tag. Each peer, when it comes to the same point, reads the
bytes with process_vm_readv and gives the offer back. Until all have done so the owner keeps the memory alive and
unchanged; it need not do anything else, so a rank that is busy does not hold up those that read from it. Offers of the
same kind and tag are answered in the order in which they were made; others may be taken in any order.

The words that ranks exchange (a few bytes per offer) go through sockets whose other end is checked to be a rank of
this run. Nothing of it has a name in the file system, so nothing is left behind by a rank that is killed.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import itertools
import operator
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from torch import Tensor


_WORD = struct.Struct("<BQ")  # kind, tag; behind it one _RANGE for each piece of memory
_RANGE = struct.Struct("<QQ")  # address, bytes
MAX_RANGES = 1000  # of one offer; the system reads at most 1024 at once
_MAX_WORD = _WORD.size + MAX_RANGES * _RANGE.size
_RETURNED = 128  # added to the kind of an offer that is given back
_CONNECT_S = 30.0
_GOODBYE_S = 5.0
_SET_READER = 0x59616D61  # prctl's PR_SET_PTRACER: a process which, with its descendants, may read this one
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


class _Vector(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class _Rank(NamedTuple):
    """What a rank says of itself when all connect."""

    place: tuple | None
    pid: int
    name: bytes  # of its socket; empty where it has none
    address: int  # where `probe` lies in its memory
    probe: bytes
    ancestors: list[int]  # nearest first; empty where the system lets ranks read each other as it is


class _Offer:
    """Ranges of a peer's memory, one after another."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._ranges = list(ranges)  # (address, bytes)
        self._starts = list(itertools.accumulate(map(operator.itemgetter(1), self._ranges), initial=0))

    def cut(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The ranges that hold bytes [begin, end)."""
        assert end <= self._starts[-1], "the ranks disagree about the size of a message"
        found = []
        index = bisect.bisect_right(self._starts, begin) - 1
        while begin < end:
            skipped = begin - self._starts[index]
            address, nbytes = self._ranges[index]
            nbytes = min(nbytes - skipped, end - begin)
            found.append((address + skipped, nbytes))
            begin, index = begin + nbytes, index + 1
        return found


class PeerMemory:
    """This rank's connections to the other ranks of its machine. Not for use by several threads at once."""

    @staticmethod
    def connect(rank: int, exchange: Callable[[object], list]) -> PeerMemory | None:
        """Connect all ranks; None, on all of them, where one cannot read the memory of another.

        `exchange` gives every rank's object in rank order; a collective.
        """
        probe = bytearray(secrets.token_bytes(32))
        address = ctypes.addressof(ctypes.c_char.from_buffer(probe))
        place = _place()
        listener = None if place is None else _listen()
        name = b"" if listener is None else listener.getsockname()
        everyone = [_Rank(*one) for one in exchange((place, os.getpid(), name, address, bytes(probe), _ancestors()))]
        if any(one.ancestors for one in everyone):
            _permit(everyone[rank].ancestors, everyone)
            exchange(None)  # nobody reads before all have permitted it
        peers = None
        if listener is not None and all(one.place is not None and one.place == place and one.name for one in everyone):
            try:
                peers = PeerMemory(_meet(rank, listener, everyone), [one.pid for one in everyone])
                peers._try_reading(everyone)
            except OSError:
                peers = None
        if listener is not None:
            listener.close()
        return peers if all(exchange(peers is not None)) else None

    def __init__(self, sockets: dict[int, socket.socket], pids: list[int]) -> None:
        self.ranks = list(sockets)
        self._sockets, self._pids = sockets, pids
        self._rank_of = {link.fileno(): rank for rank, link in sockets.items()}
        self._poll = select.poll()
        for link in sockets.values():
            link.setblocking(False)
            self._poll.register(link, select.POLLIN)
        self._gone: set[int] = set()
        # (peer, kind, tag) -> what it offers, oldest first
        self._offered: dict[tuple[int, int, int], deque[_Offer]] = defaultdict(deque)
        # (kind, tag) -> what this rank offers, oldest first: memory, and who has not given it back
        self._lent: dict[tuple[int, int], deque[tuple[object, set[int]]]] = defaultdict(deque)

    def _try_reading(self, everyone: list[_Rank]) -> None:
        """Raises OSError where the system forbids it, or another process has the number."""
        for peer in self.ranks:
            seen = bytearray(len(everyone[peer].probe))
            target = ctypes.addressof(ctypes.c_char.from_buffer(seen))
            self._copy(peer, target, [(everyone[peer].address, len(seen))])
            if seen != everyone[peer].probe:
                raise OSError(f"process {everyone[peer].pid} is not rank {peer}")

    def leave(self) -> None:
        """Close the connections, once slower peers have read what they need."""
        until = time.monotonic() + _GOODBYE_S
        while self._readers() - self._gone and time.monotonic() < until:
            self._take(block=True)
        for link in self._sockets.values():
            link.close()

    # -- this rank's memory ---------------------------------------------------------------------------------------

    def offer(self, kind: int, tag: int, memory: dict[int, Sequence[Tensor]]) -> None:
        """Let each peer read its tensors of `memory` (contiguous), which stay alive until it has."""
        self._lent[kind, tag].append((memory, set(self.ranks)))
        for peer, tensors in memory.items():
            ranges = [_RANGE.pack(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
            self._say(peer, b"".join([_WORD.pack(kind, tag), *ranges]))

    def wait_for_readers(self, kind: int, tag: int | None = None) -> None:
        """Wait until the peers have read what was offered (of this tag): from then on it may be changed.

        Only for what this rank, too, has read from the peers: otherwise two ranks could wait for each other.
        """
        self._take(block=False)
        while waiting := self._readers(kind, tag):
            self._take_from(waiting)

    def _readers(self, kind: int | None = None, tag: int | None = None) -> set[int]:
        """The peers that have not read everything."""
        return {
            peer
            for (its_kind, its_tag), lent in self._lent.items()
            if kind in (None, its_kind) and tag in (None, its_tag)
            for _, holders in lent
            for peer in holders
        }

    # -- the peers' memory ----------------------------------------------------------------------------------------

    def expect(self, kind: int, tag: int, peers: Iterable[int]) -> None:
        """Wait until these peers have offered. Raises RuntimeError where one has ended instead."""
        while missing := {peer for peer in peers if not self._offered.get((peer, kind, tag))}:
            self._take_from(missing)

    def read(self, peer: int, kind: int, tag: int, target: Tensor, start: int = 0) -> None:
        """Fill `target` (contiguous) from byte `start` of what the peer offers."""
        self._copy(peer, target.data_ptr(), self._offered[peer, kind, tag][0].cut(start, start + target.nbytes))

    def give_back(self, peer: int, kind: int, tag: int) -> None:
        """All of the peer's oldest offer of this kind and tag was read."""
        self._offered[peer, kind, tag].popleft()
        self._say(peer, _WORD.pack(kind + _RETURNED, tag))

    def _copy(self, peer: int, target: int, ranges: list[tuple[int, int]]) -> None:
        """Copy ranges of the peer's memory, one after another, to the address `target`."""
        while ranges:
            theirs = (_Vector * len(ranges))(*itertools.starmap(_Vector, ranges))
            ours = _Vector(target, sum(nbytes for _, nbytes in ranges))
            copied = _libc().process_vm_readv(self._pids[peer], ctypes.byref(ours), 1, theirs, len(ranges), 0)
            if copied <= 0:
                raise OSError(ctypes.get_errno(), f"cannot read the memory of rank {peer}")
            target += copied
            while ranges and copied >= ranges[0][1]:
                copied -= ranges.pop(0)[1]
            if ranges:
                ranges[0] = (ranges[0][0] + copied, ranges[0][1] - copied)

    # -- words ------------------------------------------------------------------------------------------------------

    def _say(self, peer: int, word: bytes) -> None:
        while True:
            try:
                self._sockets[peer].send(word)
                return
            except BlockingIOError:
                # The peer's queue is full, and the peer may be waiting for room in ours.
                self._take(block=False)
                time.sleep(1e-4)
            except OSError:
                self._gone.add(peer)  # who waits for something from it will be told
                return

    def _take_from(self, peers: set[int]) -> None:
        """Wait for words from `peers`. Raises RuntimeError where one of them has ended."""
        if ended := sorted(peers & self._gone):
            raise RuntimeError(f"rank(s) {ended} have ended")
        self._take(block=True)

    def _take(self, block: bool) -> None:
        """Take in what the peers have said."""
        for descriptor, _ in self._poll.poll(500 if block else 0):
            peer = self._rank_of[descriptor]
            while True:
                try:
                    word = self._sockets[peer].recv(_MAX_WORD)
                except BlockingIOError:
                    break
                except OSError:
                    word = b""
                if not word:
                    self._gone.add(peer)
                    self._poll.unregister(descriptor)
                    break
                self._hear(peer, word)

    def _hear(self, peer: int, word: bytes) -> None:
        kind, tag = _WORD.unpack_from(word)
        if kind < _RETURNED:
            self._offered[peer, kind, tag].append(_Offer(_RANGE.iter_unpack(word[_WORD.size :])))
            return
        lent = self._lent[kind - _RETURNED, tag]
        holders = next(holders for _, holders in lent if peer in holders)
        holders.remove(peer)
        while lent and not lent[0][1]:
            lent.popleft()


def _place() -> tuple | None:
    """What must be the same for two processes to read each other; None where the system has no such call."""
    if not sys.platform.startswith("linux") or not hasattr(_libc(), "process_vm_readv"):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net", "user")]
    except OSError:
        return None
    return (boot, *namespaces, os.getuid())


def _ancestors() -> list[int]:
    """The processes that this one descends from, nearest first, where the system lets only such read a process."""
    return [one.pid for one in psutil.Process().parents()] if _YAMA.exists() and _YAMA.read_text() == "1\n" else []


def _permit(ancestors: list[int], everyone: list[_Rank]) -> None:
    """Let the descendants of the launcher, and nobody else, read this process: the ranks are all among them."""
    # Without one in common the ranks find that they cannot read, and send messages.
    for launcher in [pid for pid in ancestors if all(pid in one.ancestors for one in everyone)][:1]:
        _libc().prctl(_SET_READER, ctypes.c_ulong(launcher), 0, 0, 0)


def _listen() -> socket.socket | None:
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0hf_zero-{secrets.token_hex(16)}")  # an abstract name: it ends with the socket
        listener.listen(128)
        listener.settimeout(_CONNECT_S)
    except OSError:
        return None
    return listener


def _meet(rank: int, listener: socket.socket, everyone: list[_Rank]) -> dict[int, socket.socket]:
    """Connect to the ranks below this one, and be connected to by those above."""
    sockets = {}
    for below in range(rank):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(_CONNECT_S)
        link.connect(everyone[below].name)
        sockets[below] = link
    above = {everyone[peer].pid: peer for peer in range(rank + 1, len(everyone))}
    while above:
        link, _ = listener.accept()
        peer = above.pop(_pid_behind(link), None)
        if peer is None:
            link.close()  # not one of ours
        else:
            sockets[peer] = link
    if any(_pid_behind(link) != everyone[peer].pid for peer, link in sockets.items()):
        raise OSError("a socket does not lead to the rank that it should")
    return sockets


def _pid_behind(link: socket.socket) -> int:
    return struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "process_vm_readv"):
        library.process_vm_readv.restype = ctypes.c_ssize_t
        pointer, count = ctypes.POINTER(_Vector), ctypes.c_ulong
        library.process_vm_readv.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
    return library
