"""Safetensors files that several ranks write and read together, each its own byte ranges."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hf_zero.checksum import checksum, combine
from hf_zero.errors import ZeroCheckpointError


# The dtype names of the safetensors format, in the order in which its library lays tensors out.
_NAMES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_RANKING = {dtype: rank for rank, dtype in enumerate(_NAMES)}
# Values are cast and copied to the host in buffers of this size: what writing and reading hold besides the tensors.
BUFFER_BYTES = 16 * 2**20
_PAGE = mmap.PAGESIZE
# The library reads no longer header.
_LONGEST_HEADER = 100_000_000

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def library_order(tensors: Shapes) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors in the order that the safetensors library writes them in: wide dtypes first, then by name.

    Raises ZeroCheckpointError for a dtype that the format does not have.
    """
    for name, (dtype, _) in tensors.items():
        if dtype not in _NAMES:
            raise ZeroCheckpointError(f"tensor '{name}' cannot be saved: safetensors files know no {dtype}")
    return dict(sorted(tensors.items(), key=lambda item: (_RANKING[item[1][0]], item[0].encode())))


class SlicedFile:
    """The layout of one safetensors file: tensors by name, back to back in the order given.

    Args:
        tensors: dtype and shape of every tensor.
        metadata: strings that the header carries.
    """

    def __init__(self, tensors: Shapes, metadata: Mapping[str, str]) -> None:
        self.tensors = dict(tensors)
        self.metadata = dict(metadata)
        self._begin: dict[str, int] = {}
        entries: dict[str, object] = {"__metadata__": self.metadata} if metadata else {}
        end = 0
        for name, (dtype, shape) in tensors.items():
            begin, end = end, end + dtype.itemsize * math.prod(shape)
            self._begin[name] = begin
            entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.header = struct.pack("<Q", len(text)) + text
        self.nbytes = len(self.header) + end

    @classmethod
    def open(cls, path: str | os.PathLike) -> SlicedFile:
        """Read the layout of a file. Raises ZeroCheckpointError where it is no complete safetensors file."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = file.read(8)
                length = int.from_bytes(start, "little")
                if len(start) < 8 or length > min(size - 8, _LONGEST_HEADER):
                    raise ValueError("it does not begin with the length of a header")
                header = file.read(length)
            tensors, metadata = _parse(header.decode())
        except OSError as error:
            raise ZeroCheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ZeroCheckpointError(f"{path} is not a safetensors file: {error}") from error
        opened = cls(tensors, metadata)
        opened.nbytes += 8 + length - len(opened.header)
        opened.header = start + header
        if size != opened.nbytes:
            raise ZeroCheckpointError(f"{path} has {size} bytes, its header asks for {opened.nbytes}")
        return opened

    def position(self, name: str, start: int) -> int:
        """Where element `start` of a tensor lies in the file."""
        return len(self.header) + self._begin[name] + start * self.tensors[name][0].itemsize

    def create(self, path: Path) -> None:
        """Make the file with its header and its final size; the tensors are still zero.

        Raises ZeroCheckpointError where the header is longer than any reader takes.
        """
        if len(self.header) - 8 > _LONGEST_HEADER:
            raise ZeroCheckpointError(
                f"{path} would hold {len(self.tensors):,} tensors and a header of {len(self.header):,} bytes: readers "
                f"of safetensors take {_LONGEST_HEADER:,} at most. Save in more files (a smaller max_shard_size)"
            )
        with path.open("wb") as file:
            file.write(self.header)
            file.truncate(self.nbytes)
            _allocate(file.fileno(), self.nbytes)

    def read(self, path: str | os.PathLike, parts: Iterable[tuple[str, int, Tensor]]) -> dict[str, int]:
        """Fill each part's tensor with the values of `name` from element `start` on (no collective).

        Returns the checksums of what was read, added by name.
        """
        sums: dict[str, int] = {}
        descriptor = os.open(path, os.O_RDONLY)
        try:
            for name, start, target in parts:
                dtype = self.tensors[name][0]
                flat = target.detach().view(-1)
                step = max(1, BUFFER_BYTES // dtype.itemsize)
                for at in range(0, flat.numel(), step):
                    count = min(step, flat.numel() - at)
                    values = _read_all(descriptor, dtype, count, self.position(name, start + at))
                    sums[name] = combine(sums.get(name, 0), checksum(values, start + at))
                    flat[at : at + count].copy_(values)
        finally:
            os.close(descriptor)
        return sums


def _parse(header: str) -> tuple[Shapes, dict[str, str]]:
    """The tensors of a header, as they lie in the file, and its metadata. Raises ValueError where it is not valid."""
    entries = json.loads(header)
    if not isinstance(entries, dict):
        raise ValueError("its header is no JSON object")
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are no strings")
    for name, entry in entries.items():
        _check_entry(name, entry)
    tensors, end = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        if entry["data_offsets"] != [begin, end]:
            raise ValueError(f"tensor '{name}' should be the bytes {begin} to {end}, not {entry['data_offsets']}")
        tensors[name] = dtype, shape
    return tensors, metadata


def _check_entry(name: str, entry: object) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"tensor '{name}' is not described")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor '{name}' needs a dtype, a shape and two offsets, in whole numbers from 0 on")
    if dtype not in _DTYPES:
        raise ValueError(f"tensor '{name}' has the dtype {dtype}; hf_zero reads {', '.join(_DTYPES)}")


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def read_parts(layout: SlicedFile, path: str | os.PathLike, names: Iterable[str]) -> Iterator[tuple[str, int, Tensor]]:
    """The values of the named tensors, as (name, first element, values), one buffer at a time."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for name in names:
            dtype, shape = layout.tensors[name]
            numel, step = torch.Size(shape).numel(), BUFFER_BYTES // dtype.itemsize
            for at in range(0, numel, step):
                count = min(step, numel - at)
                yield name, at, _read_all(descriptor, dtype, count, layout.position(name, at))
    finally:
        os.close(descriptor)


