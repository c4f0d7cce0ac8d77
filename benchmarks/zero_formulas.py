"""The cost model of ZeRO in closed form: bytes per rank and bytes sent, from the stage table and an accounting."""

from __future__ import annotations

from dataclasses import dataclass

from hf_zero.core.placement import STAGES, Place, Placement
from hf_zero.planning.places import Places


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """Bytes per parameter of what a rank would hold alone; every published table has one, stated or not."""

    weight: int
    gradient: int
    optimizer: int


# What the engine holds in bf16: gradients are accumulated in fp32, the optimizer has master, exp_avg and exp_avg_sq.
OURS = Accounting(weight=2, gradient=4, optimizer=12)
# 16-bit gradients and the same optimizer: 16 bytes, the ZeRO paper's count.
PAPER = Accounting(weight=2, gradient=2, optimizer=12)
# Two Adam states and no fp32 master: 12 bytes. Such tables are too low for mixed-precision training.
NO_MASTER = Accounting(weight=2, gradient=2, optimizer=8)


def state_bytes(parameters: float, ranks: int, stage: int, accounting: Accounting) -> float:
    """Weights, gradients and optimizer state of one rank, all of them sharded where the stage shards them."""

    def held(placement: Placement, width: int) -> float:
        return parameters * width / (ranks if placement is Placement.SHARDED else 1)

    row = STAGES[stage]
    return (
        held(row.parameter, accounting.weight)
        + held(row.gradient, accounting.gradient)
        + held(row.optimizer, accounting.optimizer)
    )


def engine_state_bytes(parameters: float, ranks: int, stage: int) -> float:
    """What this engine holds after a backward pass in bf16.

    At stage 1 an unreduced gradient exists only until its unit is reduced, so gradients take what they take at stage
    2; at stage 3 the 16-bit weights are cast from the master when they are gathered, and nothing of them rests.
    """
    share = ranks if stage else 1
    weights = OURS.weight * parameters if stage < 3 else 0
    return weights + (OURS.gradient + OURS.optimizer) * parameters / share


def offloaded_bytes(parameters: float, ranks: int, stage: int, places: Places) -> dict[Place, float]:
    """What a rank with a device holds, by place, with its optimizer state on the host or on disk (bf16).

    Gradients are with the host, which runs the optimizer. Weights that stay on the device rest there in 16 bits, whole
    below stage 3; buffers and the units in use come on top.
    """
    held = dict.fromkeys(Place, 0.0)
    held[places.optimizer] += OURS.optimizer * parameters / ranks
    held[Place.HOST] += OURS.gradient * parameters / ranks
    held[places.parameters] += OURS.weight * parameters / (ranks if stage == 3 else 1)
    return held


def sent_bytes(
    parameters: float, ranks: int, stage: int, *, weight: int = 2, gradient: int = 4, gathered_once: float = 0
) -> float:
    """What a rank sends in a step of one micro-batch.

    `gathered_once`: parameters that stage 3 need not gather for backward (the embedding, and the last unit).
    """
    fraction = (ranks - 1) / ranks
    if stage == 0:
        return 2 * gradient * parameters * fraction
    if stage < 3:
        return (gradient + weight) * parameters * fraction
    return ((gradient + 2 * weight) * parameters - weight * gathered_once) * fraction
