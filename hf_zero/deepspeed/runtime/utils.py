"""DeepSpeed's memory prints: what the accelerator and the host hold at a point of the program."""

import os

import psutil
import torch


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the memory in use on rank 0, in GB of 10^9 bytes; without `force` nothing, as in DeepSpeed.

    On an accelerator: allocated now, the most since the last print, reserved. For the host: this process.
    """
    if force:
        memory_status(message, print_rank=0, reset_max=True)


def memory_status(message: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """The same on rank `print_rank` (default: on all); with `reset_max` the peak is counted anew."""
    rank, held = int(os.environ.get("RANK", "0")), {"host": psutil.Process().memory_info().rss}
    if torch.cuda.is_available():
        held["allocated"], held["reserved"] = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        held["peak"] = torch.cuda.max_memory_allocated()
        if reset_max:
            torch.cuda.reset_peak_memory_stats()
    if print_rank in (-1, rank):
        said = ", ".join(f"{name} {count / 1e9:.2f} GB" for name, count in held.items())
        print(f"rank {rank}: {message}: {said}", flush=True)
