"""Keeps an optimizer step from changing parameters that got no gradient, which flat masters cannot leave out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hf_zero.core.master import MASTER, MasterShard


class SkippedParams:
    """Keeps an optimizer step from changing parameters that got no gradient at all, as torch skips a `grad` of None.

    A flat tensor cannot leave elements out of a step (weight decay and momentum would move them), so their weights and
    state are saved before it and restored after it; state that the step has made anew is cleared. The step count is
    that of all. Whether another rank sent a gradient is left to the device, for which the host need not wait.

    Args:
        shard: with a gradient.
        spans: elements [start, stop) of it for which this rank sent none.
    """

    def __init__(self, shard: MasterShard, spans: Iterable[tuple[int, int]]) -> None:
        grad = shard.weight.grad
        assert grad is not None
        self._shard = shard
        self._spans = [(start, stop, grad[start:stop].any()) for start, stop in spans]
        self._saved: list[dict[str, Tensor]] = []

    def save(self, state: Mapping[str, object]) -> None:
        """Keep the elements, to be restored if no rank sent a gradient for them; `state` is the optimizer's."""
        flats = self._flats(state)
        self._saved = [
            {kind: flat[start:stop].clone() for kind, flat in flats.items()} for start, stop, _ in self._spans
        ]

    def restore(self, state: Mapping[str, object]) -> None:
        """Undo what the step has done to them; `state` is the optimizer's now."""
        for (start, stop, sent), saved in zip(self._spans, self._saved, strict=True):
            for kind, flat in self._flats(state).items():
                now = flat[start:stop]
                now.copy_(torch.where(sent.to(now.device), now, saved.get(kind, torch.zeros_like(now))))
        self._saved = []

    def _flats(self, state: Mapping[str, object]) -> dict[str, Tensor]:
        return {MASTER: self._shard.values, **self._shard.flats_in(state)}
