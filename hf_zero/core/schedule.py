"""When units are unsharded, resharded and reduced: hooks around forward and backward, order, prefetch.

[Note: backward order] Autograd runs, of all nodes that are ready, the one created last in forward. So when the
gradient of an output of call k of a hooked module is complete, every node created after that output has run: all calls
after k are done, their weights included, and can be resharded. (A parameter's own gradient is no such signal where
some weights are frozen: the input gradient of a frozen layer may be computed after it.) Reentrant checkpointing runs a
backward pass inside the backward pass; when the outer one goes on, the inner ones, with higher ids, are over. What it
calls in forward has no gradients of its own then; the gradient of its input says that it is done.

[Note: reductions] All ranks must issue the same collectives in the same order, but which gradients arrive may differ
between them (experts without tokens, branches). So a unit is reduced when backward has left it behind for good, with
zeros for what is missing: that moment depends on the calls of modules only. Where even these differ, at stages 0 to 2,
the order is still the same, last unit first.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import Enum

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from hf_zero.core import guard
from hf_zero.core.gradients import GradientBuffer
from hf_zero.core.hooks import Hook, NoHook, in_backward
from hf_zero.core.order import ForwardOrder, HookPoint, Limits, Place, Progress
from hf_zero.core.outputs import find_tensors, leaves
from hf_zero.core.reductions import Reductions
from hf_zero.core.unit import Tally, Unit, UnitState
from hf_zero.errors import ZeroRuntimeError


logger = logging.getLogger(__name__)


class Phase(Enum):
    """What the model is doing, between hooks."""

    IDLE = "idle"
    FORWARD = "forward"  # from the model's pre_forward to its post_forward
    BACKWARD = "backward"  # from the first backward hook to the end-of-backward callback


_ALLOWED = {
    (Phase.IDLE, Phase.FORWARD),
    (Phase.FORWARD, Phase.IDLE),
    (Phase.IDLE, Phase.BACKWARD),
    (Phase.FORWARD, Phase.BACKWARD),  # a gradient taken inside the model's own forward
    (Phase.BACKWARD, Phase.IDLE),
}


class Schedule:
    """Reacts to the hooks of one model."""

    def __init__(
        self,
        units: list[Unit],
        *,
        limits: Limits,
        unsharded: Tally,
        reduce_every_microbatch: bool,
        stop_at_node: bool = False,
    ) -> None:
        self.units = units
        self._unsharded = unsharded
        self.limits = limits
        self.reduce_every_microbatch = reduce_every_microbatch
        self._stop_at_node = stop_at_node  # under no_sync() sums go as far as the node
        self.sync = True  # False inside no_sync()
        self.phase = Phase.IDLE
        self.before_forward: Callable[[], None] = NoHook()
        self.before_backward: Callable[[], None] = NoHook()
        self.after_forward: Callable[[bool], None] = NoHook()  # with whether all ranks make it together
        self.after_backward: Callable[[bool], None] = NoHook()
        self._order, self._progress = ForwardOrder(), Progress()
        self._differentiable = False  # gradients will be taken of what the forward pass under way calls...
        self._began = 0  # ...which began after so many calls
        self._inside_call = False  # of modules that count as one: see `as_one_call`
        self._live: dict[Unit, tuple[int, int]] = {}  # unsharded for (backward pass, call): see [Note: backward order]
        self.units_changed()

    def _enter(self, phase: Phase) -> None:
        assert (self.phase, phase) in _ALLOWED, f"invalid phase transition: {self.phase} -> {phase}"
        self.phase = phase

    # -- registration ---------------------------------------------------------------------------------------------

    def register(self, points: list[tuple[nn.Module, HookPoint]]) -> list:
        """Install the hooks of the modules; the handles undo it."""
        handles = []
        for module, point in points:
            # A compiled module calls its hooks, too: the compiler must not look into them.
            pre = Hook(torch.compiler.disable(self._pre_forward_hook), point)
            post = Hook(torch.compiler.disable(self.post_forward), point)
            handles.append(module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(post, always_call=True))
        return handles

    def watch(self, unit: Unit) -> list:
        """Have `_on_grad` called for every trained parameter of a unit; the handles undo it.

        The garbage collector does not see what these hooks hold, so they hold nothing: who forgets a model frees it.
        """
        here = weakref.ref(self)
        return [
            param.register_post_accumulate_grad_hook(functools.partial(_on_grad, here, weakref.ref(gradient), index))
            for gradient in unit.gradients
            for index, param in enumerate(gradient.buffer.params)
        ]

    def units_changed(self) -> None:
        """Units were replaced: forget what is known of the old ones."""
        self._reductions = Reductions(self.units, overlap=self.limits.overlap)
        self._any_sharded = any(unit.sharded for unit in self.units)
        self._any_fetched = any(unit.is_fetched for unit in self.units)
        self._order.forget()
        self._progress.forget()
        self._live.clear()

    def _pre_forward_hook(self, point: HookPoint, module: nn.Module, args: tuple, kwargs: dict) -> None:
        inputs = []
        if torch.is_grad_enabled() or self._differentiable:
            inputs = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        point.received = {id(tensor): tensor._version for tensor in inputs}
        self.pre_forward(point, inputs)

    # -- forward --------------------------------------------------------------------------------------------------

    def pre_forward(self, point: HookPoint, inputs: list[Tensor]) -> None:
        """Unshard what the call needs; `inputs` are those of its inputs that require a gradient."""
        if self._inside_call:
            return
        if in_backward():  # recomputation under activation checkpointing
            self._recompute(point)
            return
        if point.is_root:
            self._begin_forward(point)
        elif self.phase is Phase.IDLE and self._order.begins_at(point):  # a part of the model is called by itself
            self._begin_pass(point)
        if self._differentiable and not torch.is_grad_enabled():  # reentrant checkpointing
            self._hook_inputs(inputs)
        self._order.visit(point)
        if self._differentiable:
            self._progress.use(point.units, self._order.calls)
        for unit in point.units:
            unit.unshard()
        self._gather_ahead(self._order.upcoming(then_backward=False))

    def _begin_forward(self, point: HookPoint) -> None:
        if self.phase is not Phase.IDLE:  # an exception has cut off the pass before
            self.abort()
        self.before_forward()
        self._enter(Phase.FORWARD)
        self._begin_pass(point)
        if not self._differentiable:
            self.reshard_all()  # nothing that was read or kept for a backward pass is needed by an evaluation

    def _begin_pass(self, point: HookPoint) -> None:
        self._order.begin(point)
        self._began = self._order.calls
        self._differentiable = torch.is_grad_enabled()
        if self._differentiable:
            self._progress.begin_forward()
            # These may have been read before, too: their gradients can come when all calls are left behind.
            self._progress.use([unit for unit in self.units if unit.accessed], self._began)

    @contextlib.contextmanager
    def as_one_call(self, point: HookPoint) -> Iterator[list[Tensor]]:
        """Calls of modules inside are one of `point`, which has their units; it returns what is put into the list."""
        outputs: list[Tensor] = []
        point.received = {}
        self.pre_forward(point, [])
        self._inside_call = True
        try:
            yield outputs
        finally:
            self._inside_call = False
            self.post_forward(point, None, (), outputs)

    def post_forward(self, point: HookPoint, module: nn.Module | None, args: tuple, output: object) -> None:
        if self._inside_call:
            return
        will_differentiate = self._hook_outputs(point, output)
        if in_backward():
            return
        if not point.is_root:
            for unit in point.units:
                if not (unit.sharded and self._used_again_soon(unit, will_differentiate)):
                    self._reshard(unit)
        elif self.phase is Phase.FORWARD:
            self._order.complete()
            if not will_differentiate:
                self._progress.forget_since(self._began)
                self.reshard_all()
            self._enter(Phase.IDLE)
            self.after_forward(self._any_sharded and output is not None)  # None: an exception is on its way

    def open_to_reads(self, unit: Unit) -> None:
        """Parameters can be read from outside of their modules from here on: as if one of these was called."""
        if self._differentiable and self._order.is_open and not in_backward():
            self._progress.use([unit], self._order.note_read())

    def _used_again_soon(self, unit: Unit, then_backward: bool) -> bool:
        """Whether keeping the unit saves a gather within the reuse distance (the last of forward: at no distance)."""
        passed = 0
        for point in self._order.upcoming(then_backward):
            if unit in point.units:
                return passed == 0 or self._unsharded.numel <= self.limits.live
            passed += sum(other.numel for other in point.units)
            if passed > self.limits.reuse:
                break
        return False

    def _gather_ahead(self, upcoming: Iterable[HookPoint]) -> None:
        if not (self._any_sharded and self.limits.overlap and self.limits.prefetch):
            return
        ahead = 0
        for point in upcoming:
            units = [unit for unit in point.units if unit.sharded]
            numel = sum(unit.numel for unit in units)
            resting = [unit for unit in units if unit.state is UnitState.RESTING]
            live = self._unsharded.numel + sum(unit.numel for unit in resting)
            if ahead and (ahead + numel > self.limits.prefetch or live > self.limits.live):
                for unit in resting:  # its turn is next: have its slice in memory by then
                    unit.begin_fetch()
                return
            for unit in resting:
                unit.begin_unshard()
            ahead += numel
            if ahead >= self.limits.prefetch and not self._any_fetched:
                return

    def _hook_outputs(self, point: HookPoint, output: object) -> bool:
        """Have a hook called before a gradient enters this call; whether there is such a gradient."""
        if not torch.is_grad_enabled():
            return False
        tensors, objects = find_tensors(output)
        if objects and not tensors:
            self._check_is_not_trained(point, objects)
        hook = functools.partial(self._reach, self._order.here)
        if point.is_root or point.reads_weights_in_backward:
            hook = functools.partial(self.pre_backward, point, self._order.here)
        differentiable = False
        for tensor in tensors:
            if tensor.requires_grad:
                differentiable = True
                # An input that is handed on, unchanged, belongs to the call that made it.
                if point.received.get(id(tensor)) != tensor._version:
                    tensor.register_hook(hook)
        return differentiable

    def _check_is_not_trained(self, point: HookPoint, objects: list[object]) -> None:
        """Raises ZeroRuntimeError where backward would find the weights released: nothing announces it."""
        if self._any_sharded and any(unit.gradients for unit in (self.units if point.is_root else point.units)):
            module = f"module '{point.name}'" if point.name else "the model"
            kinds = ", ".join(dict.fromkeys(type(item).__name__ for item in objects))
            raise ZeroRuntimeError(
                f"{module} returned {kinds}, in which hf_zero finds no tensor: backward would not gather its weights "
                "again. Return tensors, or a container or dataclass of them; where nothing is trained, call it under "
                "torch.no_grad()"
            )

    def _hook_inputs(self, inputs: list[Tensor]) -> None:
        """Have `_reach` called when backward has left the call that follows."""
        for tensor in inputs:
            tensor.register_hook(functools.partial(self._reach, self._order.here))

    # -- backward -------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        self.before_backward()
        self._enter(Phase.BACKWARD)
        self._order.complete()
        self._order.begin_backward()
        self._reductions.begin_backward()
        Variable._execution_engine.queue_callback(self.finish_backward)

    def pre_backward(self, point: HookPoint, place: Place, grad: Tensor) -> None:
        if self._any_sharded and torch.is_grad_enabled():
            raise ZeroRuntimeError(
                "gradients of gradients (create_graph=True) are not supported at stage 3, where weights are released "
                "after each pass: use stage 2"
            )
        task = torch._C._current_graph_task_id()
        self._reshard_done(task, place.calls, point)
        self._reach(place, grad)
        for unit in self._unshard_in_backward(point):
            self._live[unit] = (task, place.calls)
        self._gather_ahead(self._order.upcoming_in_backward(point))

    def _reach(self, place: Place, grad: Tensor) -> None:
        """Backward has come back to `place`: reduce what it has left behind (see [Note: reductions])."""
        if self.phase is not Phase.BACKWARD:
            self._begin_backward()
        self._order.reach(place)
        if self._progress.reach(place.calls) and self._reducing_now:
            self._reductions.begin(self._progress.has_left, to_owner=self._to_owner)

    def _recompute(self, point: HookPoint) -> None:
        if self.phase is not Phase.BACKWARD:
            self._begin_backward()
        task = torch._C._current_graph_task_id()
        self._reshard_done(task, self._order.calls, point)
        upcoming = self._order.recompute(point)
        self._progress.use(point.units, self._order.calls)
        for unit in self._unshard_in_backward(point):
            self._live.setdefault(unit, (task, 0))  # until its own pre_backward has come
        self._gather_ahead(upcoming)

    def _unshard_in_backward(self, point: HookPoint) -> list[Unit]:
        """Unshard what backward has come to, and answer what is to be resharded when it has left it behind."""
        self._reductions.come_to(point.units)
        for unit in point.units:
            unit.unshard()
        return [] if point.is_root else [unit for unit in point.units if unit.sharded]

    def _reshard_done(self, task: int, call: int, point: HookPoint) -> None:
        """Reshard what backward has left behind (see [Note: backward order])."""
        for unit, (live_task, live_call) in list(self._live.items()):
            if unit not in point.units and (live_task > task or (live_task == task and live_call > call)):
                del self._live[unit]
                self._reshard(unit)

    @property
    def _reducing_now(self) -> bool:
        return self.sync or self.reduce_every_microbatch

    @property
    def _to_owner(self) -> bool:
        return self.sync or not self._stop_at_node

    def finish_backward(self) -> None:
        """The end of a backward pass: reduce what is left, release everything."""
        if self._reducing_now:
            self._reductions.finish(to_owner=self._to_owner)
        self._progress.end_backward()
        self.reshard_all()
        self._enter(Phase.IDLE)
        self.after_backward(self._reducing_now)

    def reduce_all(self) -> None:
        """Reduce everything that is not reduced yet, and wait for it."""
        self._reductions.finish()

    # -- between passes -------------------------------------------------------------------------------------------

    @property
    def has_local_gradients(self) -> bool:
        """Whether passes have left sums that were not reduced; the same on every rank."""
        return self._reductions.missing

    def _reshard(self, unit: Unit) -> None:
        if not unit.pins and not unit.accessed:
            unit.reshard()

    def reshard_all(self) -> None:
        """Release everything outside of explicit scopes, also what a read from outside has gathered."""
        self._live.clear()
        for unit in self.units:
            if not unit.pins:
                unit.reshard()

    def abort(self) -> None:
        """Forget a pass that an exception has cut off.

        Of a backward pass nobody can tell what it has added to earlier ones, so all gradients since the last step go.
        """
        self._reductions.wait()
        if self.phase is Phase.BACKWARD:
            logger.warning(
                "hf_zero: a backward pass failed: the gradients of all micro-batches since the last step are dropped"
            )
            for unit in self.units:
                for gradient in unit.gradients:
                    gradient.forget()
        self._order.complete()
        self._progress.end_backward()
        self.reshard_all()
        self.phase = Phase.IDLE


def _on_grad(
    here: weakref.ref[Schedule], holder: weakref.ref[GradientBuffer], index: int, param: nn.Parameter
) -> None:
    """A parameter's gradient is there: have its buffer take it over."""
    schedule, gradient = here(), holder()
    if schedule is not None and gradient is not None:
        if schedule.phase is not Phase.BACKWARD:
            schedule._begin_backward()
        gradient.add(index, guard.take_grad(param))
