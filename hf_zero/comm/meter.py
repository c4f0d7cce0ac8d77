"""Measures what quantised messages cost in precision, every step, and switches them off where it is too much."""

from __future__ import annotations

import logging
from collections import Counter

import torch
from torch import Tensor

from hf_zero.comm.codec import Codec


logger = logging.getLogger(__name__)

_STRIKES = 3  # steps in a row above the limit, after which messages are sent plainly


class Quantised:
    """One kind of message that is sent by a codec.

    Args:
        kind: "weights" or "gradients", for people.
        codec: how they are sent; None from the moment where the error was too large.
        limit: of the relative error (2-norm of the difference over that of the values).
    """

    def __init__(self, kind: str, codec: Codec, limit: float) -> None:
        self.kind, self.limit = kind, limit
        self.codec: Codec | None = codec
        self.error: float | None = None  # of the step before the last, over all ranks
        self._strikes = 0

    def judge(self, error: float) -> None:
        """Take the error of a step, which is the same on every rank: too large ones in a row end the quantisation."""
        self.error = error
        self._strikes = 0 if error <= self.limit else self._strikes + 1
        if self._strikes == _STRIKES and self.codec is not None:
            self.codec = None
            logger.warning(
                "hf_zero: quantised %s were off by %.1f %%, the last of %d steps in a row above quantized_error_limit "
                "(%g): they are sent as they are from here on",
                self.kind,
                100 * error,
                _STRIKES,
                self.limit,
            )


class Meter:
    """Watches one message of each kind in a step, another one in each; the same on every rank, which send the same."""

    def __init__(self, kinds: list[Quantised]) -> None:
        self.kinds = kinds
        self._step = 0
        self._seen: Counter[str] = Counter()  # messages of this step
        self._sent: Counter[str] = Counter()  # of the step before
        self._sums: dict[str, Tensor] = {}
        self._before: Tensor | None = None  # what was added up over ranks, for the step before

    def watch(self, kind: str, codec: Codec, values: Tensor, payload: Tensor) -> None:
        """A message was encoded: look at it, if it is its turn."""
        number = self._seen[kind]
        self._seen[kind] += 1
        if number == self._step % max(1, self._sent[kind]):
            self._sums[kind] = codec.error(values, payload)

    def take(self, device: torch.device) -> Tensor:
        """Sums of squares of this step on this rank, (error, values) by kind, fp64, to be added up over ranks."""
        zeros = torch.zeros(2, dtype=torch.float64, device=device)
        return torch.cat([self._sums.get(each.kind, zeros) for each in self.kinds] or [zeros[:0]])

    def end_step(self, sums: Tensor) -> None:
        """`sums` is what `take` gave, over all ranks.

        What is read on the host, and judged, are those of the step before: nothing waits for the device.
        """
        before, self._before = self._before, sums
        self._step += 1
        self._sent, self._seen = self._seen, Counter()
        self._sums.clear()
        if before is None or before.is_meta:  # the planner's tensors have no values
            return
        for each, (wrong, whole) in zip(self.kinds, before.view(-1, 2).tolist(), strict=True):
            if each.codec is not None and not wrong == whole == 0.0:
                each.judge((wrong / whole) ** 0.5 if whole else float("inf"))
