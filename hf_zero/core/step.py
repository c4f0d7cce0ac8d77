"""Before an optimizer step: the gradient norm, skipping on overflow, what the step must leave alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hf_zero.comm.mesh import Mesh
from hf_zero.core import grad_norm
from hf_zero.core.gradients import GradientBuffer
from hf_zero.core.loss_scale import LossScaler
from hf_zero.core.master import MasterShard
from hf_zero.core.placement import Place
from hf_zero.core.skipped_params import SkippedParams
from hf_zero.errors import ZeroRuntimeError


logger = logging.getLogger(__name__)


class _Found:
    """Whether a norm is inf or nan: on its device as `found_inf` of fused optimizers, on the host a while later."""

    def __init__(self, norm: Tensor) -> None:
        self.flag = norm.isfinite().logical_not().float()
        self._host, self._copied = self.flag, None
        if self.flag.is_cuda:
            self._host, self._copied = torch.empty((), pin_memory=True), torch.cuda.Event()
            self._host.copy_(self.flag, non_blocking=True)
            self._copied.record()

    def read(self) -> bool:
        """Waits for the device to come as far as the norm, and not for what it was told to do since."""
        if self.flag.is_meta:  # a plan has no values
            return False
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._host.numpy())


class StepControl:
    """Decides, the same on every rank, whether a step is applied.

    On a device, fused Adam leaves its step out by itself where the device has found that it must (see `_Found`). The
    host learns of it when it is asked or when the next step is decided about: it has given the device a whole step to
    do by then, and nobody has waited.

    All optimizers of an engine share a window: what the first of them to step after a backward pass has found holds
    for the others too.

    Attributes:
        late: the host can learn what the device has found after it has gone on.
        first_bad: the first parameter with such a gradient then (fully qualified name).
        norm: the gradient norm before clipping of the window under way, once it was computed.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        device: torch.device,
        sharded: bool,
        scaler: LossScaler | None,
        checks: bool,
        max_consecutive_skips: int,
    ) -> None:
        self.comm, self._mesh, self.device = mesh.everyone, mesh, device
        self.sharded, self.scaler = sharded, scaler
        self._quantised = mesh.quantised
        self._measured: Tensor | None = None  # errors of quantised messages in this step
        self.checks, self.max_consecutive_skips = checks, max_consecutive_skips
        self.late = device.type in ("cuda", "meta") and scaler is None
        self._skipped = False
        self._found: _Found | None = None  # about the last step, if the host has not looked yet
        self._gradients: list[GradientBuffer] = []
        self.first_bad: str | None = None
        self.norm: Tensor | None = None
        self._decided = False  # for the gradients as they are
        self._steps = 0  # decisions so far
        self._consecutive_skips = 0

    @property
    def skipped(self) -> bool:
        """Whether the last step was left out because a gradient was inf or nan."""
        return self._skipped if self._found is None else self._found.read()

    def gradients_changed(self) -> None:
        """What was measured and decided no longer holds."""
        self.norm = None
        self._decided = False

    def begin_backward(self) -> None:
        """Gradients are about to come: what is found out about them is one outcome for the loss scale."""
        self.gradients_changed()
        if self.scaler is not None:
            self.scaler.begin_backward()

    def measure(self, gradients: Iterable[GradientBuffer], norm_type: float = 2.0) -> Tensor:
        """The norm over all ranks' gradients; a collective."""
        beside = None
        if self._quantised and self._measured is None:
            beside = torch.cat([each.take(self.device) for each in self._quantised])
        grads = (
            grad
            for gradient in gradients
            for shard in gradient.buffer.resting.shards
            for grad in gradient.buffer.parts.counted(shard)
        )
        norm = grad_norm.global_norm(
            grads,
            self._mesh.shards,
            self.sharded,
            norm_type,
            device=self.device,
            beside=beside,
            everyone=self._mesh.everyone,
            tensor=self._mesh.tensor,
        )
        self._measured = self._measured if beside is None else beside
        self.norm = norm
        return norm

    def before(
        self, gradients: list[GradientBuffer], optimizer: torch.optim.Optimizer, groups: list[list[MasterShard]]
    ) -> None:
        """Decide about the step that is about to be made of `groups`.

        Where it is skipped, no master has a gradient afterwards, or the optimizer is told to change nothing.
        """
        late = self.late and _skips_by_itself(optimizer, groups)
        if not self._decided:
            self._decide(gradients, late)
        if self._found is not None:
            if late:
                vars(optimizer).update(found_inf=self._found.flag, grad_scale=None)
            else:
                self.look()

    def _decide(self, gradients: list[GradientBuffer], late: bool) -> None:
        self._conclude(())  # what became of the step before
        self._decided, self._gradients = True, gradients
        self._steps += 1
        if self._quantised and self._measured is None:
            self.measure(gradients)
        if self.checks:
            norm = self.measure(gradients) if self.norm is None else self.norm
            if late:
                self._found = _Found(norm)
                return
            self._skipped = not math.isfinite(norm.item())
        if self.scaler is not None:
            self.scaler.update(self._skipped)
        self._note(gradients)

    def look(self) -> None:
        """Wait for what the device has found about the last step; a collective, before its gradients are dropped."""
        self._conclude(self._gradients)

    def _conclude(self, gradients: Sequence[GradientBuffer]) -> None:
        if self._found is not None:
            self._skipped, self._found = self._found.read(), None
            self._note(gradients)

    def _note(self, gradients: Sequence[GradientBuffer]) -> None:
        """Whether the last step is skipped is known: `gradients` are those of it, if they are still there."""
        if self._skipped:
            self._skip(gradients)
        else:
            self._consecutive_skips = 0

    def _skip(self, gradients: Sequence[GradientBuffer]) -> None:
        names = self.comm.all_gather_object(_first_bad(gradients))
        found = [entry for entry in names if entry is not None]
        self.first_bad = min(found)[-1] if found else None
        for gradient in gradients:
            gradient.forget()
        self._consecutive_skips += 1
        number = self._consecutive_skips
        where = f"the gradient of '{self.first_bad}'" if found else "the gradient norm"
        scale = "" if self.scaler is None else f"; the loss scale is now {self.scaler.scale:g}"
        if self.comm.rank == 0 and number.bit_count() == 1:  # 1, 2, 4, 8, ...
            run = "" if number == 1 else f" ({number} in a row)"
            logger.warning("hf_zero: step %d skipped%s: %s is inf or nan%s", self._steps, run, where, scale)
        if number >= self.max_consecutive_skips:
            other = "" if self.scaler is None else ", or train in bf16, which has the range of fp32"
            raise ZeroRuntimeError(
                f"{number} steps in a row were skipped because gradients were inf or nan, the last one (step "
                f"{self._steps}) because {where} was{scale}. Lower the learning rate, look at the data of these "
                f"steps{other} (max_consecutive_skips sets this limit)"
            )

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step was made: judge what was measured in it. No message is under way, and none is made of the weights."""
        for name in ("found_inf", "grad_scale"):
            vars(optimizer).pop(name, None)
        if self._measured is not None:
            for each, sums in zip(self._quantised, self._measured.view(-1, 2), strict=True):
                each.end_step(sums)
            self._measured = None


def _skips_by_itself(optimizer: torch.optim.Optimizer, groups: list[list[MasterShard]]) -> bool:
    """Whether nothing changes where `found_inf` is 1. (Fused SGD leaves new momentum without values then.)"""
    is_adam = type(optimizer).__bases__[-1] in (torch.optim.Adam, torch.optim.AdamW)
    by_itself = all(group["fused"] for group in optimizer.param_groups) if is_adam else _stands_for_fused(optimizer)
    return by_itself and all(shard.place is Place.DEVICE for shards in groups for shard in shards)


def _stands_for_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the planner says so of an optimizer that takes the place of one."""
    return getattr(optimizer, "stands_for_fused", False)


def skipped_params(shards: Iterable[MasterShard], gradients: list[GradientBuffer]) -> dict[MasterShard, SkippedParams]:
    """What a step of these shards must leave as it is, by shard: parameters without a gradient on this rank."""
    spans: dict[MasterShard, list[tuple[int, int]]] = {shard: [] for shard in shards if shard.weight.grad is not None}
    for gradient in gradients:
        for shard, start, stop in gradient.unused_spans():
            if shard in spans:
                spans[shard].append((start, stop))
    return {shard: SkippedParams(shard, idle) for shard, idle in spans.items() if idle}


def _first_bad(gradients: Sequence[GradientBuffer]) -> tuple[int, int, str] | None:
    """The first parameter, in model order, with a gradient that is not finite on this rank."""
    for order, gradient in enumerate(gradients):
        buffer = gradient.buffer
        for shard in buffer.resting.shards:
            grad = shard.weight.grad
            for span in shard.spans():
                if grad is not None and not grad[span.offset : span.offset + span.numel].isfinite().all():
                    return order, span.index, buffer.names[span.index]
    return None
