"""Writes parts of tensors into safetensors files: a thread writes one shard while the next is made ready."""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import threading
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from hf_zero.checkpoint.checksum import Checksums, memory_of
from hf_zero.checkpoint.safetensors_file import BUFFER_BYTES, Buffer, SlicedFile, shards
from hf_zero.core.direct_file import PAGE, write_all


# Bytes of pages that others fill, too, which are kept until they are written together.
_ENDS_BYTES = 8 << 20


class SliceWriter:
    """Puts parts of tensors into created files, and adds up their checksums, unless nobody wants them (`summed`).

    An error does not surface before `close`, so that ranks which stream to each other stay in step.
    """

    def __init__(self, files: Mapping[str, SlicedFile], paths: Mapping[str, Path], summed: bool = True) -> None:
        self.files, self.paths, self._summed = files, paths, summed
        self.sums = Checksums(name for file in files.values() for name in file.tensors if summed)
        self.nbytes = 0
        self._buffer = Buffer()
        self._thread = _WriterThread()
        self._outputs: dict[str, _Output] = {}

    def put(self, file: str, name: str, start: int, values: Tensor) -> None:
        """Write `values` as elements `start` and following of tensor `name`, cast to its dtype."""
        layout = self.files[file]
        dtype = layout.tensors[name][0]
        try:
            if file not in self._outputs:
                self._outputs[file] = _Output(self.paths[file], self._thread)
            for at, shard in shards(values.detach().reshape(-1), dtype):
                if self._thread.error is not None:
                    return
                if shard.dtype != dtype or shard.device.type != "cpu":
                    shard = self._buffer.room(dtype, shard.numel()).copy_(shard)
                if self._summed:
                    self.sums.add(name, start + at, shard)
                self._outputs[file].write(shard, layout.position(name, start + at))
                self.nbytes += shard.nbytes
        except OSError as error:
            self._thread.fail(error, self.paths[file])

    def close(self) -> None:
        """Flush to the disk. Raises the first error since the beginning."""
        self._thread.finish()
        for file, output in self._outputs.items():
            try:
                output.close(flush=self._thread.error is None)
            except OSError as error:
                self._thread.fail(error, self.paths[file])
        self._outputs.clear()
        if self._thread.error is not None:
            raise self._thread.error


class _Output:
    """A file that many ranks write at any position, each its own bytes.

    Whole pages go past the page cache where the file system allows it: writers of one file through the cache wait for
    each other at its lock. The ends that fill no page go through the cache, and last, as they wait for all others.
    """

    def __init__(self, path: Path, thread: _WriterThread) -> None:
        self._path, self._thread = path, thread
        self._cached = os.open(path, os.O_WRONLY)
        self._direct: int | None = None
        self._ends: list[tuple[int, bytes]] = []
        self._ends_nbytes = 0
        with contextlib.suppress(OSError, AttributeError):  # not every file system, not every system
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)

    def write(self, values: Tensor, position: int) -> None:
        """Write the bytes of `values`, which are copied, at `position`."""
        data = memory_of(values)
        low, high = -position % PAGE, len(data) - (position + len(data)) % PAGE
        if self._direct is None:
            self._thread.write(self._path, self._cached, data, position)
        elif low >= high:
            self._keep(position, data)
        else:
            self._thread.write(self._path, self._direct, data[low:high], position + low)
            self._keep(position, data[:low])
            self._keep(position + high, data[high:])

    def _keep(self, position: int, data: memoryview) -> None:
        self._ends.append((position, bytes(data)))
        self._ends_nbytes += len(data)
        if self._ends_nbytes > _ENDS_BYTES:  # short rows of a tensor that ranks share out by its columns
            self._write_ends()

    def _write_ends(self) -> None:
        for position, data in self._ends:
            write_all(self._cached, memoryview(data), position)
        self._ends.clear()
        self._ends_nbytes = 0

    def close(self, flush: bool) -> None:
        try:
            if flush:
                self._write_ends()
                os.fsync(self._cached)
        finally:
            os.close(self._cached)
            if self._direct is not None:
                os.close(self._direct)


class _WriterThread:
    """Writes from one of two buffers while the other is filled; keeps the first error."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._free: queue.SimpleQueue = queue.SimpleQueue()
        self._full: queue.SimpleQueue = queue.SimpleQueue()

    def write(self, path: Path, descriptor: int, data: memoryview, position: int) -> None:
        """Copy at most `BUFFER_BYTES` and have them written at `position`; waits while both buffers are full."""
        if self._thread is None:
            for _ in range(2):
                self._free.put(memoryview(mmap.mmap(-1, BUFFER_BYTES)))  # begins with a page, as direct writes need it
            self._thread = threading.Thread(target=self._run, name="slice writer", daemon=True)
            self._thread.start()
        pages = self._free.get()
        pages[: len(data)] = data
        self._full.put((path, descriptor, pages, len(data), position))

    def _run(self) -> None:
        for path, descriptor, pages, size, position in iter(self._full.get, None):
            try:
                if self.error is None:
                    write_all(descriptor, pages[:size], position)
            except Exception as error:  # whoever fills buffers must not wait for ever
                self.fail(error, path)
            self._free.put(pages)

    def fail(self, error: Exception, path: Path) -> None:
        """Keep the first error, with the name of the file, which calls on descriptors leave out."""
        if isinstance(error, OSError):
            error = OSError(error.errno, error.strerror, str(path))
        self.error = self.error or error

    def finish(self) -> None:
        """Wait until everything is written."""
        if self._thread is not None:
            self._full.put(None)
            self._thread.join()
            self._thread = None
