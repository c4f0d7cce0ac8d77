"""When units are unsharded, resharded and reduced: hooks around forward and backward, order, prefetch.

[Note: backward order] Autograd runs, of all nodes that are ready, the one created last in forward. So when the
gradient of an output of call k of a hooked module is complete, every node created after that output has run: all calls
after k are done, their weights included, and can be resharded. (A parameter's own gradient is no such signal where
some weights are frozen: the input gradient of a frozen layer may be computed after it.) Reentrant checkpointing runs a
backward pass inside the backward pass; when the outer one goes on, the inner ones, with higher ids, are over.

[Note: reduction order] All ranks must issue the same reductions in the same order, but which gradients arrive, and
when, may differ between them (experts without tokens, branches). Reductions are therefore issued in one fixed order,
last unit first; what has not arrived by the end of backward is reduced as zeros.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from hf_zero import access
from hf_zero.errors import ZeroRuntimeError
from hf_zero.gradients import GradientBuffer
from hf_zero.hooks import Hook, NoHook
from hf_zero.order import ForwardOrder, HookPoint
from hf_zero.outputs import find_tensors
from hf_zero.unit import Unit, UnitState


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

# Reductions that may be under way at once: one runs while the next unit's gradients are collected.
_MAX_REDUCTIONS = 2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far ahead and how long values are held at stage 3, in elements; DeepSpeed's stage3_* keys of these names."""

    overlap: bool = True  # gather ahead and reduce behind, instead of waiting for each collective
    prefetch: int = 1  # gathered ahead: the next unit always, further ones as long as they fit
    live: int = 10**9  # not gathered ahead and not kept beyond this many
    reuse: int = 0  # kept after forward if used again before this many others


