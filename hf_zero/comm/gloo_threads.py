"""Ends a process only when gloo's threads have let go of the tensors of their last collectives."""

import atexit
import functools
import time
from pathlib import Path


_NAME = "pt_gloo_runloop"  # what torch calls the threads that carry out gloo's collectives
_PAUSE_S = 0.001
_QUIET = 3  # so many times in a row nobody may be awake
_LIMIT_S = 10.0


@functools.cache
def rest_at_exit() -> None:
    """Have the end of this process wait for the threads.

    The caller of a collective goes on while the thread that carried it out still has to drop the tensors, for which it
    takes the interpreter's lock. An interpreter that ends in between stops that thread inside a destructor of C++,
    which aborts the process ("terminate called without an active exception"), in scripts without hf_zero as well.
    """
    atexit.register(_let_them_rest)


def _let_them_rest() -> None:
    deadline, quiet = time.monotonic() + _LIMIT_S, 0
    while quiet < _QUIET and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
        quiet = 0 if _anyone_awake() else quiet + 1


def _anyone_awake() -> bool:
    """Whether a thread runs or could; one that waits for the interpreter's lock is woken by the very reading here."""
    for folder in Path("/proc/self/task").glob("*"):
        try:
            name, _, fields = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        if name == _NAME and fields.split()[0] != "S":
            return True
    return False
