"""What a rank keeps at rest of one flat buffer: masters of trained weights, their copies, slices of frozen weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from hf_zero.core.homes import Assignment, Home, Homes
from hf_zero.core.layout import FlatLayout
from hf_zero.core.master import MASTER, MasterShard, WeightShard


_Label = TypeVar("_Label")


class Resting:
    """Elements [begin, end) of a buffer, in shards whose positions count from `begin`.

    Gathers are made of masters that the device can read and of slices of frozen weights. Masters that are not near the
    device have copies in the dtype of computation, which follow whatever is written to the masters.

    Args:
        followers: gives the tensor of [begin, end) in which copies of masters lie; None: each has one of its own; one
            without elements: there are none.
        dtype: gives the dtype of these.

    Attributes:
        masters: of trained parameters.
        frozen: of frozen ones that are sharded.
    """

    def __init__(
        self,
        layout: FlatLayout,
        begin: int,
        end: int,
        homes: Homes,
        *,
        followers: Callable[[], Tensor | None],
        dtype: Callable[[], torch.dtype],
    ) -> None:
        self._layout, self._begin, self._end, self._homes = layout, begin, end, homes
        self._followers, self._dtype = followers, dtype
        self.masters: list[MasterShard] = []
        self.frozen: list[WeightShard] = []

    def __bool__(self) -> bool:
        return bool(self.masters or self.frozen)

    # -- construction -------------------------------------------------------------------------------------------

    def take_masters(self, values: Tensor, dtype: torch.dtype) -> None:
        """Make masters of `dtype` that hold `values`."""
        for start, stop, home in self._homes.masters().cut(values.numel()):
            shard = self._new_master(start, stop, dtype, home)
            shard.values.copy_(values[start:stop])
            shard.rest()
            self.masters.append(shard)

    def take_frozen(self, values: Tensor, dtype: torch.dtype) -> None:
        """Keep copies of frozen weights."""
        for start, stop, home in self._homes.weights().cut(values.numel()):
            kept = values[start:stop].to(device=home.device, dtype=dtype, copy=True)
            self.frozen.append(WeightShard(start, stop, kept, home))

    def _new_master(self, start: int, stop: int, dtype: torch.dtype, home: Home) -> MasterShard:
        on_write = None if home.is_near else self._follow
        return MasterShard(self._layout, self._begin, start, stop, dtype, home, on_write)

    def new_masters(
        self, labels: Sequence[_Label], dtype: torch.dtype, homes: Assignment
    ) -> Iterator[tuple[_Label, MasterShard]]:
        """(label, master of zeros) for all elements; `labels` are the parameters', one for each master.

        What the masters are to hold is filled in before they are sent to rest.
        """
        for label, start, stop in self._layout.runs(self._begin, self._end, labels):
            for low, high, home in homes.cut(stop - start):
                yield label, self._new_master(start + low, start + high, dtype, home)

    def empty_master(self, dtype: torch.dtype) -> MasterShard:
        """A master of nothing, for groups of which this rank owns nothing."""
        return self._new_master(0, 0, dtype, self._homes.device)

    def leave(self) -> None:
        """Give all room back."""
        for master in self.masters:
            master.leave()
        for weight in self.frozen:
            weight.leave()

    # -- copies of masters ------------------------------------------------------------------------------------------

    def _follow(self, shard: MasterShard) -> None:
        """Have the copy of a master, which is open, take its values over."""
        followers = self._followers()
        with torch.no_grad(), torch.inference_mode(False):
            if followers is not None:
                if followers.numel():
                    followers[shard.start : shard.stop] = shard.values
            elif shard.copy is None:
                ((_, _, home),) = self._homes.weights().cut(shard.numel)
                values = shard.values.to(device=home.device, dtype=self._dtype(), copy=True)
                shard.copy = WeightShard(shard.start, shard.stop, values, home)
            else:
                shard.copy.fill(shard.values)

    def recast(self) -> None:
        """Make copies anew, in the present dtype."""
        for shard in self.masters:
            if shard.copy is not None:
                with shard.open(kinds=(MASTER,)):
                    shard.copy.leave()
                    shard.copy = None
                    self._follow(shard)

    @property
    def weights(self) -> list[WeightShard]:
        """Frozen weights, or the copies of masters that lie by themselves."""
        return [shard.copy for shard in self.masters if shard.copy is not None] or self.frozen

    # -- values -----------------------------------------------------------------------------------------------------

    def begin_fetch(self, of_debts: bool = False) -> None:
        """Have read ahead what the next gather needs: weights, or what masters need to make the steps they owe."""
        for shard in self.masters if of_debts else self.weights:
            shard.begin_fetch()

    def settle(self) -> None:
        """Make the steps that masters owe."""
        for shard in self.masters:
            shard.pay()

    def exact(self, *, write: bool, closed: bool, in_memory: bool | None) -> Iterator[tuple[int, int, Tensor]]:
        """(start, stop, values) of the best values there are; see `FlatBuffer.exact`."""
        shards: list[MasterShard | WeightShard] = [*self.masters, *self.frozen]
        for shard in shards:
            if in_memory in (None, shard.keeps_memory):
                with contextlib.nullcontext() if closed else shard.open(write=write, kinds=(MASTER,)):
                    yield shard.start, shard.stop, shard.values

    def cast_into(self, own: Tensor) -> list[Tensor]:
        """Copy what gathers are made of into `own`, which holds [begin, end), where it is not there already.

        Returns the tensors that it was made of, if they stay where they are.
        """
        near, weights = [shard for shard in self.masters if shard.is_near], self.weights
        with torch.no_grad():
            if len(near) == 1 and near[0].numel == own.numel():
                own.copy_(near[0].values)
            elif near:
                parts = [own[shard.start : shard.stop] for shard in near]
                torch._foreach_copy_(parts, [shard.values for shard in near])
            for shard in weights:
                with shard.open():
                    own[shard.start : shard.stop] = shard.values
        sources = weights if not near else [] if weights else near
        return [shard.values for shard in sources] if all(shard.keeps_memory for shard in sources) else []

    # -- gradients of masters ---------------------------------------------------------------------------------------

    def add_grads(self, scale: float, start: int, values: Tensor) -> None:
        """Add `scale * values` to the gradients of the elements from `start` on, counted from `begin`."""
        stop = start + values.numel()
        for shard in self.masters:
            low, high = max(start, shard.start), min(stop, shard.stop)
            if low < high:
                shard.add_grad(low, values[low - start : high - start], scale)

    def write_grads(self, values: Mapping[int, Tensor]) -> None:
        """Make this rank's part of whole gradients, flat and by parameter, the gradients of the masters."""
        for shard in self.masters:
            for span in shard.spans():
                if span.index in values:
                    shard.set_grad(span.offset, values[span.index][span.start : span.start + span.numel])
