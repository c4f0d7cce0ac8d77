"""A communicator of any number of ranks in one process: it counts calls and bytes and moves nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from hf_zero.comm import NAMELESS, Communicator, Message, Pending


class PlannedCommunicator(Communicator):
    """Rank 0 of `world_size` imagined ranks; results have the right place and size, and no values.

    Args:
        backend: "gloo" or "nccl", which decides, with `deterministic`, what a reduction allocates.
        on_buffer: called with tensors that exist only for a collective.
    """

    def __init__(
        self,
        world_size: int,
        backend: str,
        *,
        deterministic: bool = True,
        on_buffer: Callable[[list[Tensor]], None] = len,
    ) -> None:
        self.deterministic, self.monitor = deterministic, None
        self.calls: Counter[str] = Counter()
        self.bytes_sent: Counter[str] = Counter()
        self.waited: Counter[str] = Counter()
        self.rank, self.world_size, self.backend = 0, world_size, backend
        self.deterministic, self.monitor = False, None
        self._on_buffer = on_buffer

    def all_gather(self, flat: Tensor, what: Message = NAMELESS) -> Pending:
        if self.world_size > 1:
            self._count("all_gather", flat.nbytes // self.world_size * (self.world_size - 1))
        return Pending([], lambda: flat)

    def reduce_scatter(self, flat: Tensor, what: Message = NAMELESS) -> Pending:
        if self.world_size == 1:
            return super().reduce_scatter(flat)
        own, *others = flat.chunk(self.world_size)
        self._count("reduce_scatter", own.nbytes * (self.world_size - 1))
        if self.backend == "nccl" and not self.deterministic and flat.dtype == torch.float32:
            received = [torch.empty_like(own)]
        else:  # a message from every other rank, and the sum in fp32
            received = [own, *(torch.empty_like(other) for other in others)]
        self._on_buffer([flat, *received])
        wide = torch.promote_types(flat.dtype, torch.float32)
        return Pending([], lambda: received[0].to(wide))

    def all_reduce(self, flat: Tensor, what: Message = NAMELESS) -> Pending:
        if self.world_size > 1:
            self._count("all_reduce", 2 * flat.nbytes * (self.world_size - 1) // self.world_size)
            self._on_buffer([flat])
        return Pending([], lambda: flat)

    def agree(self, values: Tensor, largest: bool = False) -> Tensor:
        if self.world_size > 1:
            self._count("scalars", values.nbytes * (self.world_size - 1))
        return values

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor

    def all_gather_object(self, value: object) -> list:
        return [value] * self.world_size

    def barrier(self) -> None:
        """Nobody to wait for."""

    def meet(self, purpose: str, timeout_s: float) -> None:
        """Nobody to wait for."""
