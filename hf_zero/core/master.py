"""Flat fp32 master weights with their gradients and optimizer state, from which the weights of a buffer are cast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from hf_zero.core.homes import Home, Shelf
from hf_zero.core.layout import FlatLayout, Span
from hf_zero.core.placement import Place


# The kind of the weights among the flat tensors of a master shard; all others are the optimizer's.
MASTER = "master"
_WEIGHTS = "weights"


class WeightShard:
    """Elements [start, stop) of what a rank owns of one buffer, of which gathers are made: frozen, or of a master."""

    def __init__(self, start: int, stop: int, values: Tensor, home: Home) -> None:
        self.start, self.stop, self.dtype = start, stop, values.dtype
        self.place, self.keeps_memory = home.place, home.keeps_memory
        self._shelf = home.shelf(values.numel(), {_WEIGHTS: values})

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def values(self) -> Tensor:
        return self._shelf.flats[_WEIGHTS]

    @contextlib.contextmanager
    def open(self, *, write: bool = False, kinds: Collection[str] | None = None) -> Iterator[None]:
        """Inside, `values` are there; with `write`, what is left in them is kept. There is one of all `kinds`."""
        with self._shelf.open(write=write):
            yield

    def begin_fetch(self) -> None:
        """Have the values read ahead of the next `open`."""
        self._shelf.begin_fetch()

    def fill(self, values: Tensor) -> None:
        """Have these values in place of the present ones."""
        with self._shelf.open(write=True, anew=True):
            self.values.copy_(values)

    def leave(self) -> None:
        self._shelf.leave()


class MasterShard:
    """Elements [start, stop) of what a rank owns of one buffer, all of one optimizer group, in fp32 (or fp64).

    `weight` is what the optimizer sees of them: a flat leaf. `weight.grad` exists from the first reduction of a step
    until `zero_grad`: gradients take their memory as backward proceeds, and not all at its beginning.

    The weight and the optimizer's flat states for it rest in a home. Inside `open`, and only there, they have values.

    Attributes:
        is_near: the engine's device can read the weight; otherwise `copy` is read in its place.
        copy: in the dtype of computation, of a shard that is not near and of which gathers are made.
        owed_grad: what the step that is owed needs, if one is.

    [Note: debts] A shard away from the device is not stepped by `optimizer.step()`, which only decides about the step.
    From then on the shard *owes* it, and makes it when somebody opens it next: at the gather of its unit, say. So
    moving its state to and fro goes on under the forward pass, and whoever looks sees the step done.

    Args:
        layout, begin: where it lies: `start` and `stop` count from element `begin` of the layout.
        on_write: called with the shard, open, when its values may have changed.
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
    ) -> None:
        self.start, self.stop = start, stop
        self._layout, self._begin = layout, begin
        self._home, self._on_write = home, on_write
        self.is_near = home.is_near
        self.copy: WeightShard | None = None
        self.weight = torch.zeros(stop - start, dtype=dtype, device=home.device).requires_grad_()
        self._shelf: Shelf | None = None  # until `rest` the tensors are ordinary ones
        self._written = False  # `weight.grad` holds the sum of a whole reduction at least
        self._debt: Callable[[], None] | None = None
        self.owed_grad: Tensor | None = None
        self._failure: BaseException | None = None

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def place(self) -> Place:
        return self._home.place

    @property
    def keeps_memory(self) -> bool:
        return self._home.keeps_memory

    @property
    def values(self) -> Tensor:
        return self.weight.detach()

    def spans(self) -> Iterator[Span]:
        """The parts of parameters that lie in it; `Span.offset` counts from `start`."""
        return self._layout.spans(self._begin + self.start, self._begin + self.stop)

    # -- at rest --------------------------------------------------------------------------------------------------

    def rest(self, state: Mapping[str, object] | None = None) -> None:
        """Go to rest for the first time, with `state`, what the optimizer keeps for it."""
        if self._on_write is not None:
            self._on_write(self)
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

    @contextlib.contextmanager
    def _opened(self, write: bool, kinds: Collection[str] | None) -> Iterator[None]:
        if self._shelf is None:
            yield
            return
        with self._shelf.open(write=write, kinds=kinds):
            yield
            if write and self._on_write is not None:
                self._on_write(self)

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

    def owe(self, step: Callable[[], None], grad: Tensor) -> None:
        """Have `step`, which needs `grad`, called once and inside `open`, before anybody sees the values again."""
        assert self._debt is None, "a shard owes one step at a time"
        self._debt, self.owed_grad = step, grad

    def begin_fetch(self) -> None:
        """Have what a step needs that is owed read ahead."""
        if self._debt is not None and self._shelf is not None:
            self._shelf.begin_fetch()

    def pay(self) -> None:
        """Make the step that is owed. What it raised is raised again by every later call."""
        if self._failure is not None:
            raise self._failure
        if self._debt is None:
            return
        step, self._debt, self.owed_grad = self._debt, None, None
        try:
            with self._opened(write=True, kinds=None):
                step()
        except BaseException as error:
            self._failure = error
            raise

    # -- gradients ------------------------------------------------------------------------------------------------

    def add_grad(self, at: int, values: Tensor, scale: float) -> None:
        """Add `scale * values` to the gradient of the elements from `at` on.

        A reduction brings all of a shard, in parts, from its start on. The first one writes: nothing needs zeroing.
        """
        grad = self._grad_to_change()
        if grad is None:
            grad = self.weight.grad = self._empty_grad()
            self._written = False
        values = values.to(grad.device)
        target = grad[at - self.start : at - self.start + values.numel()]
        if self._written:
            target.add_(values, alpha=scale)
            return
        torch.mul(values, scale, out=target)
        self._written = at + values.numel() == self.stop

    def set_grad(self, offset: int, values: Tensor) -> None:
        """Make `values` the gradient of the elements from `offset` on, counted in the shard."""
        grad = self._grad_to_change()
        if grad is None:
            grad = self.weight.grad = self._empty_grad().zero_()
            self._written = True
        grad[offset : offset + values.numel()] = values

    def _grad_to_change(self) -> Tensor | None:
        if self.weight.grad is not None and self._debt is not None:
            self.pay()  # the step that is owed needs it as it is
        return self.weight.grad

    def _empty_grad(self) -> Tensor:
        # Not `empty_like`: at rest the weight may be a shell.
        return torch.empty(self.numel, dtype=self.weight.dtype, device=self.weight.device)


