"""A plan: the footprint of every stage, with and without checkpointing, and which of them to take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.core.placement import Place
from hf_zero.errors import ZeroConfigError
from hf_zero.planning.model import BatchShape
from hf_zero.planning.optimizers import kept_by
from hf_zero.planning.places import ON_DEVICE, Places, offloaded_places
from hf_zero.planning.progress import Tell, silent
from hf_zero.planning.sharing import ranks_of_a_batch
from hf_zero.planning.spread import ALL_RANKS, Spread, spreads
from hf_zero.planning.trace import OPTIMIZER_CATEGORIES, Footprint, Scenario, trace
from hf_zero.planning.units import size


# Kept free of a device's memory: driver, kernels' workspaces, and what the caching allocator cannot fill; and of the
# host's: the processes themselves, data loading, the page cache.
HEADROOM = 0.10
# What is planned with besides where activations do not fit: the loss in tiles costs nothing, MLPs are computed twice.
_TILES = ({"tile_loss": 1024}, {"tile_loss": 1024, "tile_mlp": 1024})
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
    link: int | None = None  # bytes per second between nodes, of one node; None: rows over all ranks only
    shares_host: bool = False  # `gpu_memory` is this machine's memory, shared by CPU ranks

    @property
    def world_size(self) -> int:
        return self.gpus * self.nodes

    @property
    def data_ranks(self) -> int:
        """Ranks that state is shared out over: all that hold the same part of each layer."""
        return self.world_size // self.config.tp_size

    @property
    def batches(self) -> int:
        """Different micro-batches at a time."""
        return self.world_size // ranks_of_a_batch(self.config)

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

    def link_seconds(self, footprint: Footprint) -> float:
        """What a step's traffic takes between nodes, if nothing else uses the link; a node's ranks share it."""
        return self.gpus * footprint.between_nodes / self.link if self.link else 0.0

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
    """One stage, with its state in some places."""

    stage: int
    checkpointing: bool
    footprint: Footprint
    fits: bool
    spread: Spread = ALL_RANKS
    places: Places = ON_DEVICE
    tiles: Mapping[str, int] = field(default_factory=dict)  # what the configuration does not have, and should

    @property
    def settings(self) -> dict[str, object]:
        """What a configuration needs to say besides the stage."""
        return {**self.spread.settings, **self.tiles}

    @property
    def offloads(self) -> bool:
        """Whether the device keeps less than all of it."""
        return self.places != ON_DEVICE


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


def make_plan(model: nn.Module, request: Request, tell: Tell = silent) -> Plan:
    """Trace every stage of the model, and `tell` what comes next. Raises PlanError where it cannot be traced."""
    ways = (False, True) if request.checkpointing is None else (request.checkpointing,)
    if request.checkpointing is None and not getattr(model, "supports_gradient_checkpointing", False):
        ways = (False,)

    def traced(choices: list[tuple[bool, int, Spread, Places]]) -> list[Row]:
        rows = []
        for checkpointing, stage, spread, places in choices:
            way = f"stage {stage}{' with checkpointing' if checkpointing else ''}"
            way += "" if places == ON_DEVICE else " with offload"
            tell(f"training {way} without values", len(rows) + 1, len(choices))
            rows.append(_row(model, request, stage, checkpointing, spread=spread, places=places))
        return rows

    rows = traced([(way, *choice, ON_DEVICE) for way in ways for choice in _spread_out(request)])
    recommended, reason = recommend(rows, request)
    if recommended is None:
        tiled = _tiled_rows(model, request, rows, tell)
        recommended, why = recommend(tiled, request) if tiled else (None, "")
        rows, reason = rows + tiled, why if recommended is not None else reason
    elsewhere: list[Row] = []
    if request.backend == "nccl" and (request.shows_offload or recommended is None):
        elsewhere = traced([(way, *choice) for way in ways for choice in _elsewhere(request)])
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


def _tiled_rows(model: nn.Module, request: Request, rows: list[Row], tell: Tell) -> list[Row]:
    """Rows with losses, then also MLPs, in tiles, until one fits: of stages whose state fits, if there are any."""
    found: list[Row] = []
    for tiles in _TILES:
        missing = {name: tokens for name, tokens in tiles.items() if not getattr(request.config, name)}
        for row in rows:
            if not missing or row.footprint.resident_bytes > request.usable or any(each.fits for each in found):
                continue
            tell(f"nothing fits; training stage {row.stage}{_way(row)} in tiles without values")
            try:
                found.append(_row(model, request, row.stage, row.checkpointing, spread=row.spread, tiles=missing))
            except ZeroConfigError:  # a model without such tiles
                break
    return found


def _architecture(model: nn.Module) -> str:
    return type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__


def _row(
    model: nn.Module,
    request: Request,
    stage: int,
    checkpointing: bool,
    *,
    ranks: int | None = None,
    spread: Spread = ALL_RANKS,
    places: Places = ON_DEVICE,
    tiles: Mapping[str, int] | None = None,
) -> Row:
    settings = {**spread.settings, **(tiles or {}), "zero_stage": stage}
    if request.link:
        settings["node_size"] = request.gpus
    if request.backend == "nccl":  # the state of CPU ranks rests where their configuration says
        settings |= places.options()
    scenario = Scenario(
        config=request.config.replace(**settings),
        world_size=ranks or request.world_size,
        batch=request.batch,
        checkpointing=checkpointing,
        accumulation=request.accumulation,
        kept=kept_by(request.optimizer),
        backend=request.backend,
    )
    footprint = trace(model, scenario)
    fits = request.fits(footprint)
    return Row(
        stage=stage,
        checkpointing=checkpointing,
        footprint=footprint,
        fits=fits,
        spread=spread,
        places=places,
        tiles=tiles or {},
    )


def _spread_out(request: Request) -> list[tuple[int, Spread]]:
    """The stages, each with the ranks that it may share its state out over."""
    stages = (0, 1, 2, 3) if request.data_ranks > 1 else (0,)
    if not request.link:
        return [(stage, ALL_RANKS) for stage in stages]
    gpus = request.gpus // request.config.tp_size
    return [(stage, s) for stage in stages for s in spreads(stage, request.nodes, gpus, request.accumulation)]


def _elsewhere(request: Request) -> list[tuple[int, Spread, Places]]:
    """Stages with their state in other places; of one rank, which shards nothing, all but 2 and 3 are the same."""
    ranks, disk = request.data_ranks, request.offload or request.nvme is not None
    stages = (1, 2, 3) if ranks > 1 else (2, 3)
    return [(stage, ALL_RANKS, places) for stage in stages for places in offloaded_places(stage, ranks, disk)]


def recommend(rows: list[Row], request: Request) -> tuple[Row | None, str]:
    """The first row that fits, of rows in order of what they cost in time.

    Recomputing activations costs about a third of the computation at every stage, a higher stage costs communication;
    stage 1 sends no more than stage 0 and keeps less, so stage 0 is for one process.
    """
    useful = [row for row in rows if row.stage > 0 or request.data_ranks == 1]
    fitting = [row for row in useful if row.fits]
    if not fitting:
        least = min(useful, key=lambda row: row.footprint.peak_bytes)
        return None, _nothing_fits(least, request)
    if request.link and request.nodes > 1:
        return _by_link(fitting, request)
    best = fitting[0]
    same = [r for r in fitting if r.checkpointing == best.checkpointing and r.stage > best.stage]
    reason = f"peak {size(best.footprint.peak_bytes)} of {size(request.gpu_memory)}"
    if request.data_ranks == 1:
        one = "one process" if request.world_size == 1 else "all ranks share its layers"
        reason += f"; {one}, so there is nothing to shard"
    elif same and same[-1].footprint.sent_bytes > best.footprint.sent_bytes:
        more = same[-1].footprint.sent_bytes / best.footprint.sent_bytes
        reason += f"; the lowest stage that fits, and stage {same[-1].stage} would send {more:.1f} times as much"
    elif best.stage > 1:
        reason += "; the lower stages do not fit"
    if best.checkpointing and request.checkpointing is None:
        reason += "; only with gradient checkpointing"
    if best.tiles:
        reason += f"; only with {', '.join(f'{name} {tokens}' for name, tokens in best.tiles.items())}"
    return best, reason


def _by_link(fitting: list[Row], request: Request) -> tuple[Row, str]:
    """Of rows that fit, one that is exact, recomputes nothing if it can, and then takes least time between nodes.

    A tenth more is no difference: then the lower stage, which sends less inside the nodes.
    """
    exact = [row for row in fitting if row.spread.exact]
    least_work = [row for row in exact if not row.checkpointing] or exact
    seconds = {id(row): request.link_seconds(row.footprint) for row in fitting}
    least = min(seconds[id(row)] for row in least_work)
    best = next(row for row in least_work if seconds[id(row)] <= 1.1 * least)
    reason = f"peak {size(best.footprint.peak_bytes)} of {size(request.gpu_memory)}, and "
    reason += f"{seconds[id(best)]:.3g} s of a step between nodes"
    plain = [row for row in least_work if row.stage == best.stage and row.spread is ALL_RANKS and row is not best]
    if plain:
        reason += f" where stage {best.stage} over all ranks takes {seconds[id(plain[0])]:.3g} s"
    eight = [r for r in fitting if not r.spread.exact and r.checkpointing == best.checkpointing]
    if eight:
        reason += f"; in 8 bits {seconds[id(eight[0])]:.3g} s, with an error that every step measures"
    return best, reason


def _nothing_fits(least: Row, request: Request) -> str:
    peak, state = least.footprint.peak_bytes, least.footprint.resident_bytes
    return (
        f"nothing fits: stage {least.stage}{_way(least)} needs the least, "
        f"{size(peak)} of {size(request.usable)} usable ({size(state)} of it at rest)"
    )


def _way(row: Row) -> str:
    ways = [name for name, taken in (("checkpointing", row.checkpointing), ("tiles", row.tiles)) if taken]
    return f" with {' and '.join(ways)}" if ways else ""


def _enough_ranks(model: nn.Module, request: Request, checkpointing: bool, tell: Tell) -> int | None:
    """How many GPUs would be enough at stage 3, found by doubling; None where no number is."""
    ranks = 2 * request.world_size
    while ranks <= _MOST_RANKS:
        tell(f"nothing fits; training stage 3 on {ranks} {request.rank}s without values")
        row = _row(model, request, 3, checkpointing, ranks=ranks)
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
    row = min(fitting, key=lambda row: (row.places.optimizer.distance, row.places.parameters.distance))
    names = {Place.HOST: "host memory", Place.DISK: "files on disk"}
    what = f"the optimizer state in {names[row.places.optimizer]}"
    if row.places.parameters is not Place.DEVICE:
        what += f" and the weights in {names[row.places.parameters]}"
    needs = [f"{size(row.footprint.peak_bytes)} per GPU"]
    for count, place in ((row.footprint.host_bytes, "host memory"), (row.footprint.disk_bytes, "disk")):
        needs += [f"{size(count * request.gpus)} of {place} per node"] if count else []
    return [
        advice,
        f"With {what}, stage {row.stage}{_way(row)} needs {' and '.join(needs)}; offload has not been run on a GPU "
        "yet, see docs/offload.md",
    ]
