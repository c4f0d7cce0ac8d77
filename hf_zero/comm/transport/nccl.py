"""Moves by the collectives of a process group on devices: NCCL, and whatever has NCCL's semantics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm.transport import Take
from hf_zero.comm.transport.group import GroupTransport, receive_rooms
from hf_zero.comm.work import Handle, Landing, Tag


class Nccl(GroupTransport):
    """Collectives run on the streams of their process groups; waiting makes the compute stream wait, not the host."""

    relays = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.name = dist.get_backend(group)
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())

    def gather(self, flat: Tensor, tag: Tag, shard: Sequence[Tensor]) -> Landing:
        numel = flat.numel() // self.size
        own = flat[self.rank * numel : (self.rank + 1) * numel]
        return Landing([_all_gather_single(flat, own, group=self.group, async_op=True)])

    def exchange(self, parts: Sequence[Tensor], numel: int, tag: Tag, take: Take) -> Landing:
        (flat,) = parts
        slices = list(flat.chunk(self.size))
        received = receive_rooms(slices, self.rank)
        handle = dist.all_to_all(received, slices, group=self.reduce_group, async_op=True)

        def finish(flat: Tensor = flat) -> None:  # `flat` stays referenced until the collective on its stream is over
            for rank, values in enumerate(received):
                take(rank, 0, values)

        return Landing([handle], finish)

    def hand_over(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: Tag) -> Landing:
        handle = dist.all_to_all(list(incoming), list(outgoing), group=self.group, async_op=True)

        def finish(outgoing: Sequence[Tensor] = outgoing) -> None:
            """`outgoing` stays referenced until the collective on its own stream is over."""

        return Landing([handle], finish)

    def sums(self, dtype: torch.dtype) -> bool:
        """NCCL sums in the dtype of the message."""
        return dtype == torch.float32

    def reduce_scatter(self, flat: Tensor, out: Tensor, tag: Tag) -> Handle:
        return _reduce_scatter_single(out, flat, group=self.reduce_group, async_op=True)


# torch 2.13 renamed both calls and warns at the old names; 2.11 and 2.12 know only the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
