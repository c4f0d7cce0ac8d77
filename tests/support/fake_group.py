"""One process as a rank of torch's fake process group: the code path of NCCL at any number of ranks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode


@contextlib.contextmanager
def fake_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be rank `rank` of `world_size` inside; in a process of its own (`@distributed(world_size=1)`).

    Each rank's part of a gather is this rank's, and a reduction is this rank's own part.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Dispatched(TorchDispatchMode):
    """Counts operations inside; of collectives also the bytes that are passed in."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = self.collectives if func.namespace == "c10d" else self.operations
        kind[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
