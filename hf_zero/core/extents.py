"""How the ranks are arranged for a configuration: which of them share one copy of what."""

from __future__ import annotations

import math
from collections.abc import Collection

from hf_zero.comm.topology import Topology
from hf_zero.config import ZeroConfig
from hf_zero.core.layout import FlatLayout
from hf_zero.core.placement import STAGES, Extent, Placement, Placements
from hf_zero.errors import ZeroConfigError


def arrange(config: ZeroConfig, size: int, rank: int, machines: Collection[int] = (), width: int = 1) -> Topology:
    """The topology of `size` ranks as rank `rank` sees it; `machines` are the numbers of ranks on their machines.

    Each stands for `width` ranks of tensor parallelism, which only `node_size` counts.

    Raises ZeroConfigError where the ranks cannot be arranged so.
    """
    machine = _ranks_of_a_machine(config, size, machines, width)
    shard = machine if config.mics_shard_size == "auto" else int(config.mics_shard_size) or size
    if config.zero_stage == 0 or size == 1:
        shard = size  # nothing is shared out
    _check_divides("mics_shard_size", shard, size, f"there are {size} ranks")
    if shard == 1 < size:
        raise ZeroConfigError(
            "mics_shard_size is 1, so every rank would keep everything: set zero_stage to 0, which is that"
        )
    node = machine if config.zero_hpz_partition_size == "auto" else int(config.zero_hpz_partition_size)
    by_node = config.zero_stage == 3 and node > 1 and size > 1
    local = node if by_node else shard
    _check_divides("zero_hpz_partition_size", local, shard, f"{shard} ranks share one copy of the state")
    if by_node and any(number % local for number in machines):
        raise ZeroConfigError(
            f"zero_hpz_partition_size is {local}, but the machines have {' and '.join(map(str, sorted(machines)))} "
            f"ranks, and a node must not lie on two machines: set it to {math.gcd(*machines)}, the largest number "
            "that divides them"
        )
    weights = _weights(config, shard)
    return Topology(
        replicas=size // shard, nodes=shard // local, local=local, rank=rank, machine=machine, weights=weights
    )


def _weights(config: ZeroConfig, shards: int) -> tuple[float, ...]:
    """The shares of the ranks of a replica in the optimizer's state; none where they are equal."""
    weights = config.rank_weights
    if weights is None:
        return ()
    if config.zero_stage == 0:
        raise ZeroConfigError(
            "rank_weights says how the optimizer's state is shared out, and zero_stage 0 shares nothing out: set "
            "zero_stage to 1, 2 or 3, or remove rank_weights"
        )
    if config.zero_quantized_weights:
        raise ZeroConfigError("rank_weights and zero_quantized_weights are not available together: remove one of them")
    if len(weights) != shards:
        raise ZeroConfigError(
            f"rank_weights has {len(weights)} number(s), but {shards} rank(s) share one copy of the state: give one "
            "for each of them, in their order"
        )
    return () if len(set(weights)) == 1 else tuple(weights)


def placements_of(config: ZeroConfig, topology: Topology, shares: bool) -> Placements:
    """The row of the stage table, and over which ranks its parameters are shared out."""
    extent = Extent.NODE if topology.nodes > 1 else Extent.SHARD
    # One rank's slice is the whole: its weights are released between uses only where they can rest elsewhere.
    moves = shares or config.offload_param_device != "none"
    return STAGES[config.zero_stage if moves else 0].with_extent(extent)


def _ranks_of_a_machine(config: ZeroConfig, size: int, machines: Collection[int], width: int) -> int:
    if config.node_size != "auto":
        node_size = int(config.node_size)
        _check_divides("node_size", node_size, size * width, f"there are {size * width} ranks")
        return max(1, node_size // width)
    return next(iter(machines)) if len(machines) == 1 and size % max(machines) == 0 else size


def _check_divides(name: str, value: int, size: int, why: str) -> None:
    if size % value:
        fits = [divisor for divisor in range(1, size + 1) if size % divisor == 0]
        raise ZeroConfigError(f"{name} is {value}, but {why}: set it to one of {', '.join(map(str, fits))}")


def node_bounds(layout: FlatLayout, topology: Topology) -> tuple[int, int]:
    """The half-open element range that the owners of one column have together (see [Note: slice order])."""
    share = layout.slice_numel * topology.nodes
    local = topology.place_of(topology.rank)[2]
    return local * share, (local + 1) * share


def table(config: ZeroConfig, topology: Topology) -> list[dict[str, str]]:
    """Over which ranks each kind of state is shared out: rows of state, "shared out over", copies and note."""
    placements = placements_of(config, topology, topology.size > 1)
    replica = f"all {topology.size} ranks" if topology.replicas == 1 else f"{topology.shards} ranks of a replica"
    node = f"{topology.local} ranks of a node"
    by_node = placements.parameter_extent is Extent.NODE
    sharded = Placement.SHARDED
    rows = []
    for state, placement, nearer in (
        ("parameters", placements.parameter, by_node),
        ("gradients", placements.gradient, False),
        ("states of the optimizer", placements.optimizer, False),
    ):
        shared = (node if nearer else replica) if placement is sharded else "none: whole on every rank"
        copies = topology.size
        if placement is sharded:
            copies = topology.replicas * (topology.nodes if nearer else 1)
        rows.append({"state": state, "shared out over": shared, "copies": str(copies), "note": ""})
    parameters, gradients, optimizer = rows
    if by_node:
        parameters["note"] = "gathers stay inside a node; one refresh between nodes after a step"
        optimizer["note"] = "with exact fp32 weights"
    if topology.weights:
        shares = f"in shares of {' : '.join(f'{weight:g}' for weight in topology.weights)}"
        optimizer["note"] = ", ".join(filter(None, (optimizer["note"], shares)))
    if placements.gradient is sharded and not topology.is_plain and config.no_sync == "node":
        gradients["note"] = f"on the {node} until the last micro-batch"
    return rows