class SliceWriter:
    """Puts parts of tensors into created files, through one buffer, and adds up checksums.

    An error does not surface before `close`, so that ranks which stream to each other stay in step.
    """

    def __init__(self, files: Mapping[str, SlicedFile], paths: Mapping[str, Path]) -> None:
        self.files, self.paths = files, paths
        self.sums = {name: 0 for file in files.values() for name in file.tensors}
        self.nbytes = 0
        self._outputs: dict[str, _Output] = {}
        self._pages = memoryview(mmap.mmap(-1, BUFFER_BYTES))  # begins with a page, as direct writes need it
        self._error: OSError | None = None

    def put(self, file: str, name: str, start: int, values: Tensor) -> None:
        """Write `values` as elements `start` and following of tensor `name`, cast to its dtype."""
        if self._error is not None:
            return
        layout = self.files[file]
        dtype = layout.tensors[name][0]
        try:
            if file not in self._outputs:
                self._outputs[file] = _Output(self.paths[file], self._pages)
            for at, piece in in_buffers(values, dtype):
                self.sums[name] = combine(self.sums[name], checksum(piece, start + at))
                self._outputs[file].write(piece, layout.position(name, start + at))
                self.nbytes += piece.nbytes
        except OSError as error:
            self._fail(error, self.paths[file])

    def _fail(self, error: OSError, path: Path) -> None:
        """Keep the first error, with the name of the file, which calls on descriptors leave out."""
        self._error = self._error or OSError(error.errno, error.strerror, str(path))

    def close(self) -> None:
        """Flush to the disk. Raises the first OSError since the beginning."""
        for file, output in self._outputs.items():
            try:
                output.close(flush=self._error is None)
            except OSError as error:
                self._fail(error, self.paths[file])
        self._outputs.clear()
        if self._error is not None:
            raise self._error


class _Output:
    """A file that many ranks write at any position, each its own bytes.

    Whole pages go past the page cache where the file system allows it: writers of one file through the cache wait for
    each other at its lock. The ends that fill no page go through the cache, and last, as they wait for all others.
    """

    def __init__(self, path: Path, pages: memoryview) -> None:
        self._pages = pages
        self._cached = os.open(path, os.O_WRONLY)
        self._direct: int | None = None
        self._ends: list[tuple[int, bytes]] = []
        with contextlib.suppress(OSError, AttributeError):  # not every file system, not every system
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)

    def write(self, values: Tensor, position: int) -> None:
        data = memoryview(values.view(torch.uint8).numpy())
        low, high = -position % _PAGE, len(data) - (position + len(data)) % _PAGE
        if self._direct is None:
            _write_all(self._cached, data, position)
        elif low >= high:
            self._ends.append((position, bytes(data)))
        else:
            pages = self._pages[: high - low]
            pages[:] = data[low:high]
            _write_all(self._direct, pages, position + low)
            self._ends += [(position, bytes(data[:low])), (position + high, bytes(data[high:]))]

    def close(self, flush: bool) -> None:
        try:
            if flush:
                for position, data in self._ends:
                    _write_all(self._cached, memoryview(data), position)
                os.fsync(self._cached)
        finally:
            os.close(self._cached)
            if self._direct is not None:
                os.close(self._direct)


def _allocate(descriptor: int, nbytes: int) -> None:
    """Give a file its blocks, where the file system can do so at once: a full disk is noticed before the first tensor.

    Python's posix_fallocate would write to every block where it cannot. Raises OSError for a full disk.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "fallocate") or not library.fallocate(
        descriptor, 0, ctypes.c_long(0), ctypes.c_long(nbytes)
    ):
        return
    code = ctypes.get_errno()
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(code, os.strerror(code))


def in_buffers(values: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """(first element, part) of a tensor, cast and on the host, one buffer at a time."""
    values = values.detach().reshape(-1)
    step = max(1, BUFFER_BYTES // max(dtype.itemsize, values.itemsize))
    for at in range(0, values.numel(), step):
        yield at, values[at : at + step].to(device="cpu", dtype=dtype).contiguous()


def _write_all(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written


def _read_all(descriptor: int, dtype: torch.dtype, numel: int, position: int) -> Tensor:
    values = torch.empty(numel, dtype=dtype)
    data = memoryview(values.view(torch.uint8).numpy())
    while data:
        count = os.preadv(descriptor, [data], position)
        if count == 0:
            raise ZeroCheckpointError(f"file ends {len(data)} bytes early")
        data, position = data[count:], position + count
    return values
