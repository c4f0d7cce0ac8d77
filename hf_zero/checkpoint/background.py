"""Saves that go on in a thread: training continues as soon as the values of the moment are copied.

[Note: asynchronous save] What ranks must agree on before (plans, free space, who creates files) is done in the
foreground, and so is the copy of each rank's own slices. The rest is the same code as of any other save, run by a
thread whose collectives have process groups of their own: they may fall between any collectives of training. All ranks
agree on the outcome in the thread, so `wait` needs no communication and raises on every rank or on none.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hf_zero.comm.communicator import Communicator
from hf_zero.errors import ZeroCheckpointError


logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Later:
    """What remains to be done of one save, in order, and the collectives for it."""

    comm: Communicator
    folder: str = ""
    steps: list[Callable[[], None]] = field(default_factory=list)
    leftovers: list[Callable[[], None]] = field(default_factory=list)  # what removes files that are not complete

    def abandon(self) -> None:
        """Remove what no step will complete."""
        for remove in self.leftovers:
            remove()


@dataclass(frozen=True, kw_only=True)
class SaveJob:
    """One save, as whatever takes part in it sees it."""

    comm: Communicator
    is_main: bool  # whether this rank creates files (rank 0 does, or one rank of every node)
    later: Later | None = None  # what is left to a thread; None: everything is done at once
    sums: bool = True  # whether the tensors get checksums, which only the marker of a checkpoint holds

    def perform(self, step: Callable[[], None]) -> None:
        """Do a step now, or leave it to the thread."""
        if self.later is None:
            step()
        else:
            self.later.steps.append(step)


class BackgroundSaves:
    """At most one save at a time whose writing goes on in a thread."""

    def __init__(self) -> None:
        self._comm: Communicator | None = None
        self._thread: threading.Thread | None = None
        self._error: ZeroCheckpointError | None = None

    @contextlib.contextmanager
    def save(self, comm: Communicator, is_main: bool, asynchronous: bool) -> Iterator[SaveJob]:
        """Inside, save by this job; what it is left is done afterwards, if `asynchronous`, by a thread.

        A collective, which waits for the save before this one and raises as `wait` does.
        """
        self.wait()
        if not asynchronous:
            yield SaveJob(comm=comm, is_main=is_main)
            return
        if self._comm is None:
            self._comm = comm.of_a_thread()
        later = Later(comm=self._comm)
        try:
            yield SaveJob(comm=comm, is_main=is_main, later=later)
        except BaseException:
            later.abandon()
            raise
        # No daemon: the interpreter does not end before it is done.
        self._thread = threading.Thread(target=self._run, args=(later,), name=f"save of {later.folder}")
        self._thread.start()

    def _run(self, later: Later) -> None:
        try:
            for step in later.steps:
                step()
        except BaseException as error:
            later.abandon()
            self._error = ZeroCheckpointError(f"{later.folder} was not written: {error}")
            self._error.__cause__ = error
            logger.error(str(self._error))  # nobody may wait for it any more

    def finish(self) -> None:
        """Wait for the save under way, whatever becomes of it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait for the save under way. Raises ZeroCheckpointError where it failed, on all ranks, once."""
        self.finish()
        error, self._error = self._error, None
        if error is not None:
            raise error
