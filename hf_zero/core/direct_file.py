"""Bytes on disk without a name: gone with the process, past the page cache where the file system allows it.

[Note: unnamed files] The file is opened with O_TMPFILE, or unlinked as soon as it is made: a run that is killed leaves
nothing, two runs in one folder cannot meet, and nobody can delete it. O_DIRECT keeps its bytes out of the page cache,
which would otherwise hold in memory what was moved to disk to be out of it. Requests run in a pool of threads that
are in system calls nearly all the time, where Python's lock is released.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from hf_zero.errors import ZeroRuntimeError


PAGE = mmap.PAGESIZE  # positions, lengths and addresses of direct requests are multiples of it

# What systems answer that do not know a flag of open(2) or fcntl(2).
_UNKNOWN = (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)
_O_DIRECT, _O_TMPFILE = getattr(os, "O_DIRECT", 0), getattr(os, "O_TMPFILE", 0)


def whole_pages(nbytes: int) -> int:
    """The bytes of the pages that `nbytes` fill or begin."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True)
class Extent:
    """Bytes [start, start + nbytes) of a file: whole pages."""

    start: int
    nbytes: int


class Transfer:
    """Requests under way."""

    def __init__(self, requests: list[Future]) -> None:
        self._requests = requests

    @classmethod
    def of(cls, transfers: Iterable[Transfer]) -> Transfer:
        """All of them as one."""
        return cls([request for transfer in transfers for request in transfer._requests])

    @property
    def done(self) -> bool:
        return all(request.done() for request in self._requests)

    @property
    def failed(self) -> bool:
        """Whether it is over, and `wait` raises."""
        return self.done and any(request.exception() for request in self._requests)

    def end(self) -> None:
        """Block until no request uses its memory any more, whatever has become of it."""
        wait(self._requests)

    def wait(self) -> None:
        """Block until all requests are over. Raises the ZeroRuntimeError of the first that failed, at each call."""
        self.end()
        for request in self._requests:
            error = request.exception()
            if error is not None:
                # Another one each time: it would gather, and keep alive, the frames of all who wait.
                raise ZeroRuntimeError(str(error)) from error


