"""What all transports over a torch.distributed process group share: sums of scalars, broadcasts, objects, barriers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm.gloo_threads import rest_at_exit
from hf_zero.comm.transport import Transport
from hf_zero.comm.work import Handle, Tag
from hf_zero.errors import ZeroRuntimeError


class GroupTransport(Transport):
    """Base of transports over process groups.

    Gathers and reductions have separate process groups: with NCCL the collectives of one group run one after another,
    and the next unit's gather must not wait for a reduction. The second group is made when it is needed, and
    transports of one group share it: with NCCL each costs device memory.
    """

    _reduce_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(self.ranks)
        rest_at_exit()  # whatever the backend: objects and tensors on CPU travel through gloo

    def split(self, groups: Sequence[Sequence[int]]) -> GroupTransport:
        backend = dist.get_backend(self.group)
        own = next(group for group in groups if self.rank in group)
        # All ranks make all groups; of some ranks only, each makes its own, as torch counts those that it is in.
        made = {
            tuple(group): self.new_group(backend, [self.ranks[rank] for rank in group])
            for group in (groups if self.is_of_all else [own])
        }
        return type(self)(made[tuple(own)])

    @property
    def is_of_all(self) -> bool:
        """Whether these are all ranks that there are."""
        return self.size == dist.get_world_size()

    def new_group(self, backend: str, ranks: list[int] | None = None) -> dist.ProcessGroup:
        """Another group of the same ranks, or some of them; a collective.

        Raises ZeroRuntimeError where they cannot make one.

        Ranks outside do not take part. Then torch names the group by how many groups a process is in, and ranks that
        disagree about the name would wait for each other.
        """
        if not self.is_of_all:
            joined = self.all_gather_object(len(dist.distributed_c10d._world.pg_names))
            if len(set(joined)) > 1:
                raise ZeroRuntimeError(
                    f"ranks {self.ranks} are in {joined} process groups, and torch can make another group of some "
                    "ranks only where these numbers are equal. Have each of them join equally many before hf_zero"
                )
        return dist.new_group(ranks or self.ranks, backend=backend, use_local_synchronization=not self.is_of_all)

    def prepare_reductions(self) -> None:
        if self.group not in self._reduce_groups:
            self._reduce_groups[self.group] = self.new_group(dist.get_backend(self.group))

    @property
    def reduce_group(self) -> dist.ProcessGroup:
        self.prepare_reductions()
        return self._reduce_groups[self.group]

    def all_reduce(self, flat: Tensor, tag: Tag) -> Handle:
        return dist.all_reduce(flat, group=self.reduce_group, async_op=True)

    def all_reduce_scalars(self, values: Tensor, largest: bool) -> None:
        dist.all_reduce(values, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        dist.broadcast(tensor, src=self.ranks[source], group=self.group)

    def all_gather_object(self, value: object) -> list:
        gathered: list = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def barrier(self) -> None:
        dist.barrier(group=self.group)


def receive_rooms(slices: list[Tensor], rank: int) -> list[Tensor]:
    """Where an all-to-all puts everybody's message for this rank; its own slice stays where it is."""
    return [torch.empty_like(slices[0]) if source != rank else own for source, own in enumerate(slices)]
