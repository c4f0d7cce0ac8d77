"""Safetensors files that several ranks write and read together, each its own byte ranges."""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from hf_zero.checkpoint.checksum import Checksums, memory_of
from hf_zero.core.direct_file import allocate_blocks, read_all
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
# Values are written and read in shards of this size, a few of which are what that holds besides the tensors.
BUFFER_BYTES = 8 * 2**20
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
            allocate_blocks(file.fileno(), 0, self.nbytes)  # a full disk is noticed before the first tensor

    def read(
        self, path: str | os.PathLike, parts: Iterable[tuple[str, int, Tensor]], sums: Checksums | None = None
    ) -> None:
        """Fill each part's contiguous tensor with the values of `name` from element `start` on (no collective).

        With `sums`, what is read is added to them. Raises ZeroCheckpointError where the file ends early.
        """
        buffer = Buffer()
        with _opened(path) as descriptor:
            for name, start, target in parts:
                dtype, flat = self.tensors[name][0], target.detach().view(-1)
                for at, shard in shards(flat, dtype):
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
            for name in names:
                dtype, shape = self.tensors[name]
                step = BUFFER_BYTES // dtype.itemsize
                for at in range(0, math.prod(shape), step):
                    values = buffer.room(dtype, min(step, math.prod(shape) - at))
                    _read_values(descriptor, values, self.position(name, at))
                    sums.add(name, at, values)


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
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor '{name}' needs a dtype, a shape and two offsets, in whole numbers from 0 on")
    if dtype not in _DTYPES:
        raise ValueError(f"tensor '{name}' has the dtype {dtype}; hf_zero reads {', '.join(_DTYPES)}")


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


@contextlib.contextmanager
def _opened(path: str | os.PathLike) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_values(descriptor: int, values: Tensor, position: int) -> None:
    missing = read_all(descriptor, memory_of(values), position)
    if missing:
        raise ZeroCheckpointError(f"file ends {missing} bytes early")
