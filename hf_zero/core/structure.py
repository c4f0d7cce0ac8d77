"""The units of one model and the hooks that follow its calls, and how units are replaced where parameters change."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_zero.comm import dtensors
from hf_zero.comm.communicator import MEETING_SECONDS, Communicator
from hf_zero.core.activations import Activations
from hf_zero.core.build import UnitBuilder
from hf_zero.core.flat_buffer import FlatBuffer
from hf_zero.core.gradients import GradientBuffer
from hf_zero.core.hooks import Hook
from hf_zero.core.order import HookPoint
from hf_zero.core.packed import read_parameters_only
from hf_zero.core.partition import HookPlan, UnitPlan, blocks_of
from hf_zero.core.precision import meet_weight
from hf_zero.core.schedule import Schedule
from hf_zero.core.tiled_loss import TiledLoss, language_model_in
from hf_zero.core.tiled_mlp import TiledMLPs, mlps_in
from hf_zero.core.unit import Unit, UnitListener
from hf_zero.errors import ZeroConfigError


logger = logging.getLogger(__name__)


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
        config, trains = builder.config, builder.trainable
        if trains and (config.tile_loss or config.tile_mlp) and any(map(dtensors.is_dtensor, model.parameters())):
            raise ZeroConfigError(
                "tile_loss and tile_mlp are not available for models that tensor-parallel ranks share out: leave them "
                "out, or train without tensor parallelism"
            )
        self._language_model = language_model_in(model) if trains and config.tile_loss else None
        self._mlps = mlps_in(model, blocks_of(model)) if trains and config.tile_mlp else []
        hooked = {hook.module for hook in hooks}
        for mlp in self._mlps:
            if any(part in hooked for part in mlp.modules() if part is not mlp):
                raise ZeroConfigError(
                    f"tile_mlp and unit_size {config.unit_size}: an MLP that is gathered in parts would be gathered "
                    "for each tile. Raise unit_size to the size of an MLP, or leave one of the two out"
                )
        self._in_parts = dtensors.take_over_sums(model)
        self._builder = builder = replace(builder, in_parts=self._in_parts)
        self._listener, self._plans = listener, list(plans)
        _tell_of_large_parameters(plans, builder)
        read_parameters_only(model)
        builder.reserve(model)
        made = {plan: builder.build(plan, index, listener) for index, plan in enumerate(plans)}
        self.units = list(made.values())
        self._points: list[tuple[nn.Module, HookPoint]] = []
        for hook in hooks:
            units = [made[plan] for plan in hook.units]
            point = HookPoint(hook.name, units, hook.reads_weights_in_backward, is_root=hook.module is model)
            self._points.append((hook.module, point))
        self._handles: list[RemovableHandle | TiledLoss | TiledMLPs] = []
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
        homes, config = self._builder.homes, self._builder.config
        if self._language_model is not None:
            self._handles.append(TiledLoss(self._language_model, config.tile_loss, schedule))
        if self._mlps:
            self._handles.append(TiledMLPs(self._mlps, config.tile_mlp))
        if homes.activations is not None and self._builder.trainable:
            self._handles += Activations(homes.activations, homes.device.device).follow(model)

    def replace(self, unit: Unit, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Make a unit anew, some of its parameters with other values (of other shapes); a collective.

        Masters and optimizer states of the old one are gone afterwards.
        """
        for handle in self._watches.pop(unit):
            handle.remove()
        unit.dissolve()
        for param, value in values.items():
            param.data = value
        new = self._builder.build(self._plans[unit.index], unit.index, self._listener)
        self.units[unit.index] = new
        self._watches[new] = self._schedule.watch(new)
        for _, point in self._points:
            point.units = [new if candidate is unit else candidate for candidate in point.units]

    def copy_parameters(self, memo: dict, comm: Communicator) -> None:
        """Put ordinary copies of all parameters into the memo of `copy.deepcopy`, a unit at a time; a collective."""
        named = zip(self.units, self._plans, strict=True)
        missing = {unit: [p for p in plan.params.values() if id(p) not in memo] for unit, plan in named}
        if any(unit.sharded and params for unit, params in missing.items()):
            comm.meet("copying the model", MEETING_SECONDS)
        for unit, params in missing.items():
            if params:
                with unit.readable():
                    for param in params:
                        copy.deepcopy(param, memo)

    def dissolve(self, model: nn.Module) -> None:
        """Give the model its whole parameters back, and take the hooks away; a collective."""
        for handle in [*self._handles, *(handle for handles in self._watches.values() for handle in handles)]:
            handle.remove()
        for unit in self.units:
            unit.dissolve()
        dtensors.give_back_sums(model, self._in_parts)


def _tell_of_large_parameters(plans: Sequence[UnitPlan], builder: UnitBuilder) -> None:
    """A module is gathered in parts, a parameter is not: say which ones are larger than what was asked for."""
    sizes = {name: dtensors.local(param).numel() for plan in plans for name, param in plan.params.items()}
    large = [name for name, numel in sizes.items() if numel > builder.largest_unit]
    if large and builder.mesh.everyone.rank == 0:
        most = max(large, key=sizes.__getitem__)
        logger.warning(
            "hf_zero: unit_size is %d, but %d parameter(s) have more elements ('%s' %d) and are gathered whole: "
            "tp_size shares out matrices over ranks, tile_loss the work of the output head",
            builder.config.unit_size,
            len(large),
            most,
            sizes[most],
        )
