"""A set of parameters in one storage, this rank's part of them at rest, and the moves between the two."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from hf_zero.comm.mesh import Mesh, NodeSum
from hf_zero.comm.topology import Topology
from hf_zero.comm.work import UNTAGGED, Route, Tag, Work
from hf_zero.core import deferred, guard
from hf_zero.core.heap import heap
from hf_zero.core.layout import ALIGNMENT_BYTES, FlatLayout
from hf_zero.core.master import MasterShard
from hf_zero.core.placement import MOVES, Extent, Move, Placement, Placements


class FlatBuffer:
    """Parameters of one dtype and one `requires_grad`, lying end to end in the storage of `unsharded`.

    Every parameter is a view of `unsharded`, forever: autograd saves views of the same storage, so unsharding must
    bring the values back to the place where forward saw them. Released means that the storage has zero bytes; the
    views keep their shapes.

    At rest a rank keeps `[begin, end)` of the range: in fp32 masters where the parameters are trained
    (`master_shards`), in `frozen_shard` where they are frozen and sharded, and nowhere but in `unsharded` where they
    are frozen and replicated.

    [Note: node slice] Where parameters are sharded over each node, and their masters over all nodes, a rank also
    keeps `node_slice`: its share of the node's weights in their own dtype, of which `[begin, end)` is a part. Gathers
    take it from there and stay inside the node; `refresh` brings it up to date after a step.

    The constructor only lays out; `distribute` takes the values over, on all ranks.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        *,
        dtype: torch.dtype,
        trainable: bool,
        placements: Placements,
        mesh: Mesh,
        device: torch.device,
        rest_dtype: torch.dtype | None = None,
        tag: Tag = UNTAGGED,
    ) -> None:
        self.tag = tag
        self.names, self.params = list(names), list(params)
        self.dtype, self.trainable = dtype, trainable
        self.mesh, self.comm, self.device = mesh, mesh.world, device
        self.sharded = placements.parameter is Placement.SHARDED
        self.at_rest = placements.at_rest(trainable)  # how the exact values are placed
        self.layout = FlatLayout(
            [p.shape for p in params], mesh.topology.shards, max(1, ALIGNMENT_BYTES // dtype.itemsize)
        )
        by_node = self.sharded and mesh.column is not None
        assert not by_node or placements.parameter_extent is Extent.NODE, "gathers have one hop"
        node = node_bounds(self.layout, mesh.topology)
        self.begin, self.end = 0, self.layout.padded_numel
        if self.owns_slice:
            own = self.layout.slice_bounds(mesh.topology.slice_of(mesh.topology.rank))
            self.begin, self.end = node if by_node and not trainable else own
        self.node_bounds = node if by_node else None  # of this rank's share of sharded parameters, if not [begin, end)
        self.node_slice: Tensor | None = None
        # Gradients that have come as far as the node and no further.
        self.node_sum = NodeSum(node[1] - node[0]) if mesh.hops > 1 and self.owns_slice else None
        self.master_shards: list[MasterShard] = []
        self.frozen_shard: Tensor | None = None
        self._rest_dtype = rest_dtype or dtype
        self._versions: list[int] = []
        self.original_dtype = params[0].dtype

    # -- construction -------------------------------------------------------------------------------------------

    def distribute(self) -> None:
        """Take over the values of the parameters, as they are on rank 0, and make the parameters views; a collective.

        No collective where every parameter is sharded and can be read in slices.
        """
        device = self.device
        sources = [deferred.take(param) for param in self.params]
        if self.sharded and None not in sources:
            owned = self._read_slice(sources, device)
            self.unsharded = torch.empty(self.layout.padded_numel, dtype=self.dtype, device=device)
        else:
            values = torch.zeros(self.layout.padded_numel, dtype=self.original_dtype, device=device)
            for param, source, view in zip(self.params, sources, self.views(values), strict=True):
                if source is None:
                    view.copy_(param.detach())
                else:
                    source.read(0, view.view(-1))
            self.comm.broadcast(values)
            owned = values[self.begin : self.end]
            self.unsharded = values.to(self.dtype)
        if self.trainable:
            self.master_shards = [self.new_master(0, owned.numel())]
            self.master_shards[0].values.copy_(owned)
        elif self.sharded:
            self.frozen_shard = owned.to(self._rest_dtype, copy=True)
        freed = owned.nbytes
        del owned
        self._renew_node_slice()
        self._point_parameters()
        if self.sharded:
            self.release()
            heap.has_freed(freed)

    def _read_slice(self, sources: Sequence[deferred.Source], device: torch.device) -> Tensor:
        """This rank's slice of parameters whose values are still in files."""
        owned = torch.zeros(self.end - self.begin, dtype=self.original_dtype, device=device)
        for span in self.layout.spans(self.begin, self.end):
            sources[span.index].read(span.start, owned[span.offset : span.offset + span.numel])
        return owned

    def _renew_node_slice(self) -> None:
        """Make the node's slice of trained parameters from masters, in the present dtype; a collective."""
        if self.trainable and self.node_bounds is not None:
            low, high = self.node_bounds
            self.node_slice = torch.empty(high - low, dtype=self.dtype, device=self.device)
            self.refresh().wait()

    def new_master(self, start: int, stop: int) -> MasterShard:
        """A master of zeros for elements [start, stop), counted from `begin`."""
        return MasterShard(self.layout, self.begin, start, stop, self.master_dtype, self.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of `flat`, laid out as the buffer is, one per parameter."""
        layout = self.layout
        spans = zip(layout.offsets, layout.numels, layout.shapes, strict=True)
        return [flat[offset : offset + numel].view(shape) for offset, numel, shape in spans]

    def _point_parameters(self) -> None:
        for param, view in zip(self.params, self.views(self.unsharded), strict=True):
            guard.point_to(param, view)
        self._note_versions()

    @property
    def owns_slice(self) -> bool:
        """Whether what rests here is one slice of it; otherwise every rank keeps the same."""
        return self.at_rest is Placement.SHARDED

    @property
    def kept_weights(self) -> list[Tensor]:
        """What rests here of weights besides `unsharded` and masters."""
        return [tensor for tensor in (self.frozen_shard, self.node_slice) if tensor is not None]

    @property
    def is_first_owner(self) -> bool:
        """Whether this rank is the first of those that keep the same exact values at rest."""
        topology = self.mesh.topology
        replica, node, _ = topology.place_of(topology.rank)
        if not self.owns_slice:
            return topology.rank == 0
        return replica == 0 and (node == 0 or self.trainable or self.node_bounds is None)

    @property
    def master_dtype(self) -> torch.dtype:
        return torch.promote_types(self.original_dtype, torch.float32)

    def index_of(self, param: nn.Parameter) -> int | None:
        return next((index for index, own in enumerate(self.params) if own is param), None)

    def name_of(self, param: nn.Parameter) -> str:
        index = self.index_of(param)
        assert index is not None
        return self.names[index]

    # -- storage ------------------------------------------------------------------------------------------------

    @property
    def local_slice(self) -> Tensor:
        """This rank's part of `unsharded`."""
        return self.unsharded[self.begin : self.end]

    def release(self) -> None:
        """Give the bytes back and keep the storage object."""
        self.unsharded.untyped_storage().resize_(0)

    def abandon(self) -> None:
        """Leave the present storage to whoever holds views of it, and go on with a new, released one.

        After a read from outside a module the user may hold aliases (`weight.detach()`, a state dict) that must stay
        valid: freeing their bytes would crash the process at the next read.
        """
        with torch.inference_mode(False):  # an inference tensor could not be trained afterwards
            self.unsharded = torch.empty(self.layout.padded_numel, dtype=self.dtype, device=self.device)
            self._point_parameters()
        self.release()

    def allocate(self) -> None:
        self.unsharded.untyped_storage().resize_(self.unsharded.numel() * self.unsharded.itemsize)

    def check_conversion(self, sample: Tensor) -> None:
        """Raises ValueError where parameters cannot become what a tensor of them has become."""
        if (
            sample.device != self.unsharded.device
            or torch.promote_types(sample.dtype, self.master_dtype) != self.master_dtype
        ):
            raise ValueError(
                f"cannot make a prepared parameter of {self.dtype} on {self.device} one of {sample.dtype} on "
                f"{sample.device}: hf_zero owns its storage, and its master is one of {self.master_dtype}. Convert or "
                "move the model before it is prepared"
            )

    def cast(self, dtype: torch.dtype) -> None:
        """Have the values in `dtype` from here on, made from what is kept at rest; a collective."""
        self.dtype = dtype
        if self.local_shard():
            self.unsharded = torch.empty(self.layout.padded_numel, dtype=dtype, device=self.unsharded.device)
            self._renew_node_slice()
            if not self.sharded:
                self.gather().wait()
                self.mesh.fence(self.tag)
        else:
            self.unsharded = self.unsharded.to(dtype)
        self._point_parameters()
        if self.sharded:
            self.release()

    def detach_parameters(self) -> None:
        """Give each parameter a tensor of its own, in the dtype it came with; a collective."""
        if self.local_shard() and self.original_dtype != self.dtype:
            self.dtype = self.original_dtype
            self.unsharded = torch.empty(self.layout.padded_numel, dtype=self.dtype, device=self.device)
            self._renew_node_slice()
            self.gather().wait()
        for param, view in zip(self.params, self.views(self.unsharded), strict=True):
            guard.point_to(param, view.clone())

    # -- moves --------------------------------------------------------------------------------------------------

    def local_shard(self) -> list[tuple[int, int, Tensor]]:
        """(start, stop, values) of what this rank keeps at rest, positions counted from `begin`."""
        if self.frozen_shard is not None:
            return [(0, self.end - self.begin, self.frozen_shard)]
        return [(shard.start, shard.stop, shard.values) for shard in self.master_shards]

    def gather(self) -> Work:
        """Bring `unsharded` up to date from what every rank keeps at rest (sharded or changed by a step)."""
        if not self.layout.padded_numel:  # nothing but parameters of no elements
            return Work()
        if self.node_slice is not None:
            low, high = self.node_bounds
            self.unsharded[low:high].copy_(self.node_slice)
            return self.mesh.gather(self.unsharded, self.tag, [self.node_slice])
        rest, own = self.local_shard(), self.local_slice
        _cast(rest, own)
        if MOVES[self.at_rest, Placement.REPLICATED] is Move.ALL_GATHER:
            # A replicated buffer keeps what it has sent: whoever changes it settles first.
            kept = [values for _, _, values in rest] if self.sharded else [own]
            move = self.mesh.gather if self.sharded else self.mesh.gather_all
            return move(self.unsharded, self.tag, kept)
        return Work()

    def refresh(self) -> Work:
        """After a step: bring up to date what this rank keeps of trained weights outside of the masters, if anything.

        That is all of them where they are replicated, and the node's slice where there is one.
        """
        if not self.trainable or not self.layout.padded_numel:
            return Work()
        if self.node_slice is None:
            return Work() if self.sharded else self.gather()
        at = self.begin - self.node_bounds[0]
        _cast(self.local_shard(), self.node_slice[at : at + self.end - self.begin])
        return self.mesh.refresh(self.node_slice, self.tag)

    def gather_flat(self, values: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
        """Whole tensors, one per parameter, of what every rank holds in shards (None: zeros); a collective."""
        flat = torch.zeros(self.layout.padded_numel, dtype=dtype, device=self.device)
        self.gather_into(flat, values)
        return self.views(flat)

    def gather_into(self, flat: Tensor, values: Sequence[Tensor | None]) -> None:
        """The same into `flat`, which is zero; a collective."""
        own = flat[self.begin : self.end]
        for shard, value in zip(self.master_shards, values, strict=True):
            if value is not None:
                own[shard.start : shard.stop] = value
        if MOVES[self.at_rest, Placement.REPLICATED] is Move.ALL_GATHER:
            self.mesh.gather_all(flat, self.tag, ()).wait()

    def write_grads(self, values: Mapping[int, Tensor]) -> None:
        """Make this rank's part of whole gradients, flat and by parameter, the gradients of the masters."""
        for shard in self.master_shards:
            for span in shard.spans():
                if span.index in values:
                    shard.set_grad(span.offset, values[span.index][span.start : span.start + span.numel])

    @property
    def reduces_parts(self) -> bool:
        """Whether `reduce` takes gradients from where they are (else one flat tensor)."""
        scatters = MOVES[Placement.PARTIAL, self.at_rest] is Move.REDUCE_SCATTER
        return self.mesh.takes_parts and (scatters or not self.comm.shares)

    def reduce(self, parts: Sequence[Tensor], scale: float, *, to_owner: bool = True) -> Work:
        """Add `scale` times the mean over ranks to the gradients of the masters, once it is waited for.

        `parts` are unreduced gradients, flat and end to end as the parameters are in `unsharded`. Without `to_owner`
        they go as far as the node, where they are kept for the next time.
        """
        if not self.layout.padded_numel:
            return Work()
        take = functools.partial(self._accumulate, scale / self.comm.world_size)
        if MOVES[Placement.PARTIAL, self.at_rest] is not Move.REDUCE_SCATTER:
            return self.mesh.reduce(parts, take, self.tag)
        if self.node_sum is None:
            return self.mesh.scatter(parts, take, self.tag)
        inside = self.mesh.scatter(parts, self.node_sum.add, self.tag)
        return Route(inside, functools.partial(self.reduce_on, scale)) if to_owner else inside

    def reduce_on(self, scale: float) -> Work:
        """As `reduce`, with the sums that were kept on the node."""
        take = functools.partial(self._accumulate, scale / self.comm.world_size)
        assert self.node_sum is not None
        return self.mesh.scatter_on(self.node_sum.take(), take, self.tag)

    def drop_sums_on_node(self, indices: Collection[int]) -> None:
        """Forget those of some parameters."""
        assert self.node_sum is not None
        if len(indices) == len(self.params):
            self.node_sum.values = None
        elif self.node_sum.values is not None:
            low, high = node_bounds(self.layout, self.mesh.topology)
            for span in self.layout.spans(low, high):
                if span.index in indices:
                    self.node_sum.values[span.offset : span.offset + span.numel] = 0

    def _accumulate(self, scale: float, start: int, values: Tensor) -> None:
        """Add `scale * values` to the gradients of the elements from `start` on, counted from `begin`."""
        stop = start + values.numel()
        for shard in self.master_shards:
            low, high = max(start, shard.start), min(stop, shard.stop)
            if low < high:
                shard.add_grad(low, values[low - start : high - start], scale)

    # -- writes from outside --------------------------------------------------------------------------------------

    def _note_versions(self) -> None:
        self._versions = [param._version for param in self.params]

    def written_in_place(self) -> bool:
        """Whether an in-place operation has touched a parameter since the last look (`.data` is noticed elsewhere)."""
        versions = [param._version for param in self.params]
        changed = versions != self._versions
        self._versions = versions
        return changed

    def adopt_writes(self) -> None:
        """Carry values that the user wrote into `unsharded` over to what this rank keeps at rest.

        Only elements that differ from the cast of the master change, so reading costs a master no precision.
        """
        own = self.local_slice
        self.mesh.fence(self.tag)
        with torch.no_grad():
            for start, stop, values in self.local_shard():
                seen = own[start:stop]
                values.copy_(torch.where(seen != values.to(seen.dtype), seen.to(values.dtype), values))
            if self.node_slice is not None:
                low, high = self.node_bounds
                self.node_slice.copy_(self.unsharded[low:high])


def _cast(rest: list[tuple[int, int, Tensor]], own: Tensor) -> None:
    """Copy what rests on a rank, as `local_shard` gives it, into a tensor of elements [begin, end)."""
    with torch.no_grad():
        if len(rest) == 1:  # all of it
            own.copy_(rest[0][2])
        else:
            torch._foreach_copy_([own[start:stop] for start, stop, _ in rest], [values for _, _, values in rest])


def node_bounds(layout: FlatLayout, topology: Topology) -> tuple[int, int]:
    """The half-open element range that the owners of one column have together (see [Note: slice order])."""
    share = layout.slice_numel * topology.nodes
    local = topology.place_of(topology.rank)[2]
    return local * share, (local + 1) * share
