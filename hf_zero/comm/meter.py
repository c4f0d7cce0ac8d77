"""Measures what quantised messages cost in precision, every step, and switches them off where it is too much."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from hf_zero.comm.codec import Codec
from hf_zero.comm.feedback import ErrorFeedback


logger = logging.getLogger(__name__)

_STRIKES = 3  # steps in a row above the limit, after which messages are sent plainly


class Quantised:
    """One kind of message that is sent by a codec.

    One message of a step is measured, another one in each: the same on every rank, as all send the same. One whose
    error was too large is measured again until it is not.

    Args:
        kind: "weights" or "gradients", for people.
        codec: how they are sent; None from the moment where the error was too large.
        limit: of the relative error (2-norm of the difference over that of the values).
        feedback: adds what the codec leaves out between nodes to the next messages.
    """

    def __init__(self, kind: str, codec: Codec, limit: float, feedback: ErrorFeedback | None = None) -> None:
        self.kind, self.limit, self.feedback = kind, limit, feedback
        self.codec: Codec | None = codec
        self.error: float | None = None  # of the step before the last, over all ranks
        self._strikes = 0
        self._turn = 0  # the message to be measured in this step
        self._seen = 0  # messages of this step
        self._measured: Tensor | None = None
        # What was added up over ranks for the step before, and of which message.
        self._before: tuple[int, Tensor] | None = None

    def watch(self, values: Tensor, payload: Tensor) -> None:
        """A message was encoded: look at it, if it is its turn."""
        assert self.codec is not None
        if self._seen == self._turn:
            self._measured = self.codec.error(values, payload)
        self._seen += 1

    def take(self, device: torch.device) -> Tensor:
        """Sums of squares of this step on this rank, (error, values), fp64, to be added up over ranks."""
        return torch.zeros(2, dtype=torch.float64, device=device) if self._measured is None else self._measured

    def end_step(self, sums: Tensor) -> None:
        """`sums` is what `take` gave, over all ranks.

        What is read on the host, and judged, are those of the step before: nothing waits for the device.
        """
        if self.feedback is not None:
            self.feedback.end_step()
        before, self._before = self._before, (self._turn, sums)
        if not self._strikes:
            self._turn = (self._turn + 1) % max(1, self._seen)
        self._seen, self._measured = 0, None
        if before is None or sums.is_meta:  # the planner's tensors have no values
            return
        number, (wrong, whole) = before[0], before[1].tolist()
        if self.codec is not None and not wrong == whole == 0.0:
            self._judge(number, (wrong / whole) ** 0.5 if whole else float("inf"))

    def _judge(self, number: int, error: float) -> None:
        """Take the error of a message, the same on every rank: too large ones in a row end the quantisation."""
        self.error = error
        if self._strikes and number != self._turn:
            return  # measured before the other one came under suspicion
        self._turn = number if error > self.limit else self._turn
        self._strikes = 0 if error <= self.limit else self._strikes + 1
        if self._strikes == _STRIKES and self.codec is not None:
            self.codec = self.feedback = None
            logger.warning(
                "hf_zero: quantised %s were off by %.1f %%, the last of %d steps in a row above quantized_error_limit "
                "(%g): they are sent as they are from here on",
                self.kind,
                100 * error,
                _STRIKES,
                self.limit,
            )
