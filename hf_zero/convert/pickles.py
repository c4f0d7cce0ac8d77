"""Reads pickles of others without running any code of theirs: what is no tensor or plain value becomes inert."""

from __future__ import annotations

import functools
import io
import logging
import pickle
import pickletools
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hf_zero.errors import ZeroCheckpointError


logger = logging.getLogger(__name__)

_DAMAGES = (
    *(OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, pickle.PickleError),
    *(OverflowError, MemoryError, zipfile.BadZipFile, zlib.error),
)


class Inert:
    """Stands in for an object of a class that is not built; it keeps what the file says about it.

    `args` are those that its class would be called with, `state` is what its `__dict__` would be.
    """

    args: tuple = ()
    state: Any = None

    def __new__(cls, *args: object) -> Inert:
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *args: object) -> None:
        """As `__new__` has taken them."""

    def __setstate__(self, state: object) -> None:
        self.state = state


def _stand_in(name: str) -> type[Inert]:
    return type(name, (Inert,), {})


def verify(path: Path) -> None:
    """Read a file that torch has saved and compare it with its own CRC-32s, which `torch.load` does not look at.

    A file that is no zip archive has none. Raises ZeroCheckpointError, naming the file, where its bytes have changed.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) == b"PK\3\4" or zipfile.is_zipfile(file):
                _verify(file, path)
    except FileNotFoundError:
        raise ZeroCheckpointError(f"{path} is missing: the checkpoint is incomplete") from None
    except _DAMAGES as error:
        raise _unreadable(path, error) from error


def _verify(file: BinaryIO, path: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        if not any(member.CRC for member in archive.infolist()):
            _warn_unverified(path)
            return
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"it is damaged, '{damaged}' has other bytes than were saved")


@functools.cache  # once per file, which may hold many archives
def _warn_unverified(path: Path) -> None:
    logger.warning("hf-zero convert: %s was saved without checksums, so it is read without a check for damage", path)


def load(path: Path) -> Any:
    """The content of a .pt file, verified, its tensors mapped from the file and not copied.

    Raises ZeroCheckpointError, naming the file, where it is damaged, or asks for something that loading must not do.
    """
    verify(path)
    try:
        # torch's restricted unpickler calls what it is told to be safe, and only that. Each foreign name has a class
        # of its own, as the unpickler looks a class up by identity.
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([(_stand_in(name), name) for name in foreign]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except _DAMAGES as error:
        raise _unreadable(path, error) from error


def load_part(file: BinaryIO, path: Path) -> Any:
    """As `load`, of a .pt file that lies inside another one and was read into memory; `path` is for the message."""
    try:
        _verify(file, path)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except _DAMAGES as error:
        raise _unreadable(path, error) from error


def load_plain(path: Path) -> Any:
    """The content of a file that `pickle` wrote, with every object as `Inert`; sizes and dtypes are torch's own."""
    try:
        data = path.read_bytes()
        # The unpickler makes room for as many bytes, or numbered objects, as a damaged length or number asks for.
        for code, argument, _ in pickletools.genops(data):  # which raises ValueError for lengths beyond the end
            if code.name.endswith("PUT") and argument > len(data):
                raise pickle.UnpicklingError(f"it numbers an object {argument:,}, and has {len(data):,} bytes")
        return _InertUnpickler(io.BytesIO(data)).load()
    except FileNotFoundError:
        raise ZeroCheckpointError(f"{path} is missing: the checkpoint is incomplete") from None
    except _DAMAGES as error:
        raise _unreadable(path, error) from error


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        found = getattr(torch, name, None) if module == "torch" else None
        return found if found is torch.Size or isinstance(found, torch.dtype) else _stand_in(name)


def _unreadable(path: Path, error: Exception) -> ZeroCheckpointError:
    reason = (str(error) or type(error).__name__).strip().splitlines()[0]
    return ZeroCheckpointError(f"{path} cannot be read: {reason}")
