"""`ZeroOptimizer`: the user's optimizer, as accelerate wraps it, on the masters of an engine."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from hf_zero.config import ZeroConfig, values
from hf_zero.core.engine import ZeroEngine
from hf_zero.errors import ZeroConfigError, ZeroRuntimeError


class ZeroOptimizer(AcceleratedOptimizer):
    """An optimizer that steps the masters of the engine that it is `linked` to.

    Where the configuration has `gradient_clipping`, a step is clipped to that which the script has not clipped itself,
    as DeepSpeed's engine does.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: ZeroConfig) -> None:
        # Neither placement nor a scaler: the engine has placed the masters, and scales the loss itself.
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.linked = False
        limit = config.gradient_clipping
        self._limit, self._said_in = 0.0 if values.is_auto(limit) else limit, config.where("gradient_clipping")
        self._is_clipped = False

    @property
    def engine(self) -> ZeroEngine:
        """Whose masters these are, once it is linked."""
        return self.optimizer._zero_owner

    def step(self, closure: Any = None) -> None:
        if not self.linked:
            raise ZeroRuntimeError(
                "this optimizer was prepared, but no model of its parameters was: pass both to "
                "accelerator.prepare(model, optimizer, ...)"
            )
        ends = self.gradient_state.sync_gradients
        if ends and self._limit and not self._is_clipped and self.engine.has_gradients:
            self.engine.clip_grad_norm_(self._limit)
        super().step(closure)
        if ends:
            self.engine.control.look()
            self._is_overflow, self._is_clipped = self.engine.step_was_skipped, False

    def leave_clipping_to_script(self, max_norm: float) -> None:
        """The script clips this step itself. Raises ZeroConfigError where the configuration has another limit."""
        if self._limit not in (0.0, max_norm):
            raise ZeroConfigError(
                f"gradient_clipping is {self._limit} ({self._said_in}), and the script clips to {max_norm}: write "
                "gradient_clipping: auto, so that the script owns it"
            )
        self._is_clipped = True
