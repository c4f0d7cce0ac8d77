"""Ways to share state out over several nodes: what a plan compares when it knows the link between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Settings that say over which ranks a stage shares its state out, and how that is sent.

    `exact`: nothing is quantised.
    """

    name: str = "all ranks"
    settings: Mapping[str, object] = field(default_factory=dict)
    exact: bool = True


ALL_RANKS = Spread()


def spreads(stage: int, nodes: int, gpus: int, accumulation: int) -> list[Spread]:
    """The rows of a stage over `nodes` of `gpus` ranks, those over all ranks first."""
    if nodes == 1 or stage == 0:
        return [ALL_RANKS]
    once = {"no_sync": "node"} if accumulation > 1 and stage > 1 else {}
    replicas = Spread(name="each node, replicated", settings={"mics_shard_size": gpus, **once})
    if gpus == 1:
        return [ALL_RANKS]
    if stage < 3:
        return [ALL_RANKS, replicas]
    hybrid = {"zero_hpz_partition_size": gpus, **once}
    quantised = {**hybrid, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    return [
        ALL_RANKS,
        Spread(name="weights each node, states all ranks", settings=hybrid),
        Spread(name="the same in 8 bits", settings=quantised, exact=False),
        replicas,
    ]
