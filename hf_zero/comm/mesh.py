"""The moves of sharded training over a topology: which communicators each of them goes through, hop by hop."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_zero.comm.codec import Codec
from hf_zero.comm.communicator import Communicator
from hf_zero.comm.meter import Quantised
from hf_zero.comm.topology import Link, Topology
from hf_zero.comm.work import Landing, OnChunk, Route, Tag, Work, wide


class Mesh:
    """The communicators of one topology. On the plain topology all moves go over `world`.

    Attributes:
        world: all data-parallel ranks.
        everyone: these and the tensor-parallel ranks: agreement, checkpoints.
        tensor: the ranks that share out the computation of one micro-batch, with other parts of its weights; None
            where each rank computes all of it.
        shards: the ranks of one replica, which share one copy of what is sharded: norms.
        node: the ranks of one node.
        column: the ranks with one place on every node of a replica; None where a replica is on one node.
        replicas: the ranks that own one slice; None for one replica.
        topology: how the ranks are arranged.
        hops: how many a sum over all ranks takes to its owners.
        weights, gradients: how they are quantised, if they are: weights between nodes (on one node: in every gather),
            gradients between nodes and between replicas (on one node: wherever they are sent).
        frozen: the codec of weights that are never trained, which rest and are sent as payloads; None: as they are.
        block: elements of which slices are to be made up.
        cuts: so many equal parts of whole blocks are to make up each slice.
        quantised: what of both there is.
    """

    def __init__(
        self,
        world: Communicator,
        topology: Topology | None = None,
        quantised: Sequence[Quantised] = (),
        frozen: Codec | None = None,
        *,
        tensor: Communicator | None = None,
        everyone: Communicator | None = None,
    ) -> None:
        self.world, self.tensor, self.everyone = world, tensor, everyone or world
        self.quantised = list(quantised)
        kinds = {each.kind: each for each in quantised}
        self.weights, self.gradients = kinds.get("weights"), kinds.get("gradients")
        self.frozen = frozen
        codecs = [codec for codec in (frozen, *(each.codec for each in quantised)) if codec is not None]
        self.block = math.lcm(*(codec.block for codec in codecs))
        self.topology = topology = topology or Topology.plain(world.world_size, world.rank)
        self.cuts = topology.replicas if self.gradients is not None else 1
        self.node = self.shards = world
        self.column: Communicator | None = None
        self.replicas: Communicator | None = None
        self.hops = 1 + (topology.nodes > 1)
        if topology.replicas > 1:
            self.hops += 1 if self.gradients is None else 2  # one all-reduce, or sums of parts and then all parts
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

    def of_sequences(self, size: int) -> tuple[Communicator, tuple[bool, ...]]:
        """The `size` ranks that share each sequence, this one's, and which of them are far away; a collective.

        They are neighbours, as their exchanges are larger and more frequent than any others.
        """
        first = self.topology.rank - self.topology.rank % size
        ranks = range(first, first + size)
        comm = self._split(
            lambda place: tuple(range(start := place.rank - place.rank % size, start + size)), "of a sequence"
        )
        return comm, tuple(self.topology.link(self.topology.rank, rank) is Link.NET for rank in ranks)

    def _near(self, ranks: Sequence[int]) -> int:
        """How many others of some ranks are on this rank's machine."""
        own = self.topology.rank
        return sum(self.topology.link(own, rank) is Link.NODE for rank in ranks if rank != own)

    @property
    def quantises_weights(self) -> bool:
        """Whether weights are sent by a codec, as things are."""
        return self.weights is not None and self.weights.codec is not None

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
        """As `gather` where a replica has one node, by what the codec makes of the slices."""
        assert self.column is None and self.weights is not None
        return self.node.gather_quantised(self.node_part(flat), flat, tag, self.weights)

    def gather_frozen(self, payload: Tensor, flat: Tensor, tag: Tag) -> Work:
        """As `gather`, of slices that rest as payloads."""
        assert self.frozen is not None
        return self.node.gather_payloads(payload, flat, tag, self.frozen)

    def quantise(self, own: Tensor) -> None:
        """Make flat values, in place, what other ranks get of them by `gather_quantised`."""
        assert self.weights is not None and self.weights.codec is not None
        self.weights.codec.decode(self.weights.codec.pack(own), own)

    def refresh_by(self, changes: Tensor, node_slice: Tensor, tag: Tag) -> Work:
        """As `refresh`, by adding quantised changes of the own slice, and those of the others, to `node_slice`."""
        assert self.column is not None and self.weights is not None
        return self.column.gather_quantised(changes, node_slice, tag, self.weights, add=True)

    def node_part(self, flat: Tensor) -> Tensor:
        """The part of a whole flat tensor that this rank gives to its node (see [Note: slice order])."""
        return flat.chunk(self.topology.local)[self.node.rank]

    def gather_all(self, flat: Tensor, tag: Tag, shard: Sequence[Tensor]) -> Work:
        """From one slice on each owner to the whole on every rank, in place, whatever the number of nodes."""
        if self.column is None:
            return self.gather(flat, tag, shard)
        return Route(self.refresh(self.node_part(flat), tag), functools.partial(self.gather, flat, tag, ()))

    # -- sums: from everybody to the owners --------------------------------------------------------------------------

    def scatter(self, parts: Sequence[Tensor], on_chunk: OnChunk, tag: Tag) -> Work:
        """From a sum of each rank's own to one slice of the sum over a node: see `Communicator.reduce_scatter`."""
        if self.hops > 1 or self.node.takes_parts or self._quantised_gradients is None:
            return self.node.reduce_scatter(parts, on_chunk, tag)
        return self.node.reduce_scatter_quantised(parts[0], on_chunk, tag, self._quantised_gradients)

    @property
    def _quantised_gradients(self) -> Quantised | None:
        return self.gradients if self.gradients is not None and self.gradients.codec is not None else None

    def _reduce_scatter(self, comm: Communicator, flat: Tensor, on_chunk: OnChunk, tag: Tag) -> Work:
        """The first hop that leaves the node."""
        quantised = self._quantised_gradients
        if quantised is None:
            return comm.reduce_scatter([flat], on_chunk, tag)
        return comm.reduce_scatter_quantised(flat, on_chunk, tag, quantised, quantised.feedback)

    def scatter_on(self, node_slice: Tensor, on_chunk: OnChunk, tag: Tag) -> Work:
        """From the node's sums of its slice to the owner's slice of the sum over all ranks.

        `node_slice` is what `scatter` has given to this rank; it belongs to the move from here on.
        """
        if self.column is None:
            return self._over_replicas(node_slice, on_chunk, tag)
        if self.replicas is None:
            return self._reduce_scatter(self.column, node_slice, on_chunk, tag)
        own = torch.empty_like(node_slice.chunk(self.topology.nodes)[0])
        first = self._reduce_scatter(self.column, node_slice, functools.partial(_put, own), tag)
        return Route(first, functools.partial(self._over_replicas, own, on_chunk, tag))

    def _over_replicas(self, own: Tensor, on_chunk: OnChunk, tag: Tag) -> Work:
        """Quantised: sums of one part each, and then all parts, for which sums are quantised once more."""
        assert self.replicas is not None
        quantised = self._quantised_gradients
        if quantised is None:
            return self.replicas.all_reduce([own], on_chunk, tag)
        part = torch.empty_like(own.chunk(self.topology.replicas)[0])
        return Route(
            self._reduce_scatter(self.replicas, own, functools.partial(_put, part), tag),
            functools.partial(self.replicas.gather_quantised, part, own, tag, quantised),
            lambda: Work(Landing(finish=functools.partial(on_chunk, 0, own))),
        )

    def reduce(self, parts: Sequence[Tensor], on_chunk: OnChunk, tag: Tag) -> Work:
        """From a sum of each rank's own to the whole sum over ranks: see `Communicator.all_reduce`."""
        return self.world.all_reduce(parts, on_chunk, tag)

    # -- whole matrices: between the slices of a replica and the owners in it ----------------------------------------

    def hand_over(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: Tag) -> Work:
        """Between all ranks of the replica, by their numbers in `shards`: see `Communicator.hand_over`."""
        topology = self.topology
        far = [
            tensor.nbytes
            for rank, tensor in zip(topology.shard_ranks, outgoing, strict=True)
            if topology.link(topology.rank, rank) is Link.NET
        ]
        return self.shards.hand_over(outgoing, incoming, tag, far=sum(far))

    def fence(self, tag: Tag | None = None) -> None:
        """Block until no peer reads what this rank keeps for the gathers called `tag` (None: for all)."""
        self.node.fence(tag)

    @property
    def errors(self) -> list[Tensor]:
        """What is kept of the errors of earlier sums."""
        return [] if self.gradients is None or self.gradients.feedback is None else self.gradients.feedback.held

    def forget_errors(self) -> None:
        """Have later sums compensate nothing of earlier ones, as those of a run that is resumed."""
        if self.gradients is not None and self.gradients.feedback is not None:
            self.gradients.feedback.forget()

    def prepare_reductions(self) -> None:
        """Make what sums need, while all ranks are at the same point; a collective the first time."""
        for comm in self._communicators:
            comm.prepare_reductions()

    def close(self) -> None:
        """End the watching of all communicators, and give back what connects the ranks."""
        for comm in (*self._communicators, self.everyone):
            comm.close()

    @property
    def _communicators(self) -> list[Communicator]:
        found = [self.world, self.node, self.shards, self.column, self.replicas]
        return list(dict.fromkeys(comm for comm in found if comm is not None))


def _put(target: Tensor, at: int, values: Tensor) -> None:
    target[at : at + values.numel()] = values


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
