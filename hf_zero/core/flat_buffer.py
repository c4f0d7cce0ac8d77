"""A set of parameters in one storage, this rank's part of them at rest, and the moves between the two."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from hf_zero.comm.codec import Codec
from hf_zero.comm.mesh import Mesh
from hf_zero.comm.work import UNTAGGED, Tag, Work
from hf_zero.core import guard
from hf_zero.core.extents import node_bounds
from hf_zero.core.first_values import first_values, views_of
from hf_zero.core.gradient_route import GradientRoute
from hf_zero.core.gradient_shard import GradientShard
from hf_zero.core.heap import heap
from hf_zero.core.homes import Homes
from hf_zero.core.layout import ALIGNMENT_BYTES, FlatLayout
from hf_zero.core.master import MasterShard
from hf_zero.core.node_slice import NodeSlice
from hf_zero.core.owned import OwnedMasters
from hf_zero.core.placement import MOVES, Extent, Move, Placement, Placements
from hf_zero.core.resting import Resting
from hf_zero.core.tensor_parts import TensorParts


class FlatBuffer:
    """Parameters of one dtype and one `requires_grad`, lying end to end in the storage of `unsharded`.

    Every parameter is a view of `unsharded`, forever: autograd saves views of the same storage, so unsharding must
    bring the values back to the place where forward saw them. Released means that the storage has zero bytes; the
    views keep their shapes.

    At rest a rank keeps `[begin, end)` of the range (`resting`): in fp32 masters where the parameters are trained, in
    slices where they are frozen and sharded, and nowhere but in `unsharded` where they are frozen and replicated.

    Where parameters are sharded over each node, and their masters over all nodes, a rank also keeps its share of the
    node's weights (`node_slice`).

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
        homes: Homes,
        rest_dtype: torch.dtype | None = None,
        codec: Codec | None = None,
        tag: Tag = UNTAGGED,
    ) -> None:
        self.tag = tag
        self.names, self.params = list(names), list(params)
        self.dtype, self.trainable = dtype, trainable
        self.mesh, self.comm, self.homes, self.device = mesh, mesh.world, homes, homes.device.device
        self.sharded = placements.parameter is Placement.SHARDED
        self.at_rest = placements.at_rest(trainable)  # how the exact values are placed
        self._gathers = MOVES[self.at_rest, Placement.REPLICATED] is Move.ALL_GATHER
        self.parts = TensorParts(names, params, mesh)
        alignment = math.lcm(mesh.block, ALIGNMENT_BYTES // dtype.itemsize)
        self.layout = FlatLayout(self.parts.local_shapes, mesh.topology.shards, alignment, cuts=mesh.cuts)
        self._by_node = by_node = self.sharded and placements.parameter_extent is Extent.NODE
        node = node_bounds(self.layout, mesh.topology)
        self.begin, self.end = 0, self.layout.padded_numel
        if self.owns_slice:
            own = self.layout.slice_bounds(mesh.topology.slice_of(mesh.topology.rank))
            self.begin, self.end = node if by_node and not trainable else own
        self.node_slice: NodeSlice | None = None
        self.owned: OwnedMasters | None = None  # masters that are no parts of slices, if there are any
        self.resting = Resting(
            self.layout, self.begin, self.end, homes, followers=self._followers, dtype=lambda: self.dtype
        )
        self.gradient_route = GradientRoute(self.layout, mesh, tag, self.at_rest, self.resting.add_grads)
        self._rest_dtype = rest_dtype or dtype
        self.codec = codec if self.sharded else None  # of what rests
        self._views = [view for param in self.params for view in guard.views_of(param)]
        self.original_dtype = params[0].dtype

    # -- construction -------------------------------------------------------------------------------------------

    def distribute(self) -> None:
        """Take over the values of the parameters, as they are on rank 0, and make the parameters views; a collective.

        No collective where every parameter is sharded and can be read in slices.
        """
        whole = first_values(
            self.layout, self.params, self.original_dtype, self.device, self.mesh, self.parts, self._needed, self.tag
        )
        low, _ = self._needed
        owned = whole[self.begin - low : self.end - low]
        if self.sharded:
            self.unsharded = torch.empty(self.layout.padded_numel, dtype=self.dtype, device=self.device)
        else:
            self.unsharded = whole.to(self.dtype)
        self._make_node_slice()
        if self.trainable:
            self.resting.take_masters(owned, self.master_dtype, stays=self.sharded or self.dtype == whole.dtype)
            self.share_masters()
        elif self.sharded:
            self.resting.take_frozen(owned, self._rest_dtype, self.codec)
        freed = whole.nbytes
        del owned, whole
        if self.node_slice is not None:
            self.refresh(exact=True).wait()
        self._point_parameters()
        if self.sharded:
            self.release()
            heap.has_freed(freed)

    def _make_node_slice(self) -> None:
        if self.trainable and self._by_node:
            self.node_slice = NodeSlice(self.layout, self.mesh, self.tag, self.dtype, self.device)

    def _followers(self, of_owners: bool) -> Tensor | None:
        """Where slices of weights lie that follow masters: those of owners, or those that are not near the device."""
        if self.node_slice is not None:  # `refresh` tells the other nodes of what has changed
            return self.node_slice.own(self.begin, self.end) if of_owners else self.node_slice.values[:0]
        return None if self.sharded else self.local_slice

    def share_masters(self) -> None:
        """Where weights are replicated in the dtype of their masters, these are their part of them: no copy."""
        fits = not self.sharded and self.trainable and self.dtype == self.master_dtype
        self.resting.lie_in(self.local_slice if fits else None)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of `flat`, laid out as the buffer is, one per parameter."""
        return views_of(self.layout, flat)

    def _point_parameters(self) -> None:
        for param, view in zip(self.params, self.views(self.unsharded), strict=True):
            guard.point_to(param, view)
        self._note_versions()

    @property
    def _needed(self) -> tuple[int, int]:
        """The elements that stay here of the first values."""
        return (self.begin, self.end) if self.sharded else (0, self.layout.padded_numel)

    @property
    def owns_slice(self) -> bool:
        """Whether what rests here is one slice of it; otherwise every rank keeps the same."""
        return self.at_rest is Placement.SHARDED

    @property
    def kept_weights(self) -> list[Tensor]:
        """What rests here of weights besides `unsharded` and masters."""
        slices = [shard.kept for shard in self.resting.weights]
        return slices if self.node_slice is None else [*slices, self.node_slice.values]

    @property
    def is_first_owner(self) -> bool:
        """Whether this rank is the first of those that keep the same exact values at rest."""
        topology = self.mesh.topology
        replica, node, _ = topology.place_of(topology.rank)
        if not self.owns_slice:
            return topology.rank == 0
        return replica == 0 and (node == 0 or self.trainable or not self._by_node)

    @property
    def master_dtype(self) -> torch.dtype:
        return torch.promote_types(self.original_dtype, torch.float32)

    def index_of(self, param: nn.Parameter) -> int | None:
        return next((index for index, own in enumerate(self.params) if own is param), None)

    def name_of(self, param: nn.Parameter) -> str:
        return next(name for name, own in zip(self.names, self.params, strict=True) if own is param)

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
        packed = any(map(guard.is_packed, self.params)) and sample.dtype != self.dtype
        if (
            packed
            or sample.device != self.unsharded.device
            or torch.promote_types(sample.dtype, self.master_dtype) != self.master_dtype
        ):
            raise ValueError(
                f"cannot make a prepared parameter of {self.dtype} on {self.device} one of {sample.dtype} on "
                f"{sample.device}: hf_zero owns its storage, and its master is one of {self.master_dtype}. Convert or "
                "move the model before it is prepared"
            )

    def cast(self, dtype: torch.dtype) -> None:
        """Have the values in `dtype` from here on, made from what is kept at rest; a collective."""
        if self.resting:
            self._recast(dtype)
            if not self.sharded:
                self.restore()
        else:
            self.dtype, self.unsharded = dtype, self.unsharded.to(dtype)
        self._point_parameters()
        if self.sharded:
            self.release()

    def _recast(self, dtype: torch.dtype) -> None:
        """Have what is kept besides masters in `dtype`; a collective."""
        self.dtype = dtype
        self.unsharded = torch.empty(self.layout.padded_numel, dtype=dtype, device=self.device)
        self.share_masters()
        self._make_node_slice()
        self.resting.recast()
        if self.node_slice is not None:
            self.refresh(exact=True).wait()
        elif self.owned is not None:
            self.owned.hand_out(self.dtype)

    def detach_parameters(self) -> None:
        """Give each parameter a tensor of its own, in the dtype it came with, and keep nothing; a collective."""
        if self.resting and self.original_dtype != self.dtype:
            self._recast(self.original_dtype)
            self.restore()
        for param, view in zip(self.params, self.views(self.unsharded), strict=True):
            guard.point_to(param, view.clone())
        self.resting.leave()

    # -- moves --------------------------------------------------------------------------------------------------

    @property
    def master_shards(self) -> list[MasterShard]:
        """What optimizers step on this rank: shards of its slice, and what it owns besides."""
        return self.resting.masters

    def exact(
        self, *, write: bool = False, closed: bool = False, in_memory: bool | None = None
    ) -> Iterator[tuple[int, int, Tensor]]:
        """(start, stop, values) of the best values that this rank keeps of what it owns, counted from `begin`.

        Each tensor is valid until the next is asked for; with `write`, what is left in it is kept. `closed` tensors
        have shapes only. `in_memory` chooses those that rest in memory, or those that do not (None: all).
        """
        if self.resting:
            yield from self.resting.exact(write=write, closed=closed, in_memory=in_memory)
        elif in_memory is not False:
            yield 0, self.end - self.begin, self.local_slice

    def _copy_exact(self, own: Tensor) -> None:
        with torch.no_grad():
            for start, stop, values in self.exact():
                own[start:stop] = values

    def gather(self) -> Work:
        """Bring `unsharded` up to date from what every rank keeps at rest (sharded or changed by a step)."""
        if not self.layout.padded_numel:  # nothing but parameters of no elements
            return Work()
        if self.node_slice is not None:
            self.mesh.node_part(self.unsharded).copy_(self.node_slice.values)
            return self.mesh.gather(self.unsharded, self.tag, [self.node_slice.values])
        if self.codec is not None:
            return self.mesh.gather_frozen(self.resting.frozen[0].kept, self.unsharded, self.tag)
        self.resting.settle()
        rest = self.resting.cast_into(self.local_slice)
        if self._sent_quantised:
            self.resting.courier.join()
            return self.mesh.gather_quantised(self.unsharded, self.tag)
        # A replicated buffer keeps what it has sent: whoever changes it settles first.
        sources = rest if self.sharded else [self.local_slice]
        return self.resting.courier.send(functools.partial(self._send, sources))

    def _send(self, kept: Sequence[Tensor]) -> Work:
        move = self.mesh.gather if self.sharded else self.mesh.gather_all
        return move(self.unsharded, self.tag, kept) if self._gathers else Work()

    @property
    def _sent_quantised(self) -> bool:
        """Whether gathers bring weights that are not quite those at rest."""
        return self.sharded and self.trainable and not self._by_node and self.mesh.quantises_weights

    def restore(self) -> None:
        """Make all of `unsharded` anew from what is at rest, whatever was written to it; a collective."""
        if self.owned is not None:
            self.owned.hand_out(self.dtype)
        self.resting.drop_writes()
        if self.node_slice is not None or self._sent_quantised:
            self.gather().wait()
        else:
            self._copy_exact(self.local_slice)
            self._send(()).wait()
        self.mesh.fence(self.tag)

    def refresh(self, *, exact: bool = False) -> Work:
        """After a step: bring up to date what this rank keeps of trained weights outside of the masters, if anything.

        That is all of them where they are replicated, the node's slice (see `NodeSlice`), slices of owned matrices.
        """
        if not self.trainable or not self.layout.padded_numel:
            return Work()
        if self.owned is not None:
            self.owned.hand_out(self.dtype)
        if self.node_slice is None:
            return Work() if self.sharded else self.gather()
        own = self.node_slice.own(self.begin, self.end)
        if not exact and self.mesh.quantises_weights:
            return self.node_slice.send_changes(self.exact(), own)
        self._copy_exact(own)
        return self.mesh.refresh(self.node_slice.values, self.tag)

    def gather_flat(self, values: Iterable[tuple[GradientShard, Tensor | None]], dtype: torch.dtype) -> list[Tensor]:
        """Whole tensors, one per parameter, of what every rank holds by masters (None: zeros); a collective.

        Each of the `values` is used before the next is asked for.
        """
        flat = torch.zeros(self.layout.padded_numel, dtype=dtype, device=self.device)
        own = flat[self.begin : self.end]
        self.gather_into(flat, values if self.owned is None else self.owned.put_runs(values, own))
        return self.views(flat)

    def gather_into(self, flat: Tensor, values: Iterable[tuple[GradientShard, Tensor | None]]) -> None:
        """The same into `flat`, which is zero, of parts of slices; a collective."""
        own = flat[self.begin : self.end]
        for shard, value in values:
            if value is not None:
                own[shard.start : shard.stop] = value
        if self._gathers:
            self.mesh.gather_all(flat, self.tag, ()).wait()

    # -- writes from outside --------------------------------------------------------------------------------------

    def _note_versions(self) -> None:
        self._versions = [view._version for view in self._views]

    def written_in_place(self) -> bool:
        """Whether an in-place operation has touched a parameter since the last look (`.data` is noticed elsewhere)."""
        versions = [view._version for view in self._views]
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
            sent = self._as_sent() if self.mesh.quantises_weights else None
            for start, stop, values in self.exact(write=True):
                seen = own[start:stop]
                kept = values.to(seen.device)
                before = kept.to(seen.dtype) if sent is None else sent[start:stop]
                values.copy_(torch.where(seen != before, seen.to(kept.dtype), kept))
            if self.owned is not None:
                self.owned.adopt_writes(self.unsharded)
            if self.node_slice is not None:
                self.node_slice.values.copy_(self.mesh.node_part(self.unsharded))

    def _as_sent(self) -> Tensor:
        """Elements [begin, end) as gathers bring them, when nobody has written to them."""
        if self.node_slice is not None:
            return self.node_slice.own(self.begin, self.end)
        own = torch.zeros_like(self.local_slice)
        self.resting.cast_into(own)
        self.resting.courier.join()
        if self._sent_quantised:
            self.mesh.quantise(own)
        return own
