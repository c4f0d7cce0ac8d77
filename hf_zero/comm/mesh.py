"""The moves of sharded training over a topology: which communicator each of them goes through."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hf_zero.comm.communicator import Communicator
from hf_zero.comm.topology import Topology
from hf_zero.comm.work import OnChunk, Tag, Work


class Mesh:
    """The communicators of one topology. On the plain topology all moves go over `world`.

    Attributes:
        world: all data-parallel ranks: norms, agreement, checkpoints.
        topology: how they are arranged.
    """

    def __init__(self, world: Communicator) -> None:
        self.world = world
        self.topology = Topology.plain(world.world_size, world.rank)

    def gather(self, flat: Tensor, tag: Tag, shard: Sequence[Tensor]) -> Work:
        """From one slice on each rank to the whole on every rank: see `Communicator.all_gather`."""
        return self.world.all_gather(flat, tag, shard)

    def scatter(self, parts: Sequence[Tensor], on_chunk: OnChunk, tag: Tag) -> Work:
        """From a sum of each rank's own to one slice of the sum over ranks: see `Communicator.reduce_scatter`."""
        return self.world.reduce_scatter(parts, on_chunk, tag)

    def reduce(self, parts: Sequence[Tensor], on_chunk: OnChunk, tag: Tag) -> Work:
        """From a sum of each rank's own to the whole sum over ranks: see `Communicator.all_reduce`."""
        return self.world.all_reduce(parts, on_chunk, tag)

    def fence(self, tag: Tag) -> None:
        """Block until no peer reads what this rank keeps for the gathers called `tag`."""
        self.world.fence(tag)
