"""A communicator of any number of ranks in one process: it counts calls and bytes and moves nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_zero.comm.communicator import Communicator
from hf_zero.comm.transport.reads import CACHED
from hf_zero.comm.work import UNTAGGED, OnChunk, Tag, Work, wide


class PlannedCommunicator(Communicator):
    """Rank 0 of `world_size` imagined ranks; results have the right place and size, and no values.

    Args:
        backend: "gloo" or "nccl", which decides, with `deterministic`, what a reduction allocates.
        peer_memory: gloo's ranks are on one machine and read each other's memory.
        on_buffer: called with tensors that exist only for a collective.
    """

    def __init__(
        self,
        world_size: int,
        backend: str,
        *,
        deterministic: bool = False,
        peer_memory: bool = True,
        on_buffer: Callable[[Sequence[Tensor]], None] = len,
    ) -> None:
        self.deterministic, self.monitor = deterministic, None
        self.calls: Counter[str] = Counter()
        self.bytes_sent: Counter[str] = Counter()
        self.waited: Counter[str] = Counter()
        self.rank, self.world_size, self.backend = 0, world_size, backend
        self._reads_peers = peer_memory and backend == "gloo"
        self._on_buffer = on_buffer
        self._lent: Sequence[Tensor] = ()
        self._read: Sequence[Tensor] = ()  # room for what is read from a peer, and for the sum

    def prepare_reductions(self) -> None:
        """Nothing to prepare."""

    def reads_peers(self, device: torch.device) -> bool:
        return self._reads_peers

    def all_gather(self, flat: Tensor, what: Tag = UNTAGGED, rest: Sequence[Tensor] = ()) -> Work:
        if self.world_size > 1:
            self._count("all_gather", flat.nbytes // self.world_size * (self.world_size - 1))
        return Work()

    def settle(self, what: Tag | None = None) -> None:
        self._lent = ()
        if what is None:
            self._read = ()

    def reduce_scatter(self, parts: Sequence[Tensor], deliver: OnChunk, what: Tag = UNTAGGED) -> Work:
        if self.world_size == 1:
            return super().reduce_scatter(parts, deliver)
        numel = sum(part.numel() for part in parts) // self.world_size
        self._count("reduce_scatter", numel * parts[0].itemsize * (self.world_size - 1))
        held = self._received(parts[0], numel)
        self._on_buffer([*parts, *held])

        def finish(parts: Sequence[Tensor] = parts) -> None:
            if self._reads_peers:
                if not self._read:
                    dtypes = (parts[0].dtype, wide(parts[0].dtype))
                    self._read = [parts[0].new_empty(CACHED, dtype=dtype) for dtype in dtypes]
                    self._on_buffer(self._read)
                self._lent = parts  # until the others have read them, too
            room = self._read[-1] if self._reads_peers else held[0]
            for at in range(0, numel, room.numel()):
                deliver(at, room[: numel - at].to(wide(room.dtype)))

        return Work((), finish, beside=not self._reads_peers)

    def _received(self, sent: Tensor, numel: int) -> list[Tensor]:
        """Messages that are held until they are added up; peers' memory is read in small parts instead."""
        if self._reads_peers:
            return []
        one = self.backend == "nccl" and not self.deterministic and sent.dtype == torch.float32
        return [sent.new_empty(numel) for _ in range(1 if one else self.world_size - 1)]

    def all_reduce(self, parts: Sequence[Tensor], deliver: OnChunk, what: Tag = UNTAGGED) -> Work:
        if self.world_size == 1:
            return super().reduce_scatter(parts, deliver)
        (flat,) = parts
        self._count("all_reduce", 2 * flat.nbytes * (self.world_size - 1) // self.world_size)
        self._on_buffer([flat])
        return Work((), lambda: deliver(0, flat))

    def on_all_ranks(self, values: Tensor, largest: bool = False) -> Tensor:
        if self.world_size > 1:
            self._count("scalars", values.nbytes * (self.world_size - 1))
        return values

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        self._count("broadcast", tensor.nbytes)
        return tensor

    def all_gather_object(self, value: object) -> list:
        return [value] * self.world_size

    def barrier(self) -> None:
        """Nobody to wait for."""

    def meet(self, purpose: str, timeout_s: float) -> None:
        """Nobody to wait for."""
