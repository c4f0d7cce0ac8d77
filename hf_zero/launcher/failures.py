"""Errors that are for people: ranks that fail alike print one message between them, and no traceback."""

from __future__ import annotations

import dis
import hashlib
import os
import sys
import textwrap
import traceback
from datetime import timedelta
from pathlib import Path
from types import TracebackType

from hf_zero.errors import ZeroError


TRACEBACK_VARIABLE = "HF_ZERO_TRACEBACK"
STATUS = 2  # the exit status behind a message for people; 1 is that of a bug, and of a check that found something

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python")
_BUGS = (LookupError, TypeError, AttributeError, AssertionError, NameError, ArithmeticError)
_PRINT_S = 60.0  # how long a rank waits for another one to print what both have to say

_WITHOUT_DEEPSPEED = (
    ". hf_zero runs in its place: leave this out where the script has another branch, as a plain read of a parameter "
    "gathers it; else write `import hf_zero.deepspeed as deepspeed`"
)

_previous = None  # the hook that ours stands before


def install() -> None:
    """In a rank that a launcher has started, take over the report of uncaught exceptions, once.

    A hook that others, such as torch, put before ours later calls it.
    """
    global _previous
    if "LOCAL_RANK" in os.environ and _previous is None:
        _previous, sys.excepthook = sys.excepthook, _report


def wants_traceback() -> bool:
    """Whether errors for people shall come with their tracebacks, and from every rank."""
    return os.environ.get(TRACEBACK_VARIABLE) == "1"


def is_users_file(file: str) -> bool:
    """Whether `file` holds code of the user, rather than of hf_zero, an installed package or Python itself."""
    return not file.startswith(("<", _PACKAGE)) and not any(folder in file for folder in _INSTALLED)


def is_for_people(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether the message of `error` says everything: hf_zero raised it on purpose, and not because of a bug."""
    if isinstance(error.__cause__, _BUGS):
        return False
    return isinstance(error, ZeroError) or (isinstance(error, (ValueError, TypeError)) and _raised_by_us(trace))


def _wants_deepspeed(error: BaseException) -> bool:
    """Whether a script (or a library, asked to) imports DeepSpeed where it is not installed."""
    return isinstance(error, ImportError) and "deepspeed" in str(error).lower()


def _raised_by_us(trace: TracebackType | None) -> bool:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    # An operation that fails, such as int("x"), may be a bug of ours; a `raise` statement is a message of ours.
    return code.co_filename.startswith(_PACKAGE) and dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    interrupted, lacking = isinstance(error, KeyboardInterrupt), _wants_deepspeed(error)
    if not interrupted and not lacking and not is_for_people(error, trace):
        _previous(kind, error, trace)
        return
    if wants_traceback():
        rank = os.environ.get("RANK", "")
        text = "".join(traceback.format_exception(error))
        _print(textwrap.indent(text, f"[rank{rank}]: ", lambda line: True))
    else:
        message = "interrupted" if interrupted else f"{error}{_WITHOUT_DEEPSPEED}" if lacking else str(error)
        text = f"hf_zero: {message}\n{_users_line(trace)}  ({TRACEBACK_VARIABLE}=1 prints the traceback)\n"
        _print_once(text, topic=message)
    raise SystemExit(130 if interrupted else STATUS)  # the interpreter takes the status from here


def _users_line(trace: TracebackType | None) -> str:
    """Where in the user's code it happened; nothing where it did not."""
    places = [place for place in traceback.extract_tb(trace) if is_users_file(place.filename)]
    return f"  in {places[-1].filename}:{places[-1].lineno}: {places[-1].line}\n" if places else ""


def _print_once(text: str, topic: str) -> None:
    """Print `text` on the first rank that comes with `topic`; the others that do wait until it is printed.

    They may not end before: the launcher stops all ranks as soon as one has ended.
    """
    try:
        store = _store()
        key = f"hf_zero/failures/{hashlib.sha256(topic.encode()).hexdigest()}"
        if store.add(key, 1) > 1:
            store.wait([f"{key}/printed"], timedelta(seconds=_PRINT_S))
            return
    except Exception:  # no store, or its host is gone, or the other rank ended before it could print
        store = None
    _print(text)
    if store is not None:
        store.set(f"{key}/printed", "1")


def _print(text: str) -> None:
    # Not sys.stderr: torch's own hook puts a buffer there while it calls ours, and does not survive SystemExit.
    print(text, end="", file=sys.__stderr__, flush=True)


def _store():
    # Imports torch, which a rank that fails early may not have done.
    from hf_zero.comm.process_groups import store_of_ranks

    return store_of_ranks(timedelta(seconds=_PRINT_S))
