"""The units of one model and the hooks that follow its calls, and how units are replaced where parameters change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_zero.core.build import UnitBuilder
from hf_zero.core.flat_buffer import FlatBuffer
from hf_zero.core.gradients import GradientBuffer
from hf_zero.core.hooks import Hook
from hf_zero.core.order import HookPoint
from hf_zero.core.partition import HookPlan, UnitPlan
from hf_zero.core.precision import meet_weight
from hf_zero.core.schedule import Schedule
from hf_zero.core.unit import Unit, UnitListener


class Structure:
    """Makes units from plans, and puts other ones in their place; a collective.

    Attributes:
        units: in the order of their plans; always the same list.
    """

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[UnitPlan],
        hooks: Sequence[HookPlan],
        builder: UnitBuilder,
        listener: UnitListener,
    ) -> None:
        self._builder, self._listener = builder, listener
        builder.reserve(model)
        made = {plan: builder.build(plan, index, listener) for index, plan in enumerate(plans)}
        self.units = list(made.values())
        self._points: list[tuple[nn.Module, HookPoint]] = []
        for hook in hooks:
            units = [made[plan] for plan in hook.units]
            point = HookPoint(hook.name, units, hook.reads_weights_in_backward, is_root=hook.module is model)
            self._points.append((hook.module, point))
        self._handles: list[RemovableHandle] = []
        self._watches: dict[Unit, list[RemovableHandle]] = {}

    @property
    def buffers(self) -> Iterator[FlatBuffer]:
        return (buffer for unit in self.units for buffer in unit.buffers)

    @property
    def gradients(self) -> list[GradientBuffer]:
        return [gradient for unit in self.units for gradient in unit.gradients]

    def hook(self, model: nn.Module, schedule: Schedule) -> None:
        """Have `schedule` follow the calls of the model and the gradients of all units."""
        self._schedule = schedule
        self._handles = schedule.register(self._points)
        self._watches = {unit: schedule.watch(unit) for unit in self.units}
        for module in self._builder.precision.layers_to_hook(model):
            self._handles.append(module.register_forward_pre_hook(Hook(meet_weight)))

    def replace(self, unit: Unit, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Make a unit anew, some of its parameters with other values (of other shapes); a collective.

        Masters and optimizer states of the old one are gone afterwards.
        """
        plan = UnitPlan(unit.name, dict(unit.named_parameters()), persistent=not unit.sharded)
        for handle in self._watches.pop(unit):
            handle.remove()
        unit.dissolve()
        for param, value in values.items():
            param.data = value
        new = self._builder.build(plan, unit.index, self._listener)
        self.units[unit.index] = new
        self._watches[new] = self._schedule.watch(new)
        for _, point in self._points:
            point.units = [new if candidate is unit else candidate for candidate in point.units]

    def dissolve(self) -> None:
        """Give the model its whole parameters back, and take the hooks away; a collective."""
        for handle in [*self._handles, *(handle for handles in self._watches.values() for handle in handles)]:
            handle.remove()
        for unit in self.units:
            unit.dissolve()
