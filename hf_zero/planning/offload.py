"""What a traced stage would need with its sharded state elsewhere: bytes move from the device, and over the bus."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hf_zero.config import ZeroConfig
from hf_zero.core.build import DTYPES
from hf_zero.core.placement import STAGES, Placement
from hf_zero.planning.homes import Home, Homes
from hf_zero.planning.trace import OPTIMIZER_CATEGORIES, Footprint


# State travels in pieces of this size: two of them each way over the bus, three between host memory and disk (one is
# read, one stepped, one written).
PIECE = 64 * 2**20
_BUS_PIECES, _DISK_PIECES = 2, 3
_STEPPED = ("master weights", "optimizer states")
_MASTER_BYTES = 4  # gradients are accumulated in fp32


def offload(
    traced: Footprint, homes: Homes, *, stage: int, ranks: int, config: ZeroConfig, accumulation: int
) -> Footprint:
    """The footprint of `traced` with optimizer state, and at stage 3 weights, at other homes. A prediction only.

    Gradients are copied to the host as they are reduced and accumulated there, the optimizer steps on the host, and
    the new 16-bit weights come back: once per step where they rest on the device, else for each gather.
    """
    places: dict[Home, Counter[str]] = {home: Counter() for home in Home}
    state = {name: traced.resident.get(name, 0) for name in _STEPPED}
    places[homes.optimizer].update(state)
    places[Home.HOST]["gradients"] = traced.gradients
    ring = _BUS_PIECES * min(PIECE, traced.gradients)
    places[Home.HOST]["buffers"] = ring
    if homes.optimizer is Home.DISK:
        places[Home.HOST]["buffers"] += _DISK_PIECES * min(PIECE, sum(state.values()))
    peak, resident = Counter(traced.peak_without_optimizer), Counter(traced.resident)
    for name in OPTIMIZER_CATEGORIES:
        resident.pop(name, None)
    peak["transfers"] = ring
    rest = STAGES[stage].parameter is Placement.SHARDED
    if rest:
        # Without its master beside it, a slice of the weights needs a place of its own.
        places[homes.parameters]["parameters"] += traced.trained_slices
    if homes.parameters is not Home.DEVICE:
        # One rank is traced with whole weights on its device; two units of them would be in use at a time.
        released = traced.frozen_slices if ranks > 1 else traced.resident["parameters"]
        places[homes.parameters]["parameters"] += traced.frozen_slices
        peak["unsharded parameters"] += 2 * traced.largest_unit if ranks == 1 else 0
        peak["parameters"] -= released
        resident["parameters"] -= released
    for held in (peak, resident):
        held.update(places[Home.DEVICE])
    uploaded = _uploaded(traced, homes, ranks, accumulation)
    reductions = accumulation if STAGES[stage].gradient is Placement.SHARDED and config.no_sync == "reduce" else 1
    wire = DTYPES[config.communication_data_type].itemsize
    traffic = 2 * sum(state.values()) if homes.optimizer is Home.DISK else 0
    if homes.parameters is Home.DISK:
        traffic += uploaded + traced.trained_slices
    return replace(
        traced,
        resident=_nonzero(resident),
        peak=_nonzero(peak),
        host=_nonzero(places[Home.HOST]),
        disk=_nonzero(places[Home.DISK]),
        pcie_bytes=uploaded + reductions * traced.gradients * wire // _MASTER_BYTES,
        disk_traffic=traffic,
    )


def _uploaded(traced: Footprint, homes: Homes, ranks: int, accumulation: int) -> int:
    """Weights that go to the device in a step: the new ones, or a slice for every gather of the step."""
    if homes.parameters is Home.DEVICE:
        return traced.trained_slices
    if ranks == 1:  # no gathers to count: once for forward, once for backward
        return 2 * accumulation * (traced.trained_slices + traced.frozen_slices)
    return traced.sent.get("all_gather", 0) // (ranks - 1)


def _nonzero(counts: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}
