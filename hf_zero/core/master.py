"""Fp32 master weights with their gradients and optimizer state, from which the weights of a buffer are cast."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.comm.codec import Codec
from hf_zero.core.gradient_shard import GradientShard
from hf_zero.core.homes import Home, Shelf
from hf_zero.core.layout import FlatLayout
from hf_zero.core.placement import Place


# The kind of the weights among the flat tensors of a master shard; all others are the optimizer's.
MASTER = "master"
_WEIGHTS = "weights"


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """What optimizers keep for a weight, in any nest of dicts, lists and tuples, with `function` done to tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(each, function) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(each, function) for each in value)
    return value


def in_one_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


class WeightShard:
    """Elements [start, stop) of what a rank owns of one buffer, of which gathers are made: frozen, or of a master."""

    def __init__(self, start: int, stop: int, values: Tensor, home: Home) -> None:
        self.start, self.stop, self.dtype = start, stop, values.dtype
        self.place, self.keeps_memory, self.is_near = home.place, home.keeps_memory, home.is_near
        self._shelf = home.shelf(values.numel(), {_WEIGHTS: values})

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def kept(self) -> Tensor:
        """The tensor that rests."""
        return self._shelf.flats[_WEIGHTS]

    @property
    def values(self) -> Tensor:
        return self.kept

    @contextlib.contextmanager
    def open(self, *, write: bool = False, kinds: Collection[str] | None = None) -> Iterator[None]:
        """Inside, `values` are there; with `write`, what is left in them is kept. There is one of all `kinds`."""
        with self._shelf.open(write=write):
            yield

    def begin_fetch(self) -> None:
        """Have the values read ahead of the next `open`."""
        self._shelf.begin_fetch()

    def follow(self, master: MasterShard) -> None:
        """Have the values of a master, which is open, in place of the present ones."""
        with self._shelf.open(write=True, anew=True):
            if self.is_near:
                master.bring_to(self.values)
            else:
                self.values.copy_(master.values)

    def leave(self) -> None:
        """Give up its room."""
        self._shelf.leave()


class PackedShard(WeightShard):
    """Frozen weights of which a rank keeps a codec's payload only; open, they have decoded values in fp32."""

    def __init__(self, start: int, stop: int, values: Tensor, home: Home, codec: Codec) -> None:
        super().__init__(start, stop, codec.pack(values), home)
        self._codec = codec
        self._shell = torch.empty(self.numel, device="meta")
        self._values: Tensor | None = None

    @property
    def values(self) -> Tensor:
        return self._shell if self._values is None else self._values

    @contextlib.contextmanager
    def open(self, *, write: bool = False, kinds: Collection[str] | None = None) -> Iterator[None]:
        """As in `WeightShard`; encoding what was only decoded changes nothing (see `Codec`)."""
        before = self._values
        if before is None:
            self._values = torch.empty(self.numel, device=self.kept.device)
            self._codec.decode(self.kept, self._values)
        try:
            yield
            if write:
                self._codec.encode(self.values, self.kept)
        finally:
            self._values = before


