"""What the disk of one rank fails at: kept while the other ranks wait for this one, then raised on all of them.

[Note: passes] All ranks make the same collectives in a pass: forward, backward, what goes on around a step, whatever
gathers state. Were an error raised on one rank, the others would wait for it in the next of them. So inside a pass
that rank goes on, with whatever is in its memory, nothing of which is written, and at the end all ranks raise.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from hf_zero.comm.communicator import Communicator
from hf_zero.errors import ZeroRuntimeError


class DiskFailures:
    """The first failure of this rank that is not raised yet (see [Note: passes])."""

    def __init__(self, *, enabled: bool = False) -> None:
        self.enabled = enabled  # whether anything is on disk, the same on all ranks
        self._text: str | None = None
        self._is_kept = False  # rather than raised

    def begin_pass(self) -> None:
        """From here on failures are kept."""
        self._is_kept = self.enabled

    def leave_pass(self) -> None:
        """From here on they are raised, but those that are kept, which the next `end_pass` raises."""
        self._is_kept = False

    def end_pass(self, comm: Communicator, device: torch.device) -> None:
        """Raise ZeroRuntimeError on all ranks where one has failed; a collective if anything is on disk."""
        self.leave_pass()
        if self.enabled:
            failed = torch.tensor([float(self._text is not None)], device=device)
            if comm.all_reduce_scalars(failed, largest=True).item():
                raise_anywhere(comm, self._text)

    @contextlib.contextmanager
    def one_pass(self, comm: Communicator, device: torch.device) -> Iterator[None]:
        """A pass from its beginning to its end, or a part of the one that is under way."""
        if self._is_kept or not self.enabled:
            yield
            return
        self.begin_pass()
        try:
            yield
        finally:
            self.leave_pass()
        self.end_pass(comm, device)

    @contextlib.contextmanager
    def late(self) -> Iterator[None]:
        """Inside, ZeroRuntimeError raises at the end of the pass, if one is under way."""
        try:
            yield
        except ZeroRuntimeError as error:
            if not self._is_kept:
                raise
            self._text = self._text or str(error)


def raise_anywhere(comm: Communicator, error: str | None) -> None:
    """Raise on all ranks what has gone wrong on one; a collective."""
    for rank, text in enumerate(comm.all_gather_object(error)):
        if text is not None:
            raise ZeroRuntimeError(f"rank {rank}: {text}")


class _Passes(Protocol):
    def one_pass(self, comm: Communicator) -> AbstractContextManager[None]: ...


class _WithHomes(Protocol):
    @property
    def homes(self) -> _Passes: ...

    comm: Communicator


_Self = TypeVar("_Self", bound=_WithHomes)
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def in_one_pass(
    method: Callable[Concatenate[_Self, _Params], _Result],
) -> Callable[Concatenate[_Self, _Params], _Result]:
    """Have a method that is a collective raise on all ranks what the disk of one fails at in it."""

    @functools.wraps(method)
    def within(self: _Self, /, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        with self.homes.one_pass(self.comm):
            return method(self, *args, **kwargs)

    return within
