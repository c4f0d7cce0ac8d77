"""How the ranks are arranged for a configuration: which of them share one copy of what."""

from __future__ import annotations

import math
from collections.abc import Collection

from hf_zero.comm.codec import Codec
from hf_zero.comm.meter import Quantised
from hf_zero.comm.topology import Topology
from hf_zero.config import ZeroConfig
from hf_zero.core.layout import FlatLayout
from hf_zero.core.placement import STAGES, Extent, Placements
from hf_zero.errors import ZeroConfigError


def arrange(config: ZeroConfig, size: int, rank: int, machines: Collection[int] = ()) -> Topology:
    """The topology of `size` ranks as rank `rank` sees it; `machines` are the numbers of ranks on their machines.

    Raises ZeroConfigError where the ranks cannot be arranged so.
    """
    machine = _ranks_of_a_machine(config, size, machines)
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
    return Topology(replicas=size // shard, nodes=shard // local, local=local, rank=rank, machine=machine)


def quantised_kinds(config: ZeroConfig, topology: Topology) -> list[Quantised]:
    """Which messages are quantised, and how. Raises ZeroConfigError where they cannot be."""
    chosen = []
    if config.zero_quantized_weights and topology.size > 1:
        chosen.append(Quantised("weights", Codec(8), _limit(config, 8)))
    if config.zero_quantized_gradients and topology.size > 1:
        bits = config.quantized_gradient_bits
        chosen.append(Quantised("gradients", Codec(bits), _limit(config, bits)))
    if chosen and config.zero_stage == 0:
        raise ZeroConfigError("zero_quantized_gradients needs sharded optimizer states: set zero_stage to 1, 2 or 3")
    far = [name for name in ("offload_optimizer_device", "offload_param_device") if getattr(config, name) != "none"]
    if far and config.zero_quantized_weights:
        raise ZeroConfigError(
            f"zero_quantized_weights and {far[0]}: {getattr(config, far[0])} are not available together: set one of "
            "them to its default"
        )
    if chosen and topology.replicas > 1:
        raise ZeroConfigError(
            f"quantised {chosen[0].kind} are not available with several replicas (mics_shard_size), whose sums meet "
            "in one all-reduce: shard inside nodes by zero_hpz_partition_size instead, or switch "
            "zero_quantized_weights and zero_quantized_gradients off"
        )
    return chosen


def _limit(config: ZeroConfig, bits: int) -> float:
    limit = config.quantized_error_limit
    return {8: 0.05, 4: 0.25}[bits] if limit == "auto" else float(limit)


def placements_of(config: ZeroConfig, topology: Topology, shares: bool) -> Placements:
    """The row of the stage table, and over which ranks its parameters are shared out."""
    extent = Extent.NODE if topology.nodes > 1 else Extent.SHARD
    # One rank's slice is the whole: its weights are released between uses only where they can rest elsewhere.
    moves = shares or config.offload_param_device != "none"
    return STAGES[config.zero_stage if moves else 0].with_extent(extent)


def _ranks_of_a_machine(config: ZeroConfig, size: int, machines: Collection[int]) -> int:
    if config.node_size != "auto":
        node_size = int(config.node_size)
        _check_divides("node_size", node_size, size, f"there are {size} ranks")
        return node_size
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
