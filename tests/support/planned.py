"""What a run holds at rest, against the plan for it."""

import torch
from torch import nn

from hf_zero.planning.compare import compare


def check_resident(model: nn.Module, batch: dict) -> None:
    """Rank 0 of a model that has made a step with batches as this one holds what was planned, within 1 %."""
    inputs = {name: value.to("meta") for name, value in batch.items() if isinstance(value, torch.Tensor)}
    found = compare(model, inputs, measured_peak=0, accumulation=1)
    assert abs(found.predicted_resident / found.measured_resident - 1) < 0.01, str(found)
