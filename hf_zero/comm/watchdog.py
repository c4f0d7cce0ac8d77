"""Names ranks that wait for each other in different collectives, and ends the run instead of waiting for a timeout.

[Note: divergence] Every rank notes which collective it waits for. When one has waited too long, all ranks publish
where they are through the store that the process group was made with, beside the data path. If every rank waits, but
not for the same thing, nothing can go on: twice the same answer is a divergence. A rank that is busy elsewhere, with a
save for example, is only named in a warning; the process group's own timeout still holds for it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from hf_zero.errors import ZeroRuntimeError


logger = logging.getLogger(__name__)

_ANSWER_S = 10.0  # how long a rank may take to say where it is
_POLL_S = 0.05  # how often it is looked for
_LEAVE_S = 60.0  # how long the end of a process waits for the watching thread, which leaves at once unless it hangs


class Store(Protocol):
    """The part of torch.distributed's key-value store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


def end_process(report: str) -> None:
    """Print the report on every rank and end the run."""
    sys.stderr.write(f"hf_zero: {report}\n")
    sys.stderr.flush()
    os._exit(1)


class Watchdog:
    """Watches one rank's waits from a thread.

    Args:
        store: a store that all ranks share.
        name: distinguishes groups of ranks in the store; the same on all ranks of a group.
        timeout_s: how long a wait may take before the ranks compare where they are.
        abort: ends this process, given the report; no wait inside a collective can be interrupted otherwise.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        rank: int,
        world_size: int,
        timeout_s: float,
        abort: Callable[[str], None] = end_process,
    ) -> None:
        self._store, self._prefix = store, f"hf_zero/hang/{name}"
        self._rank, self._world_size, self.timeout_s, self._abort = rank, world_size, timeout_s, abort
        self._main = threading.get_ident()
        self._waiting: tuple[str, float] | None = None
        self._round = 0
        self._last: list[str] | None = None
        self._stop = threading.Event()
        atexit.register(self.stop)  # the store may be gone before this thread is
        self._thread = threading.Thread(target=self._watch, name="hf_zero watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watching.

        A thread that comes back from the store while the interpreter ends aborts the process ("terminate called
        without an active exception"): Python ends it there, in the middle of C++ code that nothing may unwind.
        """
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_LEAVE_S)

    def wait(self, label: str, action: Callable[[], None]) -> None:
        """Run `action`, which waits for collective `label`. Raises ZeroRuntimeError where the other ranks are gone."""
        self._waiting = (label, time.monotonic())
        try:
            action()
        except RuntimeError as error:
            raise ZeroRuntimeError(
                f"rank {self._rank} lost its peers in {label}: {error}. Another rank has probably failed: look for "
                "the first traceback in the output of all ranks"
            ) from error
        finally:
            self._waiting = None

    # -- the watching thread --------------------------------------------------------------------------------------

    def _watch(self) -> None:
        pause = min(5.0, max(0.2, self.timeout_s / 10))
        while not self._stop.wait(pause):
            try:
                if self._overdue() or self._store.check([f"{self._prefix}/{self._round}/asked"]):
                    self._compare()
            except Exception as error:  # the store ends with the rank that hosts it
                logger.debug("watchdog ends: %s", error)
                return

    def _overdue(self) -> bool:
        waiting = self._waiting
        return waiting is not None and time.monotonic() - waiting[1] > self.timeout_s

    def _compare(self) -> None:
        """One round: ask, answer, and judge the answers of all ranks."""
        key = f"{self._prefix}/{self._round}"
        self._round += 1
        self._store.set(f"{key}/asked", "1")
        self._store.set(f"{key}/{self._rank}", json.dumps(self._where()))
        answers = [self._answer(f"{key}/{rank}") for rank in range(self._world_size)]
        if not self._stop.is_set():
            self._judge(answers)

    def _answer(self, key: str) -> list:
        deadline = time.monotonic() + _ANSWER_S
        while not self._store.check([key]):  # not `wait`: nothing could call the thread back from it
            if self._stop.wait(_POLL_S) or time.monotonic() > deadline:
                return [False, "gives no answer"]
        return json.loads(self._store.get(key))

    def _judge(self, answers: list) -> None:
        places = [place for _, place in answers]
        waiting = all(waits for waits, _ in answers)
        text = "\n".join(f"  rank {rank}: {place}" for rank, place in enumerate(places))
        if waiting and len(set(places)) > 1:
            if places == self._last:
                self._stop.set()
                self._abort(
                    f"the ranks wait for each other in different places:\n{text}\nEvery rank must run the same "
                    "modules in the same order (with unit_size, inside of layers too). Look for a branch, a loop or a "
                    "save that only some ranks take"
                )
            self._last = places
        elif self._overdue():
            logger.warning("waiting for more than %g s:\n%s", self.timeout_s, text)
            self._last = None
            waited = self._waiting
            if waited is not None:
                self._waiting = (waited[0], time.monotonic())  # ask again after another timeout

    def _where(self) -> list:
        """(whether the rank waits for others, where it is)."""
        waiting = self._waiting
        if waiting is not None:
            return [True, f"waits for {waiting[0]}"]
        frame = sys._current_frames().get(self._main)
        in_collective, place = False, "has ended"
        while frame is not None:
            file = frame.f_code.co_filename
            if "torch/distributed/" in file:
                in_collective = True
            elif "/site-packages/" not in file and "/lib/python" not in file:
                place = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
                break
            frame = frame.f_back
        return [in_collective, f"waits for a collective of its own at {place}" if in_collective else f"is at {place}"]