class DirectFile:
    """A file of one rank in `folder`, where it has no name (see [Note: unnamed files]).

    Args:
        folder: an existing folder on a local disk.
        request: bytes of one system call, a multiple of PAGE.
        in_flight: system calls under way at a time; one thread each.

    Attributes:
        moved: bytes by "read" and "write".
        seconds: time that threads spent in system calls, by "read" and "write".
        waited: seconds inside `waiting`.
        direct: whether the page cache is passed by.

    Raises ZeroRuntimeError where no file can be made in the folder.
    """

    def __init__(self, folder: str | os.PathLike, *, request: int = 8 << 20, in_flight: int = 8) -> None:
        assert request % PAGE == 0, request
        self.folder = Path(folder)
        self.moved: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.waited = 0.0
        self._request = request
        self._end = 0
        self._free: list[Extent] = []
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._descriptor = _open_unnamed(self.folder)
        except OSError as error:
            raise ZeroRuntimeError(
                f"no file can be made in '{self.folder}': {error.strerror}. Name an existing folder on a local disk "
                "that you may write to"
            ) from error
        self.direct = _pass_cache_by(self._descriptor)
        self._pool = ThreadPoolExecutor(in_flight, thread_name_prefix="hf_zero disk")

    # -- room -------------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of all extents that are in use."""
        return self._end - sum(extent.nbytes for extent in self._free)

    def allocate(self, nbytes: int) -> Extent:
        """Whole pages for `nbytes`: the first free ones that suffice, else new ones.

        Raises ZeroRuntimeError where the disk is full.
        """
        nbytes = whole_pages(nbytes)
        for index, extent in enumerate(self._free):
            if extent.nbytes >= nbytes:
                left = Extent(extent.start + nbytes, extent.nbytes - nbytes)
                self._free[index : index + 1] = [left] if left.nbytes else []
                return Extent(extent.start, nbytes)
        try:
            self._grow(self._end + nbytes)
        except OSError as error:
            raise ZeroRuntimeError(
                f"'{self.folder}' has no room for offloaded state: this rank has {self._end:,} bytes there and needs "
                f"{nbytes:,} more, {free_bytes(self._descriptor):,} are free ({error.strerror}). Make room, or name "
                "another folder"
            ) from error
        self._end += nbytes
        return Extent(self._end - nbytes, nbytes)

    def _grow(self, end: int) -> None:
        if end == self._end:
            return
        try:
            if not allocate_blocks(self._descriptor, self._end, end - self._end):
                if free_bytes(self._descriptor) < end - self._end:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.ftruncate(self._descriptor, end)
        except OSError:
            os.ftruncate(self._descriptor, self._end)  # some blocks may have been given
            raise

    def free(self, extent: Extent) -> None:
        """Give an extent back, for later calls of `allocate`."""
        if not extent.nbytes:
            return
        merged: list[Extent] = []
        for one in sorted([*self._free, extent], key=lambda one: one.start):
            if merged and merged[-1].start + merged[-1].nbytes == one.start:
                one = Extent(merged[-1].start, merged.pop().nbytes + one.nbytes)
            merged.append(one)
        self._free = merged

    # -- moves ------------------------------------------------------------------------------------------------------

    def read(self, extent: Extent, into: memoryview, after: Transfer | None = None) -> Transfer:
        """Begin to fill `into`, which are whole pages of memory, from the start of `extent`.

        With `after`, the memory is left alone until that transfer has ended, well or not.
        """
        return self._begin("read", read_all, extent, into, after)

    def write(self, extent: Extent, data: memoryview) -> Transfer:
        """Begin to write `data`, whole pages of memory that stay as they are until the transfer ends."""
        return self._begin("write", write_all, extent, data, None)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what cannot go on before a transfer is over."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited += time.perf_counter() - began

    def _begin(
        self, kind: str, call: Callable, extent: Extent, memory: memoryview, after: Transfer | None
    ) -> Transfer:
        assert len(memory) <= extent.nbytes and len(memory) % PAGE == 0, (len(memory), extent)
        return Transfer(
            [
                self._pool.submit(self._run, kind, call, extent.start + at, memory[at : at + self._request], after)
                for at in range(0, len(memory), self._request)
            ]
        )

    def _run(self, kind: str, call: Callable, position: int, memory: memoryview, after: Transfer | None) -> None:
        if after is not None:
            after.end()  # it was begun before, and the pool is first in, first out: it has its threads
        began = time.perf_counter()
        try:
            missing = call(self._descriptor, memory, position)
            if not self.direct:
                self._leave_cache(kind, position, len(memory))
        except OSError as error:
            raise self._failed(kind, position, len(memory), str(error)) from error
        if missing:
            raise self._failed(kind, position, len(memory), f"the file ends {missing:,} bytes early")
        with self._lock:
            self.moved[kind] += len(memory)
            self.seconds[kind] += time.perf_counter() - began

    def _leave_cache(self, kind: str, position: int, nbytes: int) -> None:
        if kind == "write":
            os.fdatasync(self._descriptor)  # only clean pages can be dropped
        os.posix_fadvise(self._descriptor, position, nbytes, os.POSIX_FADV_DONTNEED)

    def _failed(self, kind: str, position: int, nbytes: int, why: str) -> ZeroRuntimeError:
        return ZeroRuntimeError(
            f"cannot {kind} {nbytes:,} bytes at position {position:,} of the file of offloaded state in "
            f"'{self.folder}': {why}"
        )

    def close(self) -> None:
        """Wait for what is under way, end the threads and give the bytes back; does nothing when called again."""
        if not self._closed:
            self._closed = True
            self._pool.shutdown()
            os.close(self._descriptor)


def _open_unnamed(folder: Path) -> int:
    if _O_TMPFILE:
        try:
            return os.open(folder, os.O_RDWR | _O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
    descriptor, path = tempfile.mkstemp(prefix=".hf_zero-", dir=folder)
    os.unlink(path)
    return descriptor


def _pass_cache_by(descriptor: int) -> bool:
    """Have the cache passed by from now on; False where the file system refuses, at once or at the first request."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _O_DIRECT)
        with mmap.mmap(-1, PAGE) as page:
            os.pwrite(descriptor, page, 0)
        return bool(_O_DIRECT)
    except OSError:  # a disk that is full, or worse, says so again when room is asked for
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False


# -- what all who write files at positions need ---------------------------------------------------------------------


def free_bytes(where: int | str | os.PathLike) -> int:
    """What this user may still write to the disk of a file or folder."""
    status = os.statvfs(where)
    return status.f_bavail * status.f_frsize


def allocate_blocks(descriptor: int, start: int, nbytes: int) -> bool:
    """Give bytes [start, start + nbytes) of a file their blocks; False where the file system cannot do so ahead.

    Python's posix_fallocate would write to every block instead. Raises OSError for a full disk.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "fallocate"):
        if not library.fallocate(descriptor, 0, ctypes.c_long(start), ctypes.c_long(nbytes)):
            return True
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))
    return False


def read_all(descriptor: int, into: memoryview, position: int) -> int:
    """Fill `into` from `position` on; answers how many bytes the file is too short. Raises OSError."""
    while into:
        count = os.preadv(descriptor, [into], position)
        if not count:
            break
        into, position = into[count:], position + count
    return len(into)


def write_all(descriptor: int, data: memoryview, position: int) -> None:
    """Write all of `data` from `position` on. Raises OSError."""
    while data:
        count = os.pwrite(descriptor, data, position)
        data, position = data[count:], position + count
