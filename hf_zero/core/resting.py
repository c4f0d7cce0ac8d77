"""What a rank keeps at rest of one flat buffer: masters of trained weights, their copies, slices of frozen weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TypeVar

import torch
from torch import Tensor

from hf_zero.comm.codec import Codec
from hf_zero.core.homes import Assignment, Home, Homes
from hf_zero.core.layout import FlatLayout
from hf_zero.core.master import MASTER, MasterShard, PackedShard, SliceShard, WeightShard, in_one_storage
from hf_zero.core.placement import Place


_Label = TypeVar("_Label")


class Resting:
    """Elements [begin, end) of a buffer, in shards whose positions count from `begin`.

    Gathers are made of masters that the device can read and of slices of frozen weights. Masters that are not near the
    device have copies in the dtype of computation, which follow whatever is written to the masters.

    Args:
        followers: gives the tensor of [begin, end) in which copies of masters lie, or, of `True`, the weights whose
            masters are with their owners; None: each has one of its own; one without elements: there are none.
        dtype: gives the dtype of these.

    Attributes:
        shards: of trained parameters: masters, and what has its masters elsewhere.
        masters: of trained parameters, in `shards` or, of what has owners (see [Note: owned]), beside them.
        runs: those beside them that are no whole matrices.
        frozen: of frozen ones that are sharded.
        courier: between the device and what is not near it.
    """

    def __init__(
        self,
        layout: FlatLayout,
        begin: int,
        end: int,
        homes: Homes,
        *,
        followers: Callable[[bool], Tensor | None],
        dtype: Callable[[], torch.dtype],
    ) -> None:
        self._layout, self._begin, self._end, self._homes = layout, begin, end, homes
        self.courier = homes.host.courier
        self._followers, self._dtype = followers, dtype
        self.shards: list[MasterShard | SliceShard] = []
        self.masters: list[MasterShard] = []
        self.runs: list[MasterShard] = []
        self.frozen: list[WeightShard] = []
        self._whole: Tensor | None = None  # [begin, end) of the buffer, if near masters lie in it
        self._kept: Tensor | None = None  # its values before writes that may be dropped

    def __bool__(self) -> bool:
        return bool(self.shards or self.frozen)

    # -- construction -------------------------------------------------------------------------------------------

    def take_masters(self, values: Tensor, dtype: torch.dtype, *, stays: bool) -> None:
        """Make masters of `dtype` that hold `values`: in their memory, if that `stays` and is a master's alone."""
        for start, stop, home in self._homes.masters().cut(values.numel()):
            room = values[start:stop]
            if not (stays and home.place is Place.DEVICE and dtype == room.dtype and room.numel() == values.numel()):
                room = room.to(device=home.device, dtype=dtype, copy=True)
            shard = self._new_master(start, stop, dtype, home, room)
            shard.rest()
            self.shards.append(shard)
            self.masters.append(shard)

    def take_frozen(self, values: Tensor, dtype: torch.dtype, codec: Codec | None = None) -> None:
        """Keep frozen weights, which are nobody else's, or what `codec` makes of them."""
        if codec is not None:
            self.frozen = [PackedShard(0, values.numel(), values, self._homes.device, codec)]
            return
        for start, stop, home in self._homes.weights().cut(values.numel()):
            alone = stop - start == values.numel()
            kept = values[start:stop].to(device=home.device, dtype=dtype, copy=not alone)
            self.frozen.append(WeightShard(start, stop, kept, home))

    def _new_master(
        self, start: int, stop: int, dtype: torch.dtype, home: Home, room: Tensor | None = None
    ) -> MasterShard:
        on_write = None if home.is_near else self._follow
        return MasterShard(self._layout, self._begin, start, stop, dtype, home, on_write, room=room)

    def new_shards(
        self, labels: Sequence[_Label], owned: Set[_Label], dtype: torch.dtype, homes: Assignment
    ) -> Iterator[tuple[_Label, MasterShard | SliceShard]]:
        """(label, shard of zeros) for all elements; `labels` are the parameters', one for each shard.

        Those with `owned` labels have their masters elsewhere. What masters are to hold is filled in before they are
        sent to rest. Where one on the device has had the whole slice and others there share it out, they have its
        memory, with its values.
        """
        whole = self._on_device(dtype) if homes.stays_near and owned.isdisjoint(labels) else None
        for label, start, stop in self._layout.runs(self._begin, self._end, labels):
            is_owned = label in owned
            for low, high, home in (self._homes.weights() if is_owned else homes).cut(stop - start):
                if is_owned:
                    where = (self._layout, self._begin, start + low, start + high)
                    follows = functools.partial(self._followers, True)
                    shard = SliceShard(*where, dtype, self._homes.device, follows, home)
                    shard.begin(self._dtype())
                    yield label, shard
                else:
                    room = None if whole is None else whole[start + low : start + high]
                    yield label, self._new_master(start + low, start + high, dtype, home, room)

    def _on_device(self, dtype: torch.dtype) -> Tensor | None:
        """The values of the whole slice, where masters of `dtype` have them end to end in one storage."""
        at = 0
        pieces = [shard.values for shard in self.shards if isinstance(shard, MasterShard)]
        near = all(shard.place is Place.DEVICE for shard in self.shards if isinstance(shard, MasterShard))
        if not near or len(pieces) < len(self.shards) or sum(map(Tensor.numel, pieces)) < self._end - self._begin:
            return None
        for piece in pieces:
            follows = piece.storage_offset() == pieces[0].storage_offset() + at
            if not follows or piece.dtype != dtype or not in_one_storage(piece, pieces[0]):
                return None
            at += piece.numel()
        return pieces[0].as_strided((at,), (1,)) if pieces else None

    def new_matrix(self, index: int, dtype: torch.dtype) -> MasterShard:
        """The master, of zeros, of a whole parameter in its own shape, wherever it lies in the buffer."""
        start, numel, shape = self._layout.offsets[index], self._layout.numels[index], self._layout.shapes[index]
        home = self._homes.matrix(numel)
        return MasterShard(self._layout, 0, start, start + numel, dtype, home, shape=shape)

    def new_run(self, start: int, stop: int, dtype: torch.dtype) -> MasterShard:
        """The master, of zeros, of elements [start, stop) of the buffer, wherever they lie in it."""
        return MasterShard(self._layout, 0, start, stop, dtype, self._homes.matrix(stop - start))

    def replace(
        self,
        shards: Sequence[MasterShard | SliceShard],
        runs: Sequence[MasterShard],
        matrices: Sequence[MasterShard],
    ) -> None:
        """Have other shards in place of the present ones, whose room is given back unless they are kept."""
        old = {*self.shards, *self.masters}
        self.shards, self.runs = list(shards), list(runs)
        self.masters = [*self.flats, *matrices]
        for shard in old - {*self.shards, *self.masters}:
            shard.leave()

    def empty_master(self, dtype: torch.dtype) -> MasterShard:
        """A master of nothing, for groups of which this rank owns nothing."""
        return self._new_master(0, 0, dtype, self._homes.device)

    def leave(self) -> None:
        """Give all room back."""
        self.replace((), (), ())
        for weight in self.frozen:
            weight.leave()

    # -- masters that are parts of the buffer -----------------------------------------------------------------------

    def lie_in(self, own: Tensor | None) -> None:
        """Have the masters on the device lie in `own`, which is [begin, end) of the buffer (None: by themselves)."""
        self._whole = own
        for shard in self.shards:
            if isinstance(shard, MasterShard) and shard.place is Place.DEVICE and (own is not None or shard.is_part):
                shard.lie_in(None if own is None else own[shard.start : shard.stop])

    def keep_values(self, keep: bool) -> None:
        """Have a copy of masters that lie in the buffer, where people may write what is to be dropped; or none."""
        self._kept = self._whole.clone() if keep and self._whole is not None else None

    def drop_writes(self) -> None:
        """Have the values again that were kept."""
        if self._kept is not None and self._whole is not None:
            self._whole.copy_(self._kept)

    # -- copies of masters ------------------------------------------------------------------------------------------

    def _follow(self, shard: MasterShard) -> None:
        """Have the copy of a master, which is open, take its values over."""
        followers = self._followers(False)
        with torch.no_grad(), torch.inference_mode(False):
            if followers is not None:
                if followers.numel():
                    shard.bring_to(followers[shard.start : shard.stop])
            elif shard.copy is None:
                ((_, _, home),) = self._homes.weights().cut(shard.numel)
                values = shard.values.to(device=home.device, dtype=self._dtype(), copy=True)
                shard.copy = WeightShard(shard.start, shard.stop, values, home)
            else:
                shard.copy.follow(shard)

    def recast(self) -> None:
        """Make copies anew, in the present dtype; those whose masters are elsewhere are zero until these come."""
        for shard in self.shards:
            if isinstance(shard, SliceShard):
                shard.begin(self._dtype())
            elif shard.copy is not None:
                with shard.open(kinds=(MASTER,)):
                    shard.copy.leave()
                    shard.copy = None
                    self._follow(shard)

    @property
    def weights(self) -> list[WeightShard]:
        """Frozen weights, or the copies of masters that lie by themselves."""
        return [shard.copy for shard in self.shards if shard.copy is not None] or self.frozen

    @property
    def flats(self) -> list[MasterShard]:
        """The masters that are flat: parts of this rank's slice, and runs."""
        return [*(shard for shard in self.shards if isinstance(shard, MasterShard)), *self.runs]

    # -- values -----------------------------------------------------------------------------------------------------

    def begin_fetch(self) -> None:
        """Have the weights read ahead that the next gather needs: copies of what owes a step have no such values."""
        current = [shard.copy for shard in self.shards if shard.copy is not None and not shard.owes]
        for shard in (*current, *self.frozen):
            shard.begin_fetch()

    def settle(self) -> None:
        """Make the steps that masters owe."""
        due = [shard for shard in self.masters if shard.is_due]
        if due:
            with self._homes.failures.late():
                for shard in due:
                    shard.pay()

    def exact(self, *, write: bool, closed: bool, in_memory: bool | None) -> Iterator[tuple[int, int, Tensor]]:
        """(start, stop, values) of the best values there are here; see `FlatBuffer.exact`."""
        shards: list[MasterShard | SliceShard | WeightShard] = [*self.shards, *self.frozen]
        for shard in shards:
            if in_memory in (None, shard.keeps_memory):
                with contextlib.nullcontext() if closed else shard.open(write=write, kinds=(MASTER,)):
                    yield shard.start, shard.stop, shard.values

    def cast_into(self, own: Tensor) -> list[Tensor]:
        """Copy what gathers are made of into `own`, which holds [begin, end), where it is not there already.

        What has a way to go arrives as `courier.up` says. Returns the tensors that it was made of, if they stay where
        they are.
        """
        weights, whole = self.weights, self._whole
        is_buffer = whole is not None and in_one_storage(own, whole)
        near = [shard for shard in self.shards if shard.is_near and not (is_buffer and shard.is_part)]
        if len(near) == 1 and near[0].numel == own.numel():
            own.copy_(near[0].values)
        elif near:
            parts = [own[shard.start : shard.stop] for shard in near]
            torch._foreach_copy_(parts, [shard.values for shard in near])
        for shard in weights:
            with shard.open():
                bring = self.courier.copy if shard.is_near else self.courier.up
                bring(own[shard.start : shard.stop], shard.values)
        sources = weights if not near else [] if weights else near
        return [shard.values for shard in sources] if all(shard.keeps_memory for shard in sources) else []

    # -- gradients ---------------------------------------------------------------------------------------

    def add_grads(self, scale: float, start: int, values: Tensor) -> None:
        """Add `scale * values` to the gradients of the elements from `start` on, counted from `begin`."""
        stop = start + values.numel()
        for shard in self.shards:
            low, high = max(start, shard.start), min(stop, shard.stop)
            if low < high:
                shard.add_grad(low, values[low - start : high - start], scale)

    def write_grads(self, values: Mapping[int, Tensor]) -> None:
        """Make this rank's part of whole gradients, flat and by parameter, the gradients of the masters."""
        for shard in self.shards:
            for span in shard.spans():
                if span.index in values:
                    shard.set_grad(span.offset, values[span.index][span.start : span.start + span.numel])
