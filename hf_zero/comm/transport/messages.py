"""Moves by point-to-point messages straight into their final place: gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm.transport import Take
from hf_zero.comm.transport.group import GroupTransport, receive_rooms
from hf_zero.comm.work import Landing, Tag


class Messages(GroupTransport):
    """gloo's own reduce-scatter is an all-reduce (twice the bytes): slices are exchanged instead, and summed here.

    Messages of different tags do not meet: ranks that diverge wait for each other instead of mixing up values.
    """

    name = "messages through gloo"

    def gather(self, flat: Tensor, tag: Tag, shard: Sequence[Tensor]) -> Landing:
        slices = list(flat.chunk(self.size))
        return self._swap([slices[self.rank]] * self.size, slices, self.group, tag)

    def exchange(self, parts: Sequence[Tensor], numel: int, tag: Tag, take: Take) -> Landing:
        (flat,) = parts
        slices = list(flat.chunk(self.size))
        received = receive_rooms(slices, self.rank)
        landing = self._swap(slices, received, self.reduce_group, tag)

        def finish(land: Callable[[], None] = landing.finish) -> None:
            land()
            for rank, values in enumerate(received):
                take(rank, 0, values)

        landing.finish = finish
        return landing

    def hand_over(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: Tag) -> Landing:
        return self._swap(outgoing, incoming, self.group, tag)

    def _swap(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group: dist.ProcessGroup, tag: Tag
    ) -> Landing:
        """Send outgoing[r] to every other rank r and receive its message into incoming[r], where there is one.

        Tensors on a device pass through the host, as gloo sends host memory only.
        """
        targets = incoming
        if incoming[0].device.type != "cpu":
            incoming = [torch.empty_like(tensor, device="cpu") for tensor in incoming]
            outgoing = [tensor.cpu() for tensor in outgoing]
        handles: list[dist.Work] = []
        for step in range(1, self.size):
            # Each step pairs the ranks differently, so that no rank is everybody's first target.
            source, target = (self.rank - step) % self.size, (self.rank + step) % self.size
            if incoming[source].numel():
                received = dist.irecv(incoming[source], src=self.ranks[source], group=group, tag=tag.number)
                assert received is not None, "this rank is one of the group's"
                handles.append(received)
            if outgoing[target].numel():
                sent = dist.isend(outgoing[target], dst=self.ranks[target], group=group, tag=tag.number)
                assert sent is not None, "this rank is one of the group's"
                handles.append(sent)

        def land() -> None:
            for rank, (target, source) in enumerate(zip(targets, incoming, strict=True)):
                if target is not source and rank != self.rank:
                    target.copy_(source)

        return Landing(handles, land)
