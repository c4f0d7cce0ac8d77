"""A plan: the footprint of every stage, with and without checkpointing, and which of them to take."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.planning.model import BatchShape
from hf_zero.planning.trace import OPTIMIZER_STATES, Footprint, Scenario, trace


# Kept free of a device's memory: driver, kernels' workspaces, and what the caching allocator cannot fill.
HEADROOM = 0.10


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user has and wants."""

    name: str
    config: ZeroConfig
    gpus: int
    nodes: int
    gpu_memory: int
    batch: BatchShape
    accumulation: int
    optimizer: str
    backend: str
    checkpointing: bool | None = None  # None: plan both ways

    @property
    def world_size(self) -> int:
        return self.gpus * self.nodes

    @property
    def usable(self) -> int:
        return int(self.gpu_memory * (1 - HEADROOM))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One stage."""

    stage: int
    checkpointing: bool
    footprint: Footprint
    fits: bool


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


def make_plan(model: nn.Module, request: Request) -> Plan:
    """Trace every stage of the model. Raises PlanError where the model cannot be traced."""
    stages = (0, 1, 2, 3) if request.world_size > 1 else (0,)
    ways = (False, True) if request.checkpointing is None else (request.checkpointing,)
    if request.checkpointing is None and not getattr(model, "supports_gradient_checkpointing", False):
        ways = (False,)
    rows = [_row(model, request, stage, checkpointing) for checkpointing in ways for stage in stages]
    recommended, reason = recommend(rows, request)
    return Plan(
        request=request,
        architecture=_architecture(model),
        parameters=sum(param.numel() for param in model.parameters()),
        trained=sum(param.numel() for param in model.parameters() if param.requires_grad),
        rows=rows,
        recommended=recommended,
        reason=reason,
    )


def _architecture(model: nn.Module) -> str:
    return type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__


def _row(model: nn.Module, request: Request, stage: int, checkpointing: bool) -> Row:
    scenario = Scenario(
        config=request.config.replace(zero_stage=stage),
        world_size=request.world_size,
        batch=request.batch,
        checkpointing=checkpointing,
        accumulation=request.accumulation,
        optimizer_states=OPTIMIZER_STATES[request.optimizer],
        backend=request.backend,
    )
    footprint = trace(model, scenario)
    return Row(
        stage=stage,
        checkpointing=checkpointing,
        footprint=footprint,
        fits=footprint.peak_bytes <= request.usable,
    )


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
    reason = f"peak {gigabytes(best.footprint.peak_bytes)} of {gigabytes(request.gpu_memory)} GB"
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
    advice = "a shorter sequence or a smaller micro-batch" if state < request.usable / 2 else "more GPUs, or LoRA"
    return (
        f"nothing fits: stage {least.stage}{' with checkpointing' if least.checkpointing else ''} needs the least, "
        f"{gigabytes(peak)} GB of {gigabytes(request.usable)} GB usable ({gigabytes(state)} GB of it at rest). "
        f"Try {advice}"
    )


def gigabytes(count: float) -> str:
    """Bytes in units of 1e9, with as many digits as are worth reading."""
    value = count / 1e9
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 0.1 else f"{value:.4f}"
