"""Safetensors files that several ranks write and read together, each its own byte ranges."""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_zero.checkpoint.checksum import Checksums, memory_of
from hf_zero.core.direct_file import allocate_blocks, read_all
from hf_zero.errors import ZeroCheckpointError, ZeroDamageError


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
# Values are written and read in shards of this size, a few of which are what that holds besides the tensors.
BUFFER_BYTES = 8 * 2**20
# So much of a file is on its way from the disk while values that have come are worked on.
_AHEAD_BYTES = 4 * BUFFER_BYTES
# The library reads no longer header.
_LONGEST_HEADER = 100_000_000

# (file, tensor name, first element, values); the values are valid until the next part is asked for.
Part = tuple[str, str, int, Tensor]
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
        try:
            with open(path, "rb") as file, safe_open(path, "np") as content:  # the library checks the header
                start = file.read(8)
                header = start + file.read(int.from_bytes(start, "little"))
                metadata = content.metadata() or {}
                found = {name: content.get_slice(name) for name in content.offset_keys()}
                described = {name: (entry.get_dtype(), tuple(entry.get_shape())) for name, entry in found.items()}
        except OSError as error:
            raise ZeroCheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except SafetensorError as error:
            raise ZeroCheckpointError(f"{path} is not a safetensors file, or not complete: {error}") from error
        for name, (dtype, _) in described.items():
            if dtype not in _DTYPES:
                raise ZeroCheckpointError(
                    f"{path}: tensor '{name}' has the dtype {dtype}; hf_zero reads {', '.join(_DTYPES)}"
                )
        opened = cls({name: (_DTYPES[dtype], shape) for name, (dtype, shape) in described.items()}, metadata)
        opened.nbytes += len(header) - len(opened.header)
        opened.header = header
        return opened

    def position(self, name: str, start: int) -> int:
        """Where element `start` of a tensor lies in the file."""
        return len(self.header) + self._begin[name] + start * self.tensors[name][0].itemsize

    def _range(self, name: str, start: int, numel: int) -> tuple[int, int]:
        """(position, bytes) of elements of a tensor."""
        return self.position(name, start), numel * self.tensors[name][0].itemsize

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
            allocate_blocks(file.fileno(), 0, self.nbytes)  # a full disk is noticed before the first tensor

    def read(
        self,
        path: str | os.PathLike,
        parts: Iterable[tuple[str, int, Tensor]],
        sums: Checksums | None = None,
        coming: Iterable[tuple[str, int, Tensor]] = (),
    ) -> None:
        """Fill each part's contiguous tensor with the values of `name` from element `start` on (no collective).

        With `sums`, what is read is added to them. `coming` are the same parts, of which only shapes matter: what
        comes next is fetched from the disk meanwhile. Raises ZeroDamageError where the file ends early or cannot be
        read.
        """
        buffer = Buffer()
        with _opened(path) as descriptor:
            ahead = _ReadAhead(descriptor, (self._range(name, start, part.numel()) for name, start, part in coming))
            for name, start, target in parts:
                dtype, flat = self.tensors[name][0], target.detach().view(-1)
                for at, shard in shards(flat, dtype):
                    ahead.begin(shard.numel() * dtype.itemsize)
                    as_stored = shard.dtype == dtype and shard.device.type == "cpu"
                    values = shard if as_stored else buffer.room(dtype, shard.numel())
                    _read_values(descriptor, values, self.position(name, start + at))
                    if sums is not None:
                        sums.add(name, start + at, values)
                    if not as_stored:
                        shard.copy_(values)

    def sum_up(self, path: str | os.PathLike, names: Iterable[str], sums: Checksums) -> None:
        """Add the whole tensors of these names to `sums`. Raises as `read` does."""
        buffer = Buffer()
        with _opened(path) as descriptor:
            ahead = _ReadAhead(descriptor, (self._range(name, 0, math.prod(self.tensors[name][1])) for name in names))
            for name in names:
                dtype, shape = self.tensors[name]
                step = BUFFER_BYTES // dtype.itemsize
                for at in range(0, math.prod(shape), step):
                    values = buffer.room(dtype, min(step, math.prod(shape) - at))
                    ahead.begin(values.nbytes)
                    _read_values(descriptor, values, self.position(name, at))
                    sums.add(name, at, values)


class _ReadAhead:
    """Has the system fetch from the disk what is read next, while what has come is verified and put in place.

    Args:
        ranges: (position, bytes) of what will be read, in order.
    """

    def __init__(self, descriptor: int, ranges: Iterable[tuple[int, int]]) -> None:
        self._descriptor, self._ranges = descriptor, iter(ranges)
        self._ahead = 0  # bytes that were asked for and not read yet

    def begin(self, nbytes: int) -> None:
        """So many bytes are read now."""
        while self._ahead < nbytes + _AHEAD_BYTES and hasattr(os, "posix_fadvise"):
            position, size = next(self._ranges, (0, 0))
            if not size:
                break
            with contextlib.suppress(OSError):  # advice, which not every file system takes
                os.posix_fadvise(self._descriptor, position, size, os.POSIX_FADV_WILLNEED)
            self._ahead += size
        self._ahead -= nbytes


class Buffer:
    """Memory for one shard, used again for the next: fresh memory costs as much as what is done with it."""

    def __init__(self) -> None:
        self._bytes: Tensor | None = None

    def room(self, dtype: torch.dtype, numel: int) -> Tensor:
        """A tensor of at most `BUFFER_BYTES`, valid until the next call."""
        if self._bytes is None:
            self._bytes = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
        return self._bytes[: numel * dtype.itemsize].view(dtype)


def shards(flat: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """(first element, part) of a flat tensor whose values have `dtype` in a file: each fits the buffer."""
    step = BUFFER_BYTES // dtype.itemsize
    for at in range(0, flat.numel(), step):
        yield at, flat[at : at + step]


@contextlib.contextmanager
def _opened(path: str | os.PathLike) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    except OSError as error:
        raise ZeroDamageError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _read_values(descriptor: int, values: Tensor, position: int) -> None:
    missing = read_all(descriptor, memory_of(values), position)
    if missing:
        raise ZeroDamageError(f"file ends {missing} bytes early")
