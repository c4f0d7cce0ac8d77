"""Steps master shards: on the device at once, elsewhere each by a twin of the optimizer when it is next opened.

[Note: twins] A twin of an optimizer has its class, so its own `step` code runs; its options and attributes are those
of the moment of `optimizer.step()`, and its `state` is the optimizer's own, so that states are made and kept there.
The optimizer itself makes an ordinary step at that moment, with hooks and counters, of all masters on the device:
torch leaves out a parameter without a gradient, and all other masters have theirs taken away before it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_zero.core.gradients import GradientBuffer
from hf_zero.core.heap import heap
from hf_zero.core.master import MasterShard
from hf_zero.core.placement import Place
from hf_zero.core.skipped_params import SkippedParams
from hf_zero.core.step import skipped_params
from hf_zero.core.step_place import StepPlace
from hf_zero.core.twins import Snapshot


@dataclass(kw_only=True)
class _Taken:
    """What was taken away from an ordinary step."""

    snapshot: Snapshot
    device: torch.device  # of the model
    on_device: bool  # rather than on the host
    grads: dict[MasterShard, tuple[int, Tensor]] = field(default_factory=dict)  # group and gradient
    skipped: dict[MasterShard, SkippedParams] = field(default_factory=dict)

    def step(self, shard: MasterShard) -> None:
        """Step one shard, which is open."""
        group, grad = self.grads.pop(shard)
        skipped, states = self.skipped.pop(shard, None), self.snapshot.optimizer.state
        present, shard.weight.grad = shard.weight.grad, grad
        try:
            with shard.on_device(self.device, states) if self.on_device else contextlib.nullcontext():
                if skipped is not None:
                    skipped.save(states.get(shard.weight, {}))
                on_host = shard.weight.device.type != self.device.type
                self.snapshot.step(group, shard.weight, on_host=on_host)
                if skipped is not None:
                    skipped.restore(states.get(shard.weight, {}))
        finally:
            shard.weight.grad = present
        shard.keep(states.get(shard.weight, {}))


class Stepper:
    """Makes the steps of one engine's optimizers; `before` and `after` are called around each ordinary one.

    Steps that the host makes for a device need no thread of their own: the device computes what it was told to
    compute for one layer while the host steps the shards of the next.

    Attributes:
        owing: shards may owe a step; whoever has had all of them make it says so here.
    """

    def __init__(self, device: torch.device, place: StepPlace) -> None:
        self.owing = False
        self._device, self._place = device, place
        self._near: dict[MasterShard, SkippedParams] = {}
        self._taken: _Taken | None = None
        self._random = {"cpu": torch.get_rng_state()}  # for optimizers that draw numbers

    def before(
        self, optimizer: torch.optim.Optimizer, groups: list[list[MasterShard]], gradients: list[GradientBuffer]
    ) -> None:
        """Take away from the ordinary step what it must not do; `groups` are the shards of each group."""
        self.restore_gradients()
        skipped = skipped_params((shard for group in groups for shard in group), gradients)
        far = {
            shard: (number, shard.weight.grad)
            for number, group in enumerate(groups)
            for shard in group
            if shard.place is not Place.DEVICE and shard.weight.grad is not None
        }
        if far:
            mine = {shard: skipped.pop(shard) for shard in far if shard in skipped}
            self._taken = _Taken(
                snapshot=Snapshot.take(optimizer),
                device=self._device,
                on_device=self._place.on_device,
                grads=far,
                skipped=mine,
            )
            for shard in far:
                shard.weight.grad = None
        self._near = skipped
        for shard, params in skipped.items():
            params.save(optimizer.state.get(shard.weight, {}))

    def after(self, optimizer: torch.optim.Optimizer, on_debts: Callable[[], None]) -> None:
        """The ordinary step is made: all other shards owe theirs from here on, and `on_debts` is called if any do."""
        for shard, params in self._near.items():
            params.restore(optimizer.state.get(shard.weight, {}))
        self._near = {}
        taken = self._taken
        self.restore_gradients()
        if taken is not None:
            self.owing = True
            for shard, (_, grad) in taken.grads.items():
                shard.owe(functools.partial(self._pay, taken, shard), grad)
            on_debts()

    def restore_gradients(self) -> None:
        """Give shards the gradients again that `before` has taken; they keep them until `zero_grad`."""
        if self._taken is not None:
            for shard, (_, grad) in self._taken.grads.items():
                shard.weight.grad = grad
            self._taken = None

    def _pay(self, taken: _Taken, shard: MasterShard) -> None:
        with self._by_itself():
            taken.step(shard)
        if not shard.keeps_memory:
            # Its gradient is gone. What the C library keeps of freed memory is as much as the disk has taken over.
            heap.has_freed(shard.weight.nbytes)

    @contextlib.contextmanager
    def _by_itself(self) -> Iterator[None]:
        """Inside, nothing is left of the forward pass that a step may be made in, and nothing of the step after it."""
        kinds = {"cpu"}
        if self._place.on_device and self._device.type != "meta":
            kinds.add(self._device.type)
        outside = {kind: _generator(kind).get_rng_state() for kind in kinds}
        for kind in kinds & self._random.keys():
            _generator(kind).set_rng_state(self._random[kind])
        try:
            with contextlib.ExitStack() as stack:
                for kind in kinds:
                    stack.enter_context(torch.autocast(kind, enabled=False))
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
                yield
        finally:
            for kind, state in outside.items():
                self._random[kind] = _generator(kind).get_rng_state()
                _generator(kind).set_rng_state(state)


def _generator(kind: str) -> Any:
    """The functions for the random generator of a kind of device."""
    return torch if kind == "cpu" else torch.get_device_module(kind)
