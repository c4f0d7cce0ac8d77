"""`profiling`: a torch.profiler trace of a few steps, with the engine's collectives and phases labelled in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from hf_zero.tools.memory import without_notes


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
