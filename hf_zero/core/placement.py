"""Which ranks keep parameters, gradients and optimizer state at each stage, how far away, and the moves between."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Placement(Enum):
    """Where one kind of training state rests between uses."""

    REPLICATED = "replicated"  # every rank holds the same whole tensor
    PARTIAL = "partial"  # every rank holds its own unreduced sum
    SHARDED = "sharded"  # every rank holds one contiguous slice
    OWNED = "owned"  # one rank holds the whole matrix: optimizer state only


class Extent(Enum):
    """Over which ranks a kind of state is shared out."""

    SHARD = "the ranks of a replica"
    NODE = "the ranks of one node: every node keeps all of it"


class Place(Enum):
    """How far away a rank keeps what is its own, from near to far."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    @property
    def distance(self) -> int:
        return list(Place).index(self)


class Move(Enum):
    """What brings a tensor from one placement to another."""

    STAY = "nothing is sent"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    HAND_OVER = "exchange between slices and owners"


# (from, to): the pair of placements picks the move.
MOVES: dict[tuple[Placement, Placement], Move] = {
    (Placement.REPLICATED, Placement.REPLICATED): Move.STAY,
    (Placement.SHARDED, Placement.REPLICATED): Move.ALL_GATHER,
    (Placement.PARTIAL, Placement.SHARDED): Move.REDUCE_SCATTER,
    (Placement.PARTIAL, Placement.REPLICATED): Move.ALL_REDUCE,
    (Placement.SHARDED, Placement.OWNED): Move.HAND_OVER,
    (Placement.OWNED, Placement.SHARDED): Move.HAND_OVER,
}

# The placement of masters and optimizer states where the optimizer must be given whole matrices.
OF_WHOLE_MATRICES = {Placement.REPLICATED: Placement.REPLICATED, Placement.SHARDED: Placement.OWNED}


@dataclass(frozen=True, kw_only=True)
class Placements:
    """One row of the stage table (ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054, section 5).

    Gradients and optimizer state are shared out over a whole replica, sharded parameters over `parameter_extent`
    (NODE: hierarchical partitioning, ZeRO++, Wang et al. 2023, arXiv:2306.10209, section 3.2).
    """

    parameter: Placement
    gradient: Placement
    optimizer: Placement
    parameter_extent: Extent = Extent.SHARD

    def with_whole_parameters(self) -> Placements:
        """The same row for parameters that stay whole on every rank."""
        return replace(self, parameter=Placement.REPLICATED)

    def with_extent(self, extent: Extent) -> Placements:
        """The same row with parameters shared out over other ranks."""
        return replace(self, parameter_extent=extent)

    def at_rest(self, trainable: bool) -> Placement:
        """How the exact values rest: those of trained parameters with the optimizer, frozen ones as parameters."""
        return self.optimizer if trainable else self.parameter


STAGES: dict[int, Placements] = {
    0: Placements(parameter=Placement.REPLICATED, gradient=Placement.REPLICATED, optimizer=Placement.REPLICATED),
    1: Placements(parameter=Placement.REPLICATED, gradient=Placement.PARTIAL, optimizer=Placement.SHARDED),
    2: Placements(parameter=Placement.REPLICATED, gradient=Placement.SHARDED, optimizer=Placement.SHARDED),
    3: Placements(parameter=Placement.SHARDED, gradient=Placement.SHARDED, optimizer=Placement.SHARDED),
}
