"""What a verification trains: a model that is the same every time, its optimizer, and micro-batches for every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


Batch = Mapping[str, Tensor]
IGNORED = -100  # the label of a token that does not count


@dataclass(frozen=True, kw_only=True)
class Task:
    """`steps` optimizer steps of `accumulation` micro-batches on each rank.

    Attributes:
        build: the model with its first weights, the same at every call, in training mode.
        make_optimizer: an optimizer of the model's trainable parameters, with groups of its choice.
        batch: the micro-batch of (rank, step, number), on the device.
        loss: mean over the tokens of a micro-batch, a scalar.
        numel: elements of the model.
        width: of the model's hidden states, which sizes written as "auto" follow; None where there is no such thing.
        clip: limit of the gradient norm; None does not clip, "half" is half of the first norm, so that it acts.
    """

    build: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[int, int, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    steps: int = 3
    accumulation: int = 2
    clip: float | str | None = "half"
    numel: int = 0
    width: int | None = None

    def weights(self, world_size: int, step: int) -> list[list[float]]:
        """By rank and micro-batch: the share of its tokens in those of the step, times `world_size`.

        The mean over ranks of what is weighted so is the mean over all tokens of the step.
        """
        counts = [
            [tokens_of(self.batch(rank, step, number)) for number in range(self.accumulation)]
            for rank in range(world_size)
        ]
        total = sum(map(sum, counts))
        return [[world_size * count / total for count in row] for row in counts]


def tokens_of(batch: Batch) -> int:
    """How many labels count in the loss; rows where there are no labels."""
    labels = batch.get("labels")
    if labels is None:
        return len(next(iter(batch.values())))
    counted = labels[:, 1:] if labels.dim() == 2 and "input_ids" in batch else labels
    return int((counted != IGNORED).sum())


def grouped(model: nn.Module, lr: float, weight_decay: float) -> list[dict]:
    """Two groups: matrices with weight decay, and the rest without, at half the rate."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.dim() > 1], "lr": lr, "weight_decay": weight_decay},
        {"params": [param for param in trained if param.dim() <= 1], "lr": lr / 2, "weight_decay": 0.0},
    ]
