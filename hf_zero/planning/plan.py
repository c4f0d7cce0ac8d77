"""A plan: the footprint of every stage, with and without checkpointing, and which of them to take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.planning.homes import ON_DEVICE, Home, Homes, offloaded_homes
from hf_zero.planning.model import BatchShape
from hf_zero.planning.offload import offload
from hf_zero.planning.trace import OPTIMIZER_CATEGORIES, OPTIMIZER_STATES, Footprint, Scenario, trace
from hf_zero.planning.units import size


# Kept free of a device's memory: driver, kernels' workspaces, and what the caching allocator cannot fill; and of the
# host's: the processes themselves, data loading, the page cache.
HEADROOM = 0.10
_MOST_RANKS = 4096  # where the search for a number of GPUs that is enough ends


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user has and wants."""

    name: str
    config: ZeroConfig
    gpus: int
    nodes: int
    gpu_memory: int  # of one rank, whatever it trains on
    batch: BatchShape
    accumulation: int
    optimizer: str
    backend: str
    checkpointing: bool | None = None  # None: plan both ways
    offload: bool = False  # show what offload would need
    host_memory: int | None = None  # of one node; None: as much as it takes
    nvme: int | None = None  # of one node
    shares_host: bool = False  # `gpu_memory` is this machine's memory, shared by CPU ranks

    @property
    def world_size(self) -> int:
        return self.gpus * self.nodes

    @property
    def rank(self) -> str:
        """What one rank trains on, in words."""
        return "CPU rank" if self.backend == "gloo" else "GPU"

    @property
    def usable(self) -> int:
        return int(self.gpu_memory * (1 - HEADROOM))

    @property
    def shows_offload(self) -> bool:
        return self.offload or self.host_memory is not None or self.nvme is not None

    def fits(self, footprint: Footprint) -> bool:
        """Whether the peak fits the device, and what rests elsewhere the node."""
        on_host, on_disk = (self.gpus * count for count in (footprint.host_bytes, footprint.disk_bytes))
        return (
            footprint.peak_bytes <= self.usable
            and (self.host_memory is None or on_host <= self.host_memory * (1 - HEADROOM))
            and (self.nvme is None or on_disk <= self.nvme)
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One stage, with its state at one set of homes."""

    stage: int
    checkpointing: bool
    footprint: Footprint
    fits: bool
    homes: Homes = ON_DEVICE

    @property
    def available(self) -> bool:
        """Whether this version can train so; what it cannot is only predicted."""
        return self.homes == ON_DEVICE


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every row, the recommended one (None where nothing fits), and the reason in one line."""

    request: Request
    architecture: str
    parameters: int
    trained: int
    rows: list[Row]
    recommended: Row | None
    reason: str


def make_plan(model: nn.Module, request: Request, tell: Callable[[str], object] = len) -> Plan:
    """Trace every stage of the model, and `tell` what comes next. Raises PlanError where it cannot be traced."""
    stages = (0, 1, 2, 3) if request.world_size > 1 else (0,)
    ways = (False, True) if request.checkpointing is None else (request.checkpointing,)
    if request.checkpointing is None and not getattr(model, "supports_gradient_checkpointing", False):
        ways = (False,)
    rows = []
    for checkpointing in ways:
        for stage in stages:
            way = f"stage {stage}{' with checkpointing' if checkpointing else ''}"
            tell(f"training {way} without values, {len(rows) + 1} of {len(ways) * len(stages)}")
            rows.append(_row(model, request, stage, checkpointing))
    elsewhere = [moved for row in rows for moved in _elsewhere(row, request)]
    recommended, reason = recommend(rows, request)
    if recommended is None:
        enough = _enough_ranks(model, request, ways[-1], tell)
        reason = ". ".join([reason, *_other_ways(elsewhere, request, enough)])
    return Plan(
        request=request,
        architecture=_architecture(model),
        parameters=sum(param.numel() for param in model.parameters()),
        trained=sum(param.numel() for param in model.parameters() if param.requires_grad),
        rows=rows + (elsewhere if request.shows_offload else []),
        recommended=recommended,
        reason=reason,
    )


def _architecture(model: nn.Module) -> str:
    return type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__


def _row(model: nn.Module, request: Request, stage: int, checkpointing: bool, ranks: int | None = None) -> Row:
    scenario = Scenario(
        config=request.config.replace(zero_stage=stage),
        world_size=ranks or request.world_size,
        batch=request.batch,
        checkpointing=checkpointing,
        accumulation=request.accumulation,
        optimizer_states=OPTIMIZER_STATES[request.optimizer],
        backend=request.backend,
    )
    footprint = trace(model, scenario)
    return Row(stage=stage, checkpointing=checkpointing, footprint=footprint, fits=request.fits(footprint))


def _elsewhere(row: Row, request: Request) -> list[Row]:
    """The same stage with its state at other homes; one rank, which shards nothing, stands for stages 2 and 3."""
    rows = []
    for stage in (row.stage,) if request.world_size > 1 else (2, 3):
        for homes in offloaded_homes(stage, request.world_size, disk=request.offload or request.nvme is not None):
            footprint = offload(
                row.footprint,
                homes,
                stage=stage,
                ranks=request.world_size,
                config=request.config,
                accumulation=request.accumulation,
            )
            fits = request.fits(footprint)
            rows.append(Row(stage=stage, checkpointing=row.checkpointing, footprint=footprint, fits=fits, homes=homes))
    return rows


def recommend(rows: list[Row], request: Request) -> tuple[Row | None, str]:
    """The first row that fits, of rows in order of what they cost in time.

    Recomputing activations costs about a third of the computation at every stage, a higher stage costs communication;
    stage 1 sends no more than stage 0 and keeps less, so stage 0 is for one process.
    """
    useful = [row for row in rows if row.stage > 0 or request.world_size == 1]
    fitting = [row for row in useful if row.fits]
    if not fitting:
        least = min(useful, key=lambda row: row.footprint.peak_bytes)
        return None, _nothing_fits(least, request)
    best = fitting[0]
    same = [r for r in fitting if r.checkpointing == best.checkpointing and r.stage > best.stage]
    reason = f"peak {size(best.footprint.peak_bytes)} of {size(request.gpu_memory)}"
    if request.world_size == 1:
        reason += "; one process, so there is nothing to shard"
    elif same and same[-1].footprint.sent_bytes > best.footprint.sent_bytes:
        more = same[-1].footprint.sent_bytes / best.footprint.sent_bytes
        reason += f"; the lowest stage that fits, and stage {same[-1].stage} would send {more:.1f} times as much"
    elif best.stage > 1:
        reason += "; the lower stages do not fit"
    if best.checkpointing and request.checkpointing is None:
        reason += "; only with gradient checkpointing"
    return best, reason


def _nothing_fits(least: Row, request: Request) -> str:
    peak, state = least.footprint.peak_bytes, least.footprint.resident_bytes
    return (
        f"nothing fits: stage {least.stage}{_way(least)} needs the least, "
        f"{size(peak)} of {size(request.usable)} usable ({size(state)} of it at rest)"
    )


def _way(row: Row) -> str:
    return " with checkpointing" if row.checkpointing else ""


def _enough_ranks(
    model: nn.Module, request: Request, checkpointing: bool, tell: Callable[[str], object]
) -> int | None:
    """How many GPUs would be enough at stage 3, found by doubling; None where no number is."""
    ranks = 2 * request.world_size
    while ranks <= _MOST_RANKS:
        tell(f"nothing fits; training stage 3 on {ranks} {request.rank}s without values")
        row = _row(model, request, 3, checkpointing, ranks)
        if row.fits:
            return ranks
        footprint = row.footprint
        shared = sum(footprint.peak.get(name, 0) for name in ("parameters", *OPTIMIZER_CATEGORIES))
        if footprint.peak_bytes - shared > request.usable:  # what no rank shares with others is too much
            return None
        ranks *= 2
    return None


def _other_ways(elsewhere: list[Row], request: Request, enough: int | None) -> list[str]:
    """What could be done where nothing fits: sentences, the last one on what only offload would do."""
    if enough is None:
        advice = "Try a shorter sequence, a smaller micro-batch, or LoRA"
    else:
        advice = f"Try more {request.rank}s ({enough} in all would fit), fewer tokens in a micro-batch, or LoRA"
    fitting = [row for row in elsewhere if row.fits]
    if not fitting:
        return [advice]
    row = min(fitting, key=lambda row: (row.homes.optimizer.distance, row.homes.parameters.distance))
    places = {Home.HOST: "host memory", Home.DISK: "files on disk"}
    what = f"the optimizer state in {places[row.homes.optimizer]}"
    if row.homes.parameters is not Home.DEVICE:
        what += f" and the weights in {places[row.homes.parameters]}"
    needs = [f"{size(row.footprint.peak_bytes)} per GPU"]
    for count, place in ((row.footprint.host_bytes, "host memory"), (row.footprint.disk_bytes, "disk")):
        needs += [f"{size(count * request.gpus)} of {place} per node"] if count else []
    return [
        advice,
        f"With {what}, stage {row.stage}{_way(row)} would need {' and '.join(needs)}, but this version does not "
        "offload yet",
    ]
