"""`profiling`: a torch.profiler trace of a few steps, with the engine's collectives and phases labelled in it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist


_ERROR = 2  # of torch's levels for what its C++ side says


@contextlib.contextmanager
def without_notes() -> Iterator[None]:
    """Keep torch from noting on stderr that a profile begins, ends, and has not seen older tensors made."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reads it once, at its first use
    level = _log_level()
    if level is None:
        yield
        return
    before, level.value = level.value, _ERROR
    try:
        yield
    finally:
        level.value = before


def _log_level() -> ctypes.c_int | None:
    """The level below which torch's C++ side says nothing; None where this build of torch has it elsewhere."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def profiling(folder: str | Path, *, memory: bool = False) -> Iterator[torch.profiler.profile]:
    """Write a trace of what runs inside to `folder/trace_rank<r>.json` (for Perfetto or chrome://tracing).

    End it where no gather is under way: after a forward pass, or around whole steps at stage 3. At stages 1 and 2 a
    step begins the gather of updated weights, so read a parameter (or run a forward) before the block ends.

    Ranges named `hf_zero::all-gather`, `hf_zero::reduce-scatter` and so on show which unit a rank waited for. With
    `memory`, every allocation is in the trace too.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with without_notes(), torch.profiler.profile(activities=activities, profile_memory=memory) as profiler:
        yield profiler
    rank = dist.get_rank() if dist.is_initialized() else 0
    profiler.export_chrome_trace(str(target / f"trace_rank{rank}.json"))
