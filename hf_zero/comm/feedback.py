"""Error feedback: what quantised sums have left out is added to the next ones."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from hf_zero.comm.codec import Codec


class ErrorFeedback:
    """Compensates what a codec makes of messages that come again in every step.

    As in LoCo (Xie et al. 2024, arXiv:2407.04480). Of each message the error `e` is kept in 8 bits. `values + e` is
    sent in place of `values`, and then `e = beta * e + (1 - beta) * (values + e - sent)`.

    Args:
        beta: the weight of the earlier errors, in [0, 1).
        reset_every: steps after which all errors are forgotten.
    """

    def __init__(self, beta: float, reset_every: int) -> None:
        self._beta, self._reset_every = beta, reset_every
        self._codec = Codec(8)
        self._step = 0
        self._errors: dict[Hashable, Tensor] = {}

    def correct(self, key: Hashable, values: Tensor) -> None:
        """Add, in place, what the message `key` has left out so far to its flat fp32 values."""
        if key in self._errors:
            self._codec.decode(self._errors[key], values, add=True)

    def keep(self, key: Hashable, values: Tensor, sent: Tensor) -> None:
        """Note what is sent of the corrected `values`, both flat and fp32; `sent` is overwritten."""
        error = torch.sub(values, sent, out=sent).mul_(1 - self._beta)
        if key in self._errors:
            earlier = torch.empty_like(error)
            self._codec.decode(self._errors[key], earlier)
            error.add_(earlier, alpha=self._beta)
        # An overflow is seen in what is sent, and is over with the step that it skips.
        self._errors[key] = self._codec.pack(error.nan_to_num_(0.0, 0.0, 0.0))

    def end_step(self) -> None:
        self._step += 1
        if self._step % self._reset_every == 0:
            self.forget()

    def forget(self) -> None:
        """Begin without errors, as a run does that is resumed."""
        self._errors.clear()
        self._step = 0

    @property
    def held(self) -> list[Tensor]:
        """The tensors that it keeps."""
        return list(self._errors.values())
