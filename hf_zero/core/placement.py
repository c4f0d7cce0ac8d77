"""Says where parameters, gradients and optimizer state rest at each ZeRO stage: one row of a table per stage."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Placement(Enum):
    """Where one kind of training state rests between uses."""

    REPLICATED = "replicated"  # every rank holds the same whole tensor
    PARTIAL = "partial"  # every rank holds its own unreduced sum
    SHARDED = "sharded"  # every rank holds one contiguous slice


@dataclass(frozen=True, kw_only=True)
class Placements:
    """One row of the stage table (ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054, section 5)."""

    parameter: Placement
    gradient: Placement
    optimizer: Placement


STAGES: dict[int, Placements] = {
    0: Placements(parameter=Placement.REPLICATED, gradient=Placement.REPLICATED, optimizer=Placement.REPLICATED),
    1: Placements(parameter=Placement.REPLICATED, gradient=Placement.PARTIAL, optimizer=Placement.SHARDED),
    2: Placements(parameter=Placement.REPLICATED, gradient=Placement.SHARDED, optimizer=Placement.SHARDED),
    3: Placements(parameter=Placement.SHARDED, gradient=Placement.SHARDED, optimizer=Placement.SHARDED),
}
