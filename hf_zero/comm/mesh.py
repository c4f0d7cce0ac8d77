"""The moves of sharded training over a topology: which communicators each of them goes through, hop by hop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_zero.comm.codec import Codec
from hf_zero.comm.communicator import Communicator
from hf_zero.comm.meter import Meter, Quantised
from hf_zero.comm.topology import Link, Topology
from hf_zero.comm.work import OnChunk, Route, Tag, Work, wide


class Mesh:
    """The communicators of one topology. On the plain topology all moves go over `world`.

    Attributes:
        world: all data-parallel ranks: agreement, checkpoints.
        shards: the ranks of one replica, which share one copy of what is sharded: norms.
        node: the ranks of one node.
        column: the ranks with one place on every node of a replica; None where a replica is on one node.
        replicas: the ranks that own one slice; None for one replica.
        topology: how the ranks are arranged.
        hops: how many a sum over all ranks takes to its owners.
        weights, gradients: how they are quantised, if they are: weights between nodes (on one node: in every gather),
            gradients between nodes (on one node: wherever they are sent).
        block: elements of which slices are to be made up.
        meter: measures the error of quantised messages.
    """

    def __init__(
        self, world: Communicator, topology: Topology | None = None, quantised: Sequence[Quantised] = ()
    ) -> None:
        self.world = world
        self.meter = Meter(list(quantised))
        kinds = {each.kind: each for each in quantised}
        self.weights, self.gradients = kinds.get("weights"), kinds.get("gradients")
        self.block = max([each.codec.block for each in quantised if each.codec is not None], default=1)
        self.topology = topology = topology or Topology.plain(world.world_size, world.rank)
        self.node = self.shards = world
        self.column: Communicator | None = None
        self.replicas: Communicator | None = None
        self.hops = 1 + (topology.nodes > 1) + (topology.replicas > 1)
        world.near = self._near(range(topology.size))
        if topology.is_plain:
            return
        # Every rank makes all groups, in one order. The first moves need the nearest ranks.
        self.node = self._split(lambda place: place.node_ranks, "inside the node")
        if topology.nodes > 1:
            self.column = self._split(lambda place: place.column_ranks, "between nodes")
        if topology.replicas > 1:
            self.replicas = self._split(lambda place: place.replica_ranks, "between replicas")
        self.shards = self.node
        if topology.nodes > 1:
            both = topology.replicas > 1
            self.shards = self._split(lambda place: place.shard_ranks, "of the replica") if both else world

    def _split(self, ranks_of: Callable[[Topology], tuple[int, ...]], where: str) -> Communicator:
        groups = dict.fromkeys(ranks_of(self.topology.at(rank)) for rank in range(self.topology.size))
        return self.world.split(list(groups), near=self._near(ranks_of(self.topology)), where=where)

    def _near(self, ranks: Sequence[int]) -> int:
        """How many others of some ranks are on this rank's machine."""
        own = self.topology.rank
        return sum(self.topology.link(own, rank) is Link.NODE for rank in ranks if rank != own)

    @property
    def takes_parts(self) -> bool:
        """Whether `scatter` reads tensors where they lie; otherwise it is given one flat tensor."""
        return self.node.takes_parts

    # -- values: from their owners to those who use them --------------------------------------------------------------

    def gather(self, flat: Tensor, tag: Tag, shard: Sequence[Tensor]) -> Work:
        """From one slice on each rank of a node to the whole on every rank: see `Communicator.all_gather`."""
        return self.node.all_gather(flat, tag, shard)

    def refresh(self, node_slice: Tensor, tag: Tag) -> Work:
        """From the slices of this column's owners to the node's slice, which lies whole on each of them: in place."""
        assert self.column is not None
        return self.column.all_gather(node_slice, tag)

    def gather_quantised(self, flat: Tensor, tag: Tag) -> Work:
        """As `gather` on the plain topology, by what the codec makes of the slices."""
        assert self.topology.is_plain and self.weights is not None and self.weights.codec is not None
        own = flat.chunk(self.world.world_size)[self.world.rank]
        return self.world.gather_quantised(own, flat, tag, self.weights.codec, self._watch_weights)

    def quantise(self, own: Tensor) -> None:
        """Make flat values, in place, what other ranks get of them by `gather_quantised`."""
        assert self.weights is not None and self.weights.codec is not None
        payload = own.new_empty(self.weights.codec.nbytes(own.numel()), dtype=torch.uint8)
        self.weights.codec.encode(own, payload)
        self.weights.codec.decode(payload, own)

    def refresh_by(self, changes: Tensor, node_slice: Tensor, tag: Tag) -> Work:
        """As `refresh`, by adding quantised changes of the own slice, and those of the others, to `node_slice`."""
        assert self.column is not None and self.weights is not None and self.weights.codec is not None
        codec = self.weights.codec
        return self.column.gather_quantised(changes, node_slice, tag, codec, self._watch_weights, add=True)

    def _watch_weights(self, codec: Codec, values: Tensor, payload: Tensor) -> None:
        self.meter.watch("weights", codec, values, payload)

    def _watch_gradients(self, codec: Codec, values: Tensor, payload: Tensor) -> None:
        self.meter.watch("gradients", codec, values, payload)

    def gather_all(self, flat: Tensor, tag: Tag, shard: Sequence[Tensor]) -> Work:
        """From one slice on each owner to the whole on every rank, in place, whatever the number of nodes."""
        if self.column is None:
            return self.gather(flat, tag, shard)
        node_slice = flat.chunk(self.topology.local)[self.node.rank]
        return Route(self.refresh(node_slice, tag), functools.partial(self.gather, flat, tag, ()))

    # -- sums: from everybody to the owners --------------------------------------------------------------------------

    def scatter(self, parts: Sequence[Tensor], on_chunk: OnChunk, tag: Tag) -> Work:
        """From a sum of each rank's own to one slice of the sum over a node: see `Communicator.reduce_scatter`."""
        if self.column is None and not self.node.takes_parts:
            return self._reduce_scatter(self.node, parts[0], on_chunk, tag)
        return self.node.reduce_scatter(parts, on_chunk, tag)

    def _reduce_scatter(self, comm: Communicator, flat: Tensor, on_chunk: OnChunk, tag: Tag) -> Work:
        codec = None if self.gradients is None else self.gradients.codec
        if codec is None:
            return comm.reduce_scatter([flat], on_chunk, tag)
        return comm.reduce_scatter_quantised(flat, on_chunk, tag, codec, self._watch_gradients)

    def scatter_on(self, node_slice: Tensor, on_chunk: OnChunk, tag: Tag) -> Work:
        """From the node's sums of its slice to the owner's slice of the sum over all ranks.

        `node_slice` is what `scatter` has given to this rank; it belongs to the move from here on.
        """
        if self.column is None:
            return self._over_replicas(node_slice, on_chunk, tag)
        if self.replicas is None:
            return self._reduce_scatter(self.column, node_slice, on_chunk, tag)
        own = torch.empty_like(node_slice.chunk(self.topology.nodes)[0])

        def keep(at: int, values: Tensor) -> None:
            own[at : at + values.numel()] = values

        first = self.column.reduce_scatter([node_slice], keep, tag)
        return Route(first, functools.partial(self._over_replicas, own, on_chunk, tag))

    def _over_replicas(self, own: Tensor, on_chunk: OnChunk, tag: Tag) -> Work:
        assert self.replicas is not None
        return self.replicas.all_reduce([own], on_chunk, tag)

    def reduce(self, parts: Sequence[Tensor], on_chunk: OnChunk, tag: Tag) -> Work:
        """From a sum of each rank's own to the whole sum over ranks: see `Communicator.all_reduce`."""
        return self.world.all_reduce(parts, on_chunk, tag)

    def fence(self, tag: Tag | None = None) -> None:
        """Block until no peer reads what this rank keeps for the gathers called `tag` (None: for all)."""
        self.node.fence(tag)

    def prepare_reductions(self) -> None:
        """Make what sums need, while all ranks are at the same point; a collective the first time."""
        for comm in self._communicators:
            comm.prepare_reductions()

    def close(self) -> None:
        """End the watching of all communicators, and give back what connects the ranks."""
        for comm in self._communicators:
            comm.close()

    @property
    def _communicators(self) -> list[Communicator]:
        found = [self.world, self.node, self.shards, self.column, self.replicas]
        return list(dict.fromkeys(comm for comm in found if comm is not None))


class NodeSum:
    """Sums over the ranks of a node, of the part that this rank takes further: they wait for the hops between nodes.

    Micro-batches may be added up here, so that only their sum leaves the node.

    Attributes:
        values: the sums (flat, fp32 at least), if something was added and not taken.
    """

    def __init__(self, numel: int) -> None:
        self._numel = numel
        self.values: Tensor | None = None
        self._filled = 0  # elements that hold a value of this window

    def add(self, at: int, values: Tensor) -> None:
        """Add the sums of elements from `at` on. The first reduction brings all, in order, and writes."""
        if self.values is None:
            self.values = values.new_empty(self._numel, dtype=wide(values.dtype))
            self._filled = 0
        target = self.values[at : at + values.numel()]
        if at >= self._filled:
            target.copy_(values)
            self._filled = at + values.numel()
        else:
            target.add_(values)

    def take(self) -> Tensor:
        """The sums, which are no longer here."""
        assert self.values is not None and self._filled == self._numel
        values, self.values = self.values, None
        return values
