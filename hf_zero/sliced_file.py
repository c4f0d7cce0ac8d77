"""Safetensors files that several ranks write and read together, each its own byte ranges."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hf_zero.comm import Communicator
from hf_zero.errors import ZeroCheckpointError


# The dtype names of the safetensors format.
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_CHUNK_BYTES = 64 * 2**20  # per system call, and the most that reading holds besides its result


class SlicedFile:
    """The layout of one safetensors file: tensors by name, back to back in the order given.

    Args:
        tensors: dtype and shape of every tensor.
        metadata: strings that the header carries.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
    ) -> None:
        self.tensors = dict(tensors)
        self.metadata = dict(metadata)
        self._begin: dict[str, int] = {}
        entries: dict[str, object] = {"__metadata__": self.metadata} if metadata else {}
        end = 0
        for name, (dtype, shape) in tensors.items():
            begin, end = end, end + dtype.itemsize * torch.Size(shape).numel()
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
                (length,) = struct.unpack("<Q", file.read(8))
                if length > path.stat().st_size:
                    raise ValueError("its header is longer than the file")
                entries = json.loads(file.read(length))
            metadata = entries.pop("__metadata__", {})
            tensors = {name: (_DTYPES[entry["dtype"]], tuple(entry["shape"])) for name, entry in entries.items()}
            opened = cls(tensors, metadata)
            opened._begin = {name: entry["data_offsets"][0] for name, entry in entries.items()}
        except (struct.error, ValueError, KeyError) as error:
            raise ZeroCheckpointError(f"{path} is not a safetensors file: {error}") from error
        opened.header = b"\0" * (8 + length)
        opened.nbytes = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if path.stat().st_size != opened.nbytes:
            raise ZeroCheckpointError(f"{path} has {path.stat().st_size} bytes, its header asks for {opened.nbytes}")
        return opened

    def position(self, name: str, start: int) -> int:
        """Where element `start` of a tensor lies in the file."""
        return len(self.header) + self._begin[name] + start * self.tensors[name][0].itemsize

    def write(self, path: str | os.PathLike, comm: Communicator, parts: Iterable[tuple[str, int, Tensor]]) -> None:
        """Write the file together: each rank gives its (name, first element, values); a collective.

        The file appears under its name only when it is complete. Raises ZeroCheckpointError, on all ranks, when one
        of them fails.
        """
        path = Path(path)
        temporary = path.with_name(path.name + ".tmp")
        agree(comm, lambda: self._create(temporary) if comm.rank == 0 else None)
        agree(comm, lambda: self._write_parts(temporary, parts))
        agree(comm, lambda: os.replace(temporary, path) if comm.rank == 0 else None)

    def _create(self, path: Path) -> None:
        with path.open("wb") as file:
            file.write(self.header)
            file.truncate(self.nbytes)

    def _write_parts(self, path: Path, parts: Iterable[tuple[str, int, Tensor]]) -> None:
        if not path.exists():
            raise OSError(f"{path}, made by rank 0, is not visible here: the ranks share no file system")
        descriptor = os.open(path, os.O_WRONLY)
        try:
            for name, start, values in parts:
                _write_all(descriptor, values.to(self.tensors[name][0]), self.position(name, start))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, path: str | os.PathLike, parts: Iterable[tuple[str, int, Tensor]]) -> None:
        """Fill each part's tensor with the values of `name` from element `start` on (no collective)."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            for name, start, target in parts:
                values = _read_all(descriptor, self.tensors[name][0], target.numel(), self.position(name, start))
                target.copy_(values.view(target.shape))
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, values: Tensor, position: int) -> None:
    data = memoryview(values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    while data:
        written = os.pwrite(descriptor, data[:_CHUNK_BYTES], position)
        data, position = data[written:], position + written


def _read_all(descriptor: int, dtype: torch.dtype, numel: int, position: int) -> Tensor:
    values = torch.empty(numel, dtype=dtype)
    data = memoryview(values.view(torch.uint8).numpy()) if numel else memoryview(b"")
    while data:
        count = os.preadv(descriptor, [data[:_CHUNK_BYTES]], position)
        if count == 0:
            raise ZeroCheckpointError(f"file ends {len(data)} bytes early")
        data, position = data[count:], position + count
    return values


def agree(comm: Communicator, action) -> None:
    """Run `action` on every rank; when it fails on one, raise on all of them. A collective."""
    error = None
    try:
        action()
    except (OSError, ValueError, RuntimeError) as caught:
        error = caught
    failures = [(rank, text) for rank, text in enumerate(comm.all_gather_object(error and str(error))) if text]
    if failures:
        rank, text = failures[0]
        raise ZeroCheckpointError(f"rank {rank} of {comm.world_size} failed: {text}") from error
