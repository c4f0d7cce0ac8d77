"""What ZeRO must send and hold, by arithmetic: the bounds that measured bytes are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What decides the bytes of one optimizer step.

    `units` are the elements of every unit. `kept` are those of units that stage 3 gathers once per micro-batch instead
    of twice: the embedding, whose backward reads no weight, and the last unit, which stays from forward to backward.
    """

    units: Sequence[int]
    kept: Sequence[int] = ()
    ranks: int
    accumulation: int = 1
    weight_bytes: int = 4
    gradient_bytes: int = 4
    local: bool = False  # stages 2 and 3: micro-batches are summed on their rank and reduced once


def gathered_bytes(stage: int, traffic: Traffic) -> int:
    """Bytes of weights that one rank sends per step."""
    whole, micro = sum(traffic.units), traffic.accumulation
    elements = {0: 0, 1: whole, 2: whole, 3: micro * (2 * whole - sum(traffic.kept))}[stage]
    return elements * traffic.weight_bytes * (traffic.ranks - 1) // traffic.ranks


def reduced_bytes(stage: int, traffic: Traffic) -> int:
    """Bytes of gradients that one rank sends per step; stage 0 is an all-reduce, as DDP's."""
    each_micro_batch = stage >= 2 and not traffic.local
    elements = sum(traffic.units) * (2 if stage == 0 else traffic.accumulation if each_micro_batch else 1)
    return elements * traffic.gradient_bytes * (traffic.ranks - 1) // traffic.ranks


def wire_bytes(stage: int, traffic: Traffic) -> int:
    """Bytes that one rank sends per optimizer step."""
    return gathered_bytes(stage, traffic) + reduced_bytes(stage, traffic)


def resident_bytes(stage: int, numel: int, ranks: int, weight_bytes: int) -> float:
    """Bytes of weights, fp32 masters and two Adam states on one rank between steps.

    At stage 3 a weight is cast from its master when it is gathered and takes nothing at rest. Where weights are whole
    and fp32, the masters are parts of them.
    """
    if stage == 3:
        return 12 * numel / ranks
    return (weight_bytes + (8 if weight_bytes == 4 else 12) / (1 if stage == 0 else ranks)) * numel
