"""The dynamic loss scale of fp16, with DeepSpeed's parameters and rules."""

from __future__ import annotations


class LossScaler:
    """Keeps fp16 gradients in range: halves the scale after overflows, doubles it after a window without one.

    Engines may share one. What they find out about the gradients of one backward pass is one outcome: an overflow
    where any of them finds one.

    Args:
        scale: a fixed scale; 0 makes it dynamic, starting at `2 ** initial_scale_power`.
        window: steps without overflow after which the scale doubles.
        hysteresis: overflows that are tolerated before the scale is halved.
        min_scale: the scale is not halved below this.
        consecutive_hysteresis: refill the hysteresis at every good step, not only when the scale grows.
    """

    def __init__(
        self,
        *,
        scale: float = 0.0,
        initial_scale_power: int = 16,
        window: int = 1000,
        hysteresis: int = 2,
        min_scale: float = 1.0,
        consecutive_hysteresis: bool = False,
    ) -> None:
        self.dynamic = scale == 0.0
        self.scale = 2.0**initial_scale_power if self.dynamic else scale
        self.window, self.hysteresis, self.min_scale = window, hysteresis, min_scale
        self.consecutive_hysteresis = consecutive_hysteresis
        self._tolerated = hysteresis
        self._since_overflow = 0
        self._before: dict[str, float] | None = None  # the state at the backward pass, once there was one
        self._outcome: bool | None = None  # of its gradients, as far as steps have told

    def begin_backward(self) -> None:
        """The steps that follow, of several engines maybe, are about the gradients of this backward pass."""
        self._before, self._outcome = self.state_dict(), None

    def update(self, overflow: bool) -> None:
        """Note the outcome of a step."""
        if not self.dynamic:
            return
        if self._before is not None:
            if self._outcome is not None:
                if self._outcome or not overflow:
                    return
                self.load_state_dict(self._before)
            self._outcome = overflow
        if overflow:
            self._since_overflow = 0
            if self._tolerated > 1:
                self._tolerated -= 1
            else:
                self.scale = max(self.scale / 2, self.min_scale)
            return
        self._since_overflow += 1
        if self.consecutive_hysteresis:
            self._tolerated = self.hysteresis
        if self._since_overflow % self.window == 0:
            self._tolerated = self.hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "tolerated": self._tolerated, "since_overflow": self._since_overflow}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.dynamic:
            self.scale = state["scale"]
        self._tolerated, self._since_overflow = int(state["tolerated"]), int(state["since_overflow"])