class SkippedParams:
    """Keeps an optimizer step from changing parameters that got no gradient at all, as torch skips a `grad` of None.

    A flat tensor cannot leave elements out of a step (weight decay and momentum would move them), so their weights and
    state are saved before it and restored after it; state that the step has made anew is cleared. The step count is
    that of all. Whether another rank sent a gradient is left to the device, for which the host need not wait.

    Args:
        shard: with a gradient.
        spans: elements [start, stop) of it for which this rank sent none.
    """

    def __init__(self, shard: MasterShard, spans: Iterable[tuple[int, int]]) -> None:
        grad = shard.weight.grad
        assert grad is not None
        self._shard = shard
        self._spans = [(start, stop, grad[start:stop].any()) for start, stop in spans]
        self._saved: list[dict[str, Tensor]] = []

    def save(self, state: Mapping[str, object]) -> None:
        """Keep the elements, to be put back if no rank sent a gradient for them; `state` is the optimizer's."""
        flats = self._flats(state)
        self._saved = [
            {kind: flat[start:stop].clone() for kind, flat in flats.items()} for start, stop, _ in self._spans
        ]

    def restore(self, state: Mapping[str, object]) -> None:
        """Undo what the step has done to them; `state` is the optimizer's now."""
        for (start, stop, sent), saved in zip(self._spans, self._saved, strict=True):
            for kind, flat in self._flats(state).items():
                now = flat[start:stop]
                now.copy_(torch.where(sent, now, saved.get(kind, torch.zeros_like(now))))
        self._saved = []

    def _flats(self, state: Mapping[str, object]) -> dict[str, Tensor]:
        return {MASTER: self._shard.values, **self._shard.flats_in(state)}
