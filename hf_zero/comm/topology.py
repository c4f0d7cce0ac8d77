"""How data-parallel ranks are arranged in replicas, nodes and places inside a node: arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Link(Enum):
    """What lies between two ranks."""

    NODE = "inside a node"
    NET = "between nodes"

    __hash__ = object.__hash__  # each move is counted by link, and that of `Enum` is a function in Python


@dataclass(frozen=True, kw_only=True)
class Topology:
    """`replicas * nodes * local` ranks; rank = (replica * nodes + node) * local_size + local.

    A replica holds one whole copy of what is sharded; its ranks stand on `nodes` nodes, `local` of them on each.

    [Note: slice order] Of what a replica shards, local rank l on node m owns slice `l * nodes + m`. What the ranks of
    one column (equal l) own together is then one contiguous range, so that a move in two hops (first inside the node,
    then between nodes) works on contiguous ranges in place and needs no permuting copy.

    Raises ValueError for sizes below 1 and for a rank outside of the topology.
    """

    replicas: int = 1
    nodes: int = 1
    local: int = 1
    rank: int = 0
    machine: int = 0  # ranks on one machine, which decides what a link is; 0: all
    weights: tuple[float, ...] = ()  # shares of the ranks of a replica in the optimizer's state; none: equal ones

    def __post_init__(self) -> None:
        if min(self.replicas, self.nodes, self.local) < 1:
            raise ValueError(
                f"a topology needs sizes of at least 1, not {self.replicas} x {self.nodes} x {self.local}"
            )
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not one of {self.size} ranks")

    @classmethod
    def plain(cls, size: int, rank: int = 0) -> Topology:
        """All ranks near each other: one replica on one node."""
        return cls(local=size, rank=rank)

    @property
    def size(self) -> int:
        """All ranks."""
        return self.replicas * self.shards

    @property
    def shards(self) -> int:
        """Ranks that share one copy: the number of slices."""
        return self.nodes * self.local

    @property
    def share(self) -> tuple[float, float]:
        """This rank's share in the optimizer's state, and the sum of all shares in a replica."""
        return (self.weights[self.rank % self.shards], sum(self.weights)) if self.weights else (1, self.shards)

    def place_of(self, rank: int) -> tuple[int, int, int]:
        """(replica, node, local) of a rank."""
        inside = rank % self.shards
        return rank // self.shards, inside // self.local, inside % self.local

    def slice_of(self, rank: int) -> int:
        """The slice that a rank owns of what its replica shards (see [Note: slice order])."""
        _, node, local = self.place_of(rank)
        return local * self.nodes + node

    def link(self, one: int, other: int) -> Link:
        """What lies between two ranks."""
        machine = self.machine or self.size
        return Link.NODE if one // machine == other // machine else Link.NET

    @property
    def is_plain(self) -> bool:
        """Whether there is one group only: all ranks."""
        return self.replicas == self.nodes == 1

    def at(self, rank: int) -> Topology:
        """The same arrangement as another rank sees it."""
        return replace(self, rank=rank)

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's node, in order."""
        first = self.rank - self.place_of(self.rank)[2]
        return tuple(range(first, first + self.local))

    @property
    def column_ranks(self) -> tuple[int, ...]:
        """The ranks with this rank's place on every node of its replica, in order."""
        replica, _, local = self.place_of(self.rank)
        return tuple(replica * self.shards + node * self.local + local for node in range(self.nodes))

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's replica, in order."""
        first = self.rank - self.rank % self.shards
        return tuple(range(first, first + self.shards))

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """The ranks that own this rank's slice in every replica, in order."""
        return tuple(range(self.rank % self.shards, self.size, self.shards))
