"""The engine: wires the parts that train one model, and tells what happens around each step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_zero.comm.communicator import Communicator
from hf_zero.config import ZeroConfig
from hf_zero.core import build, grad_norm, guard, packed
from hf_zero.core.binding import Binding
from hf_zero.core.buffers import BufferSync
from hf_zero.core.build import DTYPES
from hf_zero.core.disk_failures import in_one_pass
from hf_zero.core.extents import placements_of
from hf_zero.core.flat_buffer import FlatBuffer
from hf_zero.core.gradients import GradientBuffer, release_unused
from hf_zero.core.homes import Homes
from hf_zero.core.loss_scale import LossScaler
from hf_zero.core.optimizer_set import OptimizerSet
from hf_zero.core.partition import partition
from hf_zero.core.placement import Placement
from hf_zero.core.precision import Precision
from hf_zero.core.prepared import attach, convert_others, detach
from hf_zero.core.schedule import Schedule
from hf_zero.core.step import StepControl
from hf_zero.core.stepping import Stepper
from hf_zero.core.structure import Structure
from hf_zero.core.unit import Unit, raise_on_access, raise_on_grad_read
from hf_zero.errors import ZeroRuntimeError


class ZeroEngine:
    """Shards `model` in place over the ranks of `group` and drives it.

    Args:
        model: any module; its parameters stay the same objects and become views of flat storage.
        config: stage, precision and limits.
        group: the process group of all data-parallel (and tensor-parallel) ranks (default: all ranks; none: one
            process, nothing is sharded), or a communicator made for it.
        device: where flat buffers live (default: where the first parameter is; with NCCL, the current CUDA device
            for a model on the CPU).
        trainable: False for a model that is only evaluated: no gradients, no masters.
        scaler: the loss scale, where several engines share one.
        mixins: added to the class of the model; see `prepared.attach`.
        homes: where this rank's slices rest between uses (default: as `config` says).
    """

    def __init__(
        self,
        model: nn.Module,
        config: ZeroConfig,
        *,
        group: dist.ProcessGroup | Communicator | None = None,
        device: torch.device | None = None,
        trainable: bool = True,
        scaler: LossScaler | None = None,
        mixins: Sequence[type] = (),
        homes: Homes | None = None,
    ) -> None:
        build.check_model(model, device)
        self.config, self.trainable = config, trainable
        self.mesh = build.connect(model, config, group, device)
        self.comm = self.mesh.everyone
        self.device = build.default_device(model, self.comm.transport_name) if device is None else torch.device(device)
        self.placements = placements_of(config, self.mesh.topology, self.mesh.world.shares)
        self.homes = homes or Homes.choose(config, self.device, self.comm)
        self.precision = Precision(model, DTYPES.get(config.mixed_precision), self.device)
        self.scaler = scaler or (build.make_scaler(config) if trainable else None)
        self.control = StepControl(
            self.mesh,
            device=self.device,
            sharded=self.placements.optimizer is Placement.SHARDED,
            scaler=self.scaler,
            checks=config.mixed_precision != "no" and (config.check_grad_overflow or self.scaler is not None),
            max_consecutive_skips=config.max_consecutive_skips,
        )
        self._stepper = Stepper(self.device, self.homes.step_place)
        self._model = weakref.ref(model)
        weakref.finalize(self, self.homes.close_apart).atexit = False
        builder = build.UnitBuilder(
            config=config,
            mesh=self.mesh,
            placements=self.placements,
            homes=self.homes,
            precision=self.precision,
            trainable=trainable,
            scaler=self.scaler,
        )
        plans, hooks = partition(model, builder.persistence(model), builder.largest_unit)
        build.agree_on_values(model, self.comm, self.device)
        self._module_buffers = BufferSync(model, self.comm, self.device)
        self._structure = Structure(model, plans, hooks, builder, self)
        self._optimizers = OptimizerSet(self.units, self.homes)
        self.schedule = Schedule(
            self.units,
            limits=build.make_limits(config),
            unsharded=builder.unsharded,
            reduce_every_microbatch=self.placements.gradient is Placement.SHARDED and config.no_sync != "local",
            stop_at_node=config.no_sync == "node",
        )
        self.schedule.before_forward, self.schedule.after_forward = self._before_forward, self._after_pass
        self.schedule.before_backward, self.schedule.after_backward = self._before_backward, self._after_pass
        self._structure.hook(model, self.schedule)
        attach(model, self, mixins)

    def __deepcopy__(self, memo: dict) -> None:
        """A copy of the model is an ordinary module without an engine."""

    # -- construction -------------------------------------------------------------------------------------------

    def before_access(self, unit: Unit, param: nn.Parameter, operation: str) -> None:
        if unit.sharded and self.config.param_access == "raise":
            raise_on_access(unit, param, operation)

    def on_open(self, unit: Unit) -> None:
        self.schedule.open_to_reads(unit)

    def before_grad_read(self, unit: Unit, gradient: GradientBuffer, param: nn.Parameter, operation: str) -> None:
        if gradient.fetching_gathers and self.config.param_access == "raise":
            raise_on_grad_read(unit, param, operation)
        release_unused(self._structure.gradients, gradient)
        self.control.gradients_changed()  # the reader may change them

    def before_grad_write(self) -> None:
        self.control.gradients_changed()

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None, "the model of this engine is gone"
        return model

    def owns(self, param: nn.Parameter) -> bool:
        return guard.is_prepared(param) and guard.owner_of(param) in self.units

    @property
    def units(self) -> list[Unit]:
        return self._structure.units

    @property
    def buffers(self) -> Iterator[FlatBuffer]:
        return self._structure.buffers

    @property
    def bindings(self) -> list[Binding]:
        return self._optimizers.bindings

    @property
    def masters(self) -> list[Tensor]:
        """The flat weights of this rank's slices, which have the gradients."""
        return self._optimizers.masters

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [binding.optimizer for binding in self.bindings]

    # -- optimizers and structure -----------------------------------------------------------------------------------

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Have `optimizer` step this engine's masters. Raises ValueError as `optimizer.adopt` does."""
        self.settle()
        self._optimizers.attach(optimizer, self)
        optimizer.register_step_pre_hook(lambda *_: self.before_step(optimizer))
        optimizer.register_step_post_hook(lambda *_: self.after_step(optimizer))

    def adopt_group(self, optimizer: torch.optim.Optimizer) -> None:
        """A group was added to an attached optimizer."""
        self.refresh_structure()
        self.settle()
        self._optimizers.adopt_group(optimizer)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict:
        """What `optimizer.state_dict()` answers; a collective."""
        self.settle()
        return self._optimizers.state_of(optimizer)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state_dict: dict) -> None:
        """What `optimizer.load_state_dict()` does. Raises ValueError where the state does not fit."""
        self.settle()
        self._optimizers.load_state_of(optimizer, state_dict)

    def refresh_structure(self) -> None:
        """Rebuild units in which frozen parameters are to be trained from now on; between optimizer steps only."""
        outdated = [unit for unit in self.units if unit.outdated]
        if outdated and self.trainable and not self.has_gradients:
            self._rebuild(outdated, {})

    def replace_values(self, unit: Unit, param: nn.Parameter, value: Tensor) -> None:
        """`param.data = value` with another shape (resized embeddings): its optimizer state starts afresh."""
        self._rebuild([unit], {param: value})

    @in_one_pass
    def _rebuild(self, units: list[Unit], replaced: dict[nn.Parameter, Tensor]) -> None:
        self.schedule.reshard_all()
        self.settle()
        present = self._optimizers.gather(units)
        whole = {param: state for param, state in present.items() if param not in replaced}
        for unit in units:
            self._structure.replace(unit, replaced)
        self._optimizers.rebuild(whole)
        self.schedule.units_changed()

    # -- conversions and copies -------------------------------------------------------------------------------------

    @in_one_pass
    def convert(self, function: Callable[[Tensor], Tensor]) -> None:
        """Do to buffers and parameters what `function` does to a tensor (`model.to`); masters stay as they are.

        Raises ValueError where it would move parameters, or give them more precision than their masters have.
        """
        dtypes = {}
        packed.check_conversion(self.model, function)
        for buffer in self.buffers:
            sample = function(torch.empty(0, dtype=buffer.dtype, device=self.device))
            buffer.check_conversion(sample)
            dtypes[buffer] = sample.dtype
        convert_others(self.model, function)
        if any(buffer.dtype != dtype for buffer, dtype in dtypes.items()):
            self.before_load()
            for unit in self.units:
                unit.cast(dtypes)

    def copy_parameters(self, memo: dict) -> None:
        """Put ordinary copies of all parameters into the memo of `copy.deepcopy`; a collective."""
        self._structure.copy_parameters(memo, self.comm)

    # -- the training loop ----------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: object) -> None:
        """`loss.backward()` on the scaled loss, leaving the engine ready for the next pass also when it fails."""
        try:
            (loss if self.scaler is None else loss * self.scaler.scale).backward(**kwargs)
        except BaseException as error:
            self.abort()
            guard.raise_if_released(error)
            raise

    def abort(self) -> None:
        """Forget a pass that an exception has cut off."""
        self.schedule.abort()
        self.homes.failures.leave_pass()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients of several micro-batches accumulate without (or, at stages 2 and 3, with) reduction."""
        before, self.schedule.sync = self.schedule.sync, False
        try:
            yield
        finally:
            self.schedule.sync = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all ranks together and return their norm before clipping (fp32 scalar)."""
        norm = self.control.measure(self._settle_gradients(), float(norm_type))
        grad_norm.clip_(self.masters, norm, float(max_norm))
        return norm

    @in_one_pass
    def undo(self) -> None:
        """Make the model an ordinary one again, with whole parameters of its own on every rank."""
        detach(self.model)
        self._structure.dissolve(self.model)
        self.homes.close()
        self.mesh.close()

    def zero_grad(self) -> None:
        self._stepper.restore_gradients()
        for gradient in self._structure.gradients:
            gradient.forget()

    def before_zero_grad(self, set_to_none: bool) -> None:
        """An attached optimizer is about to drop its gradients, or to make them zero where they are."""
        self._stepper.restore_gradients()
        if not set_to_none:
            self.settle()  # steps that are owed need them

    def drop_gradients_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget what its masters do not show: sums of micro-batches that were not reduced yet."""
        held = self._optimizers.held_by(optimizer)
        for gradient in self._structure.gradients:
            gradient.drop_sums(held)

    @property
    def has_gradients(self) -> bool:
        """Whether parameters have gradients since the last step; the same on every rank."""
        return any(gradient.present or gradient.unreduced for gradient in self._structure.gradients)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last optimizer step was left out because a gradient was inf or nan."""
        return self.control.skipped

    def _before_forward(self) -> None:
        self.refresh_structure()
        self.homes.failures.begin_pass()
        if self.trainable:
            self._module_buffers.before_forward(reduces=self.schedule.sync)

    def _after_pass(self, together: bool) -> None:
        """The end of a pass: where all ranks have come to it, what it has made is there, or all of them fail."""
        self.homes.end_pass(self.comm, together=together, land=together and self.schedule.sync)

    def _before_backward(self) -> None:
        self.homes.failures.begin_pass()
        for shard in self._optimizers.read_early:
            shard.begin_fetch()
        self._stepper.restore_gradients()
        self.mesh.prepare_reductions()
        self.control.begin_backward()

    def _settle_gradients(self) -> list[GradientBuffer]:
        """Everything that gradients are made of is in those of the masters, and no step needs them any more."""
        self._stepper.restore_gradients()
        if self._stepper.owing:
            self.settle()
        if self.schedule.has_local_gradients:  # a step right after no_sync()
            self.schedule.reduce_all()
        self.homes.land()
        for gradient in (gradients := self._structure.gradients):
            gradient.settle()
        return gradients

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Everything that the optimizer reads is complete, and no stale value outlives the step."""
        if not self.schedule.sync and self.comm.world_size > 1:
            raise ZeroRuntimeError(
                "optimizer.step() inside no_sync(): ranks share one optimizer, so none can step by its own gradients "
                "as LocalSGD does. Leave no_sync() for the last micro-batch and step behind it, without LocalSGD"
            )
        with self.homes.one_pass(self.comm):
            gradients = self._settle_gradients()
        self.control.before(gradients, optimizer, groups := self._optimizers.shards_of(optimizer))
        self._optimizers.give_to_owners(optimizer, gradients)
        self.before_rewrite()
        self._stepper.before(optimizer, groups, gradients)

    def before_rewrite(self) -> None:
        """The masters are about to be changed in place: they are complete, and nothing is made of them before it."""
        self.before_load(adopt=True)

    @in_one_pass
    def settle(self) -> None:
        """Have nothing of the last steps go on: gathers of what they have changed, steps that are owed."""
        self.homes.land()
        for unit in self.units:
            unit.finish_refresh()
        if self._stepper.owing:
            self._optimizers.settle()
            self._stepper.owing = False

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The masters have stepped, or owe it: bring up to date whatever holds casts of them."""
        self._stepper.after(optimizer, self._optimizers.begin_fetch)
        held = self._optimizers.held_by(optimizer)
        for gradient in self._structure.gradients:
            gradient.mark_stepped(held)
        self.control.end_step(optimizer)
        self.after_rewrite(exact=False)

    @in_one_pass
    def before_load(self, *, adopt: bool = False) -> None:
        """The masters are about to change: nothing may be made of the old ones, and no rank be reading them."""
        self.settle()
        for unit in self.units if adopt else ():
            unit.adopt_writes()
        self.schedule.reshard_all()
        self.mesh.fence()

    def anchor(self) -> None:
        """Make what follows masters by quantised differences equal to them, as after a resume; a collective."""
        self.mesh.forget_errors()
        if self.mesh.quantises_weights and self.mesh.column is not None:
            self.before_load()
            self.after_load()

    def after_load(self) -> None:
        """The masters have other values than before: casts of them are made anew."""
        self.after_rewrite(exact=True)

    @in_one_pass
    def after_rewrite(self, *, exact: bool) -> None:
        """The masters have changed: casts follow, by quantised differences where `exact` does not forbid it."""
        for unit in self.units:
            unit.begin_refresh(exact=exact)
            if unit.pins and unit.sharded:
                unit.restore()
        # Reads of peers' memory are synchronous: make them here, where ranks are in step, not in the next forward.
        self.mesh.node.drain(work for unit in self.units if not unit.sharded for work in unit.works)
        self.mesh.fence()


def engine_of(model: nn.Module) -> ZeroEngine | None:
    """The engine of a prepared model, None for any other module."""
    return model.__dict__.get("_zero_engine")
