"""Process groups of torch: how a process becomes a rank, and what its launcher says about its place."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int, set[int]]:
    """(number of ranks, this rank, numbers of ranks on their machines, if known) of a process group; a collective."""
    if not dist.is_initialized():
        return 1, 0, set()
    size = dist.get_world_size(group)
    machines: list[int] = [0] * size
    dist.all_gather_object(machines, int(os.environ.get("LOCAL_WORLD_SIZE", 0)), group=group)
    return size, dist.get_rank(group), set(machines) - {0}


def global_ranks(group: dist.ProcessGroup | None, numbers: Iterable[int]) -> tuple[int, ...]:
    """The numbers in the default group of ranks of a process group."""
    return tuple(number if group is None else dist.get_global_rank(group, number) for number in numbers)


def named_mesh(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """torch's mesh of all ranks, by the names of its dimensions; neighbours differ in the last one. A collective."""
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@contextlib.contextmanager
def imagined_mesh(size: int) -> Iterator[DeviceMesh]:
    """Rank 0 of a mesh "tp" of `size` ranks that do not exist, whose collectives change nothing: for the planner.

    Raises ValueError in a process that is a rank already: torch has one default group.
    """
    if dist.is_initialized():
        raise ValueError("this process is one of several ranks already, and imagines no others")
    hook = sys.excepthook  # torch puts one in its place that names ranks
    dist.init_process_group("fake", rank=0, world_size=size)
    sys.excepthook = hook
    try:
        yield named_mesh("cpu", {"tp": size})
    finally:
        dist.destroy_process_group()


def join(backend: str, store: Path, rank: int, world_size: int) -> None:
    """Make this process a rank of a new default group, whose ranks meet in a file."""
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)


def join_launched(backend: str) -> None:
    """Make this process a rank of the default group that its launcher describes in the environment."""
    dist.init_process_group(backend)


def store_of_ranks(timeout: timedelta) -> dist.Store:
    """A key-value store that all ranks reach: torchrun's own, which outlives ranks, else the process group's.

    Raises ValueError where there is neither, and RuntimeError where it cannot be reached within `timeout`.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return dist.distributed_c10d._get_default_store()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