def in_backward() -> bool:
    """Whether autograd is running: forward hooks then belong to a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Schedule:
    """Reacts to the hooks of one model."""

    def __init__(self, units: list[Unit], *, limits: Limits, reduce_every_microbatch: bool) -> None:
        self.units = units
        self.limits = limits
        self.reduce_every_microbatch = reduce_every_microbatch
        self.sync = True  # False inside no_sync()
        self.phase = Phase.IDLE
        self.before_forward: Callable[[], None] = NoHook()
        self.before_backward: Callable[[], None] = NoHook()
        self._cursor = 0  # how many of `_gradients` have been issued in this backward pass
        self._reducing: deque[GradientBuffer] = deque()
        self._order = ForwardOrder()
        self._calls = 0  # forward calls of hooked modules so far
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
        """Have `on_grad` called for every trained parameter of a unit; the handles undo it."""
        return [
            param.register_post_accumulate_grad_hook(functools.partial(self.on_grad, gradient, index))
            for gradient in unit.gradients
            for index, param in enumerate(gradient.buffer.params)
        ]

    def units_changed(self) -> None:
        """Units were replaced: forget what is known of the old ones."""
        self._gradients = [gradient for unit in reversed(self.units) for gradient in unit.gradients]
        self._any_sharded = any(unit.sharded for unit in self.units)
        self._order.forget()
        self._live.clear()

    def _pre_forward_hook(self, point: HookPoint, module: nn.Module, args: tuple, kwargs: dict) -> None:
        point.received.clear()
        if point.announces_backward and torch.is_grad_enabled():
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    point.received[id(leaf)] = leaf._version
        self.pre_forward(point)

    # -- forward --------------------------------------------------------------------------------------------------

    def pre_forward(self, point: HookPoint) -> None:
        if in_backward():  # recomputation under activation checkpointing: order and prefetch belong to backward
            self._recompute(point)
            return
        if point.is_root:
            self._begin_forward()
        for unit in point.units:
            unit.unshard()
        if self.phase is Phase.FORWARD:
            self._order.visit(point)
            self._gather_ahead(self._order.upcoming(then_backward=False))

    def _begin_forward(self) -> None:
        if self.phase is not Phase.IDLE:  # an exception has cut off the pass before
            self.abort()
        self.before_forward()
        self._enter(Phase.FORWARD)
        self._order.begin()
        if not torch.is_grad_enabled():
            self.reshard_all()  # nothing that was read or kept for a backward pass is needed by an evaluation

    def post_forward(self, point: HookPoint, module: nn.Module, args: tuple, output: object) -> None:
        will_differentiate = self._hook_outputs(point, output)
        if in_backward():
            return
        if not point.is_root:
            for unit in point.units:
                soon = self.phase is Phase.FORWARD and unit.sharded and self._used_again_soon(unit, will_differentiate)
                if not soon:
                    self._reshard(unit)
        elif self.phase is Phase.FORWARD:
            self._order.complete()
            if not will_differentiate:
                self.reshard_all()
            self._enter(Phase.IDLE)

    def _used_again_soon(self, unit: Unit, then_backward: bool) -> bool:
        """Whether keeping the unit saves a gather within the reuse distance (the last of forward: at no distance)."""
        passed = 0
        for point in self._order.upcoming(then_backward):
            if unit in point.units:
                return passed == 0 or self._live_numel() <= self.limits.live
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
            if ahead and ahead + numel > self.limits.prefetch:
                return
            ahead += numel
            resting = [unit for unit in units if unit.state is UnitState.RESTING]
            if resting and self._live_numel() + sum(unit.numel for unit in resting) > self.limits.live:
                return
            for unit in resting:
                unit.begin_unshard()
            if ahead >= self.limits.prefetch:
                return

    def _live_numel(self) -> int:
        return sum(unit.numel for unit in self.units if unit.sharded and unit.state is not UnitState.RESTING)

    def _hook_outputs(self, point: HookPoint, output: object) -> bool:
        """Have `pre_backward` called before a gradient enters this call; whether there is such a gradient."""
        if not torch.is_grad_enabled():
            return False
        tensors, objects = find_tensors(output)
        self._calls += 1
        if objects and not tensors:
            self._check_is_not_trained(point, objects)
        hook = functools.partial(self.pre_backward, point, self._calls)
        differentiable = False
        for tensor in tensors:
            if tensor.requires_grad:
                differentiable = True
                # An input that is handed on, unchanged, belongs to the call that made it.
                if point.announces_backward and point.received.get(id(tensor)) != tensor._version:
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

    # -- backward -------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        self.before_backward()
        self._enter(Phase.BACKWARD)
        self._cursor = 0
        Variable._execution_engine.queue_callback(self.finish_backward)

    def pre_backward(self, point: HookPoint, call: int, grad: Tensor) -> None:
        if self._any_sharded and torch.is_grad_enabled():
            raise ZeroRuntimeError(
                "gradients of gradients (create_graph=True) are not supported at stage 3, where weights are released "
                "after each pass: use stage 2"
            )
        if self.phase is not Phase.BACKWARD:
            self._begin_backward()
        task = torch._C._current_graph_task_id()
        self._reshard_done(task, call, point)
        for unit in point.units:
            unit.unshard()
            if not point.is_root:
                self._live[unit] = (task, call)
        self._gather_ahead(self._order.upcoming_in_backward(point))

    def _recompute(self, point: HookPoint) -> None:
        task = torch._C._current_graph_task_id()
        self._reshard_done(task, self._calls, point)
        for unit in point.units:
            unit.unshard()
            if not point.is_root:
                self._live.setdefault(unit, (task, 0))  # until its own pre_backward has come

    def _reshard_done(self, task: int, call: int, point: HookPoint) -> None:
        """Reshard what backward has left behind (see [Note: backward order])."""
        for unit, (live_task, live_call) in list(self._live.items()):
            if unit not in point.units and (live_task > task or (live_task == task and live_call > call)):
                del self._live[unit]
                self._reshard(unit)

    def on_grad(self, gradient: GradientBuffer, index: int, param: nn.Parameter) -> None:
        """A parameter's gradient is there: take it over, and reduce what is complete."""
        if self.phase is not Phase.BACKWARD:
            self._begin_backward()
        gradient.add(index, access.take_grad(param))
        if gradient.complete and self._reducing_now:
            self._issue(lambda: self._gradients[self._cursor].complete)

    @property
    def _reducing_now(self) -> bool:
        return self.sync or self.reduce_every_microbatch

    def _issue(self, ready: Callable[[], bool]) -> None:
        """Start reductions in the fixed order while they are ready (see [Note: reduction order])."""
        while self._cursor < len(self._gradients) and ready():
            gradient = self._gradients[self._cursor]
            self._cursor += 1
            self._begin_reduce(gradient)

    def _begin_reduce(self, gradient: GradientBuffer) -> None:
        gradient.begin_reduce()
        self._reducing.append(gradient)
        # A transfer that makes no progress by itself is finished at once, which frees its buffers.
        if len(self._reducing) > (_MAX_REDUCTIONS if self.limits.overlap and gradient.reduces_beside else 0):
            self._reducing.popleft().finish_reduce()

    def finish_backward(self) -> None:
        """The end of a backward pass: reduce what is left, release everything."""
        if self._reducing_now:
            self.reduce_all()
        for gradient in self._gradients:
            gradient.end_backward()
        self.reshard_all()
        self._enter(Phase.IDLE)

    def reduce_all(self) -> None:
        """Reduce everything that has not been reduced in this pass, and wait for it."""
        self._issue(lambda: True)
        for gradient in self._gradients:
            if gradient.has_sums:  # came after its reduction (reentrant checkpointing)
                self._begin_reduce(gradient)
        while self._reducing:
            self._reducing.popleft().finish_reduce()
        self._cursor = 0

    # -- between passes -------------------------------------------------------------------------------------------

    @property
    def has_local_gradients(self) -> bool:
        """Whether micro-batches have left sums that were not reduced yet."""
        return any(gradient.has_sums for gradient in self._gradients)

    def _reshard(self, unit: Unit) -> None:
        if not unit.holds and not unit.accessed:
            unit.reshard()

    def reshard_all(self) -> None:
        """Release everything outside of explicit scopes, also what a read from outside has gathered."""
        self._live.clear()
        for unit in self.units:
            if not unit.holds:
                unit.reshard()

    def abort(self) -> None:
        """Forget a pass that an exception has cut off.

        Of a backward pass nobody can tell what it has added to earlier ones, so all gradients since the last step go.
        """
        while self._reducing:
            self._reducing.popleft().finish_reduce()
        if self.phase is Phase.BACKWARD:
            logger.warning(
                "hf_zero: a backward pass failed: the gradients of all micro-batches since the last step are dropped"
            )
            for gradient in self._gradients:
                gradient.forget()
        self._cursor = 0
        self.reshard_all()
        self.phase = Phase.IDLE