class MasterShard(GradientShard):
    """Elements with their master weights in fp32 (or fp64), the values of `weight`, which an optimizer steps.

    `weight` is a flat leaf, or a whole parameter in its shape. It rests in a home, together with the optimizer's
    states of that shape. Inside `open`, and only there, they have values.

    Attributes:
        is_near: the engine's device can read the weight; otherwise `copy` is read in its place.
        is_part: the weight lies in the buffer itself.
        copy: in the dtype of computation, of a shard that is not near and of which gathers are made.
        owed_grad: what the step that is owed needs, if one is.

    [Note: debts] A shard away from the device is not stepped by `optimizer.step()`, which only decides about the step.
    From then on the shard *owes* it, and makes it when somebody opens it next: at the gather of its unit, say. So
    moving its state to and fro goes on under the forward pass, and whoever looks sees the step done.

    Args:
        on_write: called with the shard, open, when its values may have changed.
        shape: of the weight, where it is a whole parameter.
        room: flat memory of the home's device, with values, that the weight is to have; None: zeros of its own.
    """

    def __init__(
        self,
        layout: FlatLayout,
        begin: int,
        start: int,
        stop: int,
        dtype: torch.dtype,
        home: Home,
        on_write: Callable[[MasterShard], None] | None = None,
        shape: Sequence[int] | None = None,
        room: Tensor | None = None,
    ) -> None:
        shape = (stop - start,) if shape is None else shape
        # `data`: the weight counts its versions by itself.
        weight = torch.zeros(shape, dtype=dtype, device=home.device) if room is None else room.data
        super().__init__(layout, begin, start, stop, weight, home.courier)
        self._home, self._on_write = home, on_write
        self.is_near, self.is_part = home.is_near, False
        self.copy: WeightShard | None = None
        self._shelf: Shelf | None = None  # until `rest` the tensors are ordinary ones
        self._is_on_device = self._has_followed = False  # see `on_device`
        self._is_arriving = False  # its values, on the host
        self._debt: Callable[[], None] | None = None
        self.owed_grad: Tensor | None = None
        self._failure: BaseException | None = None

    @property
    def place(self) -> Place:
        return self._home.place

    @property
    def keeps_memory(self) -> bool:
        return self._home.keeps_memory

    @property
    def values(self) -> Tensor:
        return self.weight.detach()

    # -- at rest --------------------------------------------------------------------------------------------------

    def lie_in(self, room: Tensor | None) -> None:
        """Have the weight, with its values, in the memory of `room` from here on (None: in memory of its own)."""
        with torch.no_grad(), torch.inference_mode(False):
            if room is None:
                self.weight.data = self.values.clone()
            elif not in_one_storage(room, self.values):
                self.weight.data = room.copy_(self.values)
        self.is_part = room is not None

    def rest(self, state: Mapping[str, object] | None = None) -> None:
        """Go to rest for the first time, with `state`, what the optimizer keeps for it."""
        if self._on_write is not None:
            self._on_write(self)
            self.courier.join()
        self._shelf = self._home.shelf(self.numel, {MASTER: self.weight, **self.flats_in(state or {})})

    def flats_in(self, state: Mapping[str, object]) -> dict[str, Tensor]:
        """The flat tensors, as long as the shard, among what the optimizer keeps for it."""
        shape = self.weight.shape
        return {kind: value for kind, value in state.items() if isinstance(value, Tensor) and value.shape == shape}

    @contextlib.contextmanager
    def open(self, *, write: bool = False, kinds: Collection[str] | None = None) -> Iterator[None]:
        """Inside, the weight and its flat states (those of `kinds` at least) have values, those after the last step.

        With `write`, what is left in them is kept. Scopes nest.
        """
        self.pay()
        with self._opened(write, kinds):
            yield
        if write:
            self.courier.join()

    @contextlib.contextmanager
    def _opened(self, write: bool, kinds: Collection[str] | None) -> Iterator[None]:
        if self._shelf is None:
            yield
            return
        self._arrive()
        with self._shelf.open(write=write, kinds=kinds):
            yield
            if write and self._on_write is not None and not self._has_followed:
                self._on_write(self)
            self._has_followed = False

    def bring_to(self, target: Tensor) -> None:
        """Have `target`, which is on the device, hold what the weight is now."""
        if self._is_on_device:
            target.copy_(self.values)
        else:
            self.courier.up(target, self.values)

    @contextlib.contextmanager
    def on_device(self, device: torch.device, states: Mapping[Tensor, Mapping[str, object]]) -> Iterator[None]:
        """Inside, which is inside `open(write=True)`, the weight, its gradient and its flat states are on `device`.

        What they are then goes back to the host behind whatever the device is told next. `states` are the optimizer's,
        by weight; those that it makes inside belong to it.
        """
        grad, self.weight.grad = self.weight.grad, None
        flats = {MASTER: self.weight, **self.flats_in(states.get(self.weight, {}))}
        kept = {kind: flat.detach() for kind, flat in flats.items()}
        there = {kind: self._brought(value, device) for kind, value in kept.items()}
        there_grad = None if grad is None else self._brought(grad, device)
        self.courier.join()
        try:
            for kind, flat in flats.items():
                flat.data = there.pop(kind)
            self.weight.grad, self._is_on_device = there_grad, True
            yield
            self.weight.grad = None
            if self._on_write is not None:
                self._on_write(self)
                self._has_followed = True
            for kind, flat in {MASTER: self.weight, **self.flats_in(states.get(self.weight, {}))}.items():
                values = flat.detach()
                if flats.get(kind) is flat:
                    target = kept[kind]
                else:
                    target = flat.data = torch.empty(values.shape, dtype=values.dtype, device=self._home.device)
                self.courier.down(values.reshape(-1), functools.partial(_put, target.view(-1)), given=True)
            self._is_arriving = True
        finally:
            self._is_on_device, self.weight.grad = False, None
            for kind, flat in flats.items():
                flat.data = kept[kind]
            self.weight.grad = grad
        if not self.keeps_memory:
            self._arrive()  # or its memory would be another's by then

    def _brought(self, value: Tensor, device: torch.device) -> Tensor:
        there = torch.empty(value.shape, dtype=value.dtype, device=device)
        self.courier.up(there.view(-1), value.view(-1))
        return there

    def _arrive(self) -> None:
        if self._is_arriving:
            self.courier.land()
            self._is_arriving = False

    def keep(self, state: Mapping[str, object]) -> None:
        """Have the flat tensors that the optimizer has made since rest with the weight; inside `open(write=True)`."""
        if self._shelf is not None:
            for kind, value in self.flats_in(state).items():
                if self._shelf.flats.get(kind) is not value:
                    self._shelf.add(kind, value)

    def leave(self) -> None:
        """Give up its room: the shard is not used again."""
        self._debt = self.owed_grad = None
        for shelf in (self._shelf, self.copy):
            if shelf is not None:
                shelf.leave()

    # -- debts (see [Note: debts]) ----------------------------------------------------------------------------------

    @property
    def owes(self) -> bool:
        return self._debt is not None

    @property
    def is_due(self) -> bool:
        """Whether `pay` does something, or raises."""
        return self._debt is not None or self._failure is not None

    def owe(self, step: Callable[[], None], grad: Tensor) -> None:
        """Have `step`, which needs `grad`, called once and inside `open`, before anybody sees the values again."""
        assert self._debt is None, "a shard owes one step at a time"
        self._debt, self.owed_grad = step, grad

    def begin_fetch(self) -> None:
        """Have what a step needs read ahead."""
        if self._shelf is not None:
            self._shelf.begin_fetch()

    def pay(self) -> None:
        """Make the step that is owed. What it raised is raised again by every later call."""
        if self._failure is not None:
            raise copy.copy(self._failure)
        if self._debt is None:
            return
        step, self._debt, self.owed_grad = self._debt, None, None
        try:
            with self._opened(write=True, kinds=None):
                step()
        except BaseException as error:
            # Not itself: it holds the frames that it passes, and with them the model, out of the collector's reach.
            self._failure = copy.copy(error)
            raise

    def _grad_to_change(self) -> Tensor | None:
        if self.weight.grad is not None and self._debt is not None:
            self.pay()  # the step that is owed needs it as it is
        return self.weight.grad


