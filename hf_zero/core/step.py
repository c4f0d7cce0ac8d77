"""Before an optimizer step: the gradient norm, skipping on overflow, what the step must leave alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from hf_zero.comm.mesh import Mesh
from hf_zero.core import grad_norm
from hf_zero.core.gradients import GradientBuffer
from hf_zero.core.loss_scale import LossScaler
from hf_zero.core.master import MasterShard, SkippedParams
from hf_zero.errors import ZeroRuntimeError


logger = logging.getLogger(__name__)


class StepControl:
    """Decides, the same on every rank, whether a step is applied.

    All optimizers of an engine share a window: what the first of them to step after a backward pass has found holds
    for the others too.

    Attributes:
        skipped: whether the last step was left out because a gradient was inf or nan.
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
        self.comm, self.shards, self.device = mesh.world, mesh.shards, device
        self.sharded, self.scaler = sharded, scaler
        self._meter = mesh.meter
        self._measured: Tensor | None = None  # errors of quantised messages in this step
        self.checks, self.max_consecutive_skips = checks, max_consecutive_skips
        self.skipped = False
        self.first_bad: str | None = None
        self.norm: Tensor | None = None
        self._decided = False  # for the gradients as they are
        self._steps = 0  # decisions so far
        self._consecutive_skips = 0

    def gradients_changed(self) -> None:
        """What was measured and decided no longer holds."""
        self.norm = None
        self._decided = False

    def measure(self, masters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """The norm over all ranks' gradients; a collective."""
        beside = self._meter.take(self.device) if self._meter.kinds and self._measured is None else None
        norm = grad_norm.global_norm(masters, self.shards, self.sharded, norm_type, device=self.device, beside=beside)
        self._measured = self._measured if beside is None else beside
        self.norm = norm
        return norm

    def before(self, masters: list[Tensor], gradients: list[GradientBuffer]) -> None:
        """Decide about the step that is about to be made; where it is skipped, no master has a gradient afterwards."""
        if not self._decided:
            self._decide(masters, gradients)

    def _decide(self, masters: list[Tensor], gradients: list[GradientBuffer]) -> None:
        self._decided = True
        self._steps += 1
        if self._meter.kinds and self._measured is None:
            self.measure(masters)
        if self.checks:
            norm = self.measure(masters) if self.norm is None else self.norm
            self.skipped = not math.isfinite(norm.item())
        if self.scaler is not None:
            self.scaler.update(self.skipped)
        if self.skipped:
            self._skip(gradients)
        else:
            self._consecutive_skips = 0

    def _skip(self, gradients: list[GradientBuffer]) -> None:
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

    def end_step(self) -> None:
        """A step was made: judge what was measured in it. No message is under way, and none is made of the weights."""
        if self._measured is not None:
            self._meter.end_step(self._measured)
            self._measured = None


def skipped_params(shards: Iterable[MasterShard], gradients: list[GradientBuffer]) -> dict[MasterShard, SkippedParams]:
    """What a step of these shards must leave as it is, by shard: parameters without a gradient on this rank."""
    spans: dict[MasterShard, list[tuple[int, int]]] = {shard: [] for shard in shards if shard.weight.grad is not None}
    for gradient in gradients:
        for shard, start, stop in gradient.unused_spans():
            if shard in spans:
                spans[shard].append((start, stop))
    return {shard: SkippedParams(shard, idle) for shard, idle in spans.items() if idle}


def _first_bad(gradients: list[GradientBuffer]) -> tuple[int, int, str] | None:
    """The first parameter, in model order, with a gradient that is not finite on this rank."""
    for order, gradient in enumerate(gradients):
        buffer = gradient.buffer
        for shard in buffer.master_shards:
            grad = shard.weight.grad
            for span in shard.spans():
                if grad is not None and not grad[span.offset : span.offset + span.numel].isfinite().all():
                    return order, span.index, buffer.names[span.index]
    return None