def _put(target: Tensor, at: int, values: Tensor) -> None:
    target[at : at + values.numel()] = values


class SliceShard(GradientShard):
    """Elements of which the masters lie elsewhere, as parts of whole matrices (`Placement.OWNED`).

    Here are their gradients, and the weights in the dtype of computation, of which gathers are made.

    Args:
        dtype, device: of the gradients, and their home.
        followers: gives the tensor of all that this rank owns of the buffer, in which these weights lie; None: they
            have a `copy` of their own.
        home: of this copy.
    """

    is_near = is_part = owes = False

    def __init__(
        self,
        layout: FlatLayout,
        begin: int,
        start: int,
        stop: int,
        dtype: torch.dtype,
        device: Home,
        followers: Callable[[], Tensor | None],
        home: Home,
    ) -> None:
        # Nobody reads it: one element expanded to the length has the right shape and dtype, and nan in it.
        nothing = torch.full((1,), math.nan, dtype=dtype, device=device.device).expand(stop - start)
        super().__init__(layout, begin, start, stop, nothing, device.courier)
        self._home, self._followers = home, followers
        self.copy: WeightShard | None = None

    @property
    def keeps_memory(self) -> bool:
        return self.copy is None or self.copy.keeps_memory

    @property
    def values(self) -> Tensor:
        followers = self._followers()
        if followers is not None:
            return followers[self.start : self.stop]
        assert self.copy is not None, "its first values have come"
        return self.copy.values

    @contextlib.contextmanager
    def open(self, *, write: bool = False, kinds: Collection[str] | None = None) -> Iterator[None]:
        """Inside, `values` are there; with `write`, what is left in them is kept. There is one of all `kinds`."""
        with contextlib.nullcontext() if self.copy is None else self.copy.open(write=write):
            yield

    def begin(self, dtype: torch.dtype) -> None:
        """Have room, of zeros, for values in `dtype`, the dtype of computation."""
        self.leave()
        if self._followers() is None:
            values = torch.zeros(self.numel, dtype=dtype, device=self._home.device)
            self.copy = WeightShard(self.start, self.stop, values, self._home)

    def leave(self) -> None:
        """Give up its room."""
        if self.copy is not None:
            self.copy.leave()
            self.copy = None
