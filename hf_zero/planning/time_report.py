"""Shows what `hf-zero plan --time` found: tables, JSON, a trace, the YAML of the fastest."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from hf_zero.command_line import wide_console
from hf_zero.planning.costs import Machine
from hf_zero.planning.model import PlanError
from hf_zero.planning.places import ON_DEVICE
from hf_zero.planning.plan import Request
from hf_zero.planning.report import TABLE_WIDTH, accelerate_yaml, print_rows
from hf_zero.planning.step_time import GPU_HOURS_PER_FAILURE, Pace, Run
from hf_zero.planning.units import size


_WORST = 3  # so many collectives are named that the step waits for most


def print_paces(paces: list[Pace], request: Request, machine: Machine) -> None:
    """A table with a row for each way, and what the best one waits for."""
    console = wide_console(TABLE_WIDTH)
    console.print(
        f"{request.name} on {request.nodes} x {request.gpus} ranks of {machine.name}, {request.batch.length} tokens "
        "per row",
        soft_wrap=True,
        markup=False,
    )
    print_rows(console, [_cells(pace, machine) for pace in paces])
    best = best_of(paces)
    if best is None:
        console.print("none of these fits", markup=False)
        return
    for line in _waits(best):
        console.print(line, markup=False, soft_wrap=True)


def _cells(pace: Pace, machine: Machine) -> dict[str, str]:
    return {
        "way": pace.way.label,
        "rows": str(pace.way.rows),
        "micro-batches": str(pace.way.accumulation),
        "step": seconds(pace.timeline.seconds),
        "range": " to ".join(map(seconds, bounds(pace, machine))),
        "tokens/s/rank": f"{pace.tokens_per_second:,.0f}",
        "MFU": f"{pace.mfu:.1%}",
        "waits": f"{pace.exposed:.1%}",
        "peak": size(pace.footprint.peak_bytes),
        "fits": "yes" if pace.fits else "no",
        "next bottleneck": pace.bottleneck,
    }


def best_of(paces: list[Pace]) -> Pace | None:
    """The fastest that fits."""
    return max((pace for pace in paces if pace.fits), key=lambda pace: pace.tokens_per_second, default=None)


def seconds(value: float) -> str:
    """1.23 s, 45.6 ms."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def bounds(pace: Pace, machine: Machine) -> tuple[float, float]:
    """Between which seconds the step is, where predictions for the machine miss no more than they are said to."""
    return pace.timeline.seconds / (1 + machine.error), pace.timeline.seconds * (1 + machine.error)


def _waits(pace: Pace) -> list[str]:
    by_kind: Counter[str] = Counter()
    for (kind, _), waited in pace.timeline.exposed.items():
        by_kind[kind] += waited
    lines = [f"The fastest that fits: {pace.way.label}."]
    for kind, waited in by_kind.most_common():
        of_kind = Counter({label: spent for (one, label), spent in pace.timeline.exposed.items() if one == kind})
        named = ", ".join(f"{label} {seconds(spent)}" for label, spent in of_kind.most_common(_WORST))
        lines.append(f"  waits {seconds(waited)} of a step for {kind}s ({named})")
    return lines


def print_run(run: Run, tokens: float) -> None:
    """Days, GPU-hours and the interval between saves."""
    text = f"{tokens:.3g} tokens take {run.days:,.3g} days, {run.gpu_hours:,.3g} GPU-hours without interruptions."
    if run.interval is not None and run.save_seconds is not None:
        text += (
            f" A training state is saved in {seconds(run.save_seconds)}; with a failure in "
            f"{GPU_HOURS_PER_FAILURE:,.0f} GPU-hours, save every {run.interval / 60:.0f} minutes."
        )
    else:
        text += " How often to save is open: the machine's file has no disk_rate (hf-zero doctor --disk measures one)."
    Console(highlight=False, soft_wrap=True).print(text, markup=False)


def to_json(paces: list[Pace], request: Request, machine: Machine) -> str:
    """Everything that the table says, in seconds and bytes."""
    best = best_of(paces)
    rows = [
        {
            "way": pace.way.label,
            "zero_stage": pace.way.config.zero_stage,
            "checkpointing": pace.way.checkpointing,
            "rows": pace.way.rows,
            "micro_batches": pace.way.accumulation,
            "tp_size": pace.way.config.tp_size,
            "optimizer_home": pace.way.places.optimizer.value,
            "parameter_home": pace.way.places.parameters.value,
            "seconds": pace.timeline.seconds,
            "bounds": bounds(pace, machine),
            "computing": pace.timeline.computing,
            "tokens_per_second": pace.tokens_per_second,
            "mfu": pace.mfu,
            "exposed": {f"{kind} of {label}": waited for (kind, label), waited in pace.timeline.exposed.items()},
            "peak_bytes": pace.footprint.peak_bytes,
            "fits": pace.fits,
            "fastest": pace is best,
        }
        for pace in paces
    ]
    content = {"model": request.name, "machine": machine.name, "nodes": request.nodes, "ranks": request.world_size}
    return json.dumps(content | {"ways": rows}, indent=2)


def write_best(paces: list[Pace], request: Request, path: Path) -> None:
    """The Accelerate YAML of the fastest way that fits. Raises PlanError where there is none."""
    best = best_of(paces)
    if best is None:
        raise PlanError("--write: none of these ways fits")
    head = (
        f"# {best.way.label} for {request.name}: {best.tokens_per_second:,.0f} tokens per second and rank predicted.\n"
        f"# Train with per_device_train_batch_size: {best.way.rows}, gradient_accumulation_steps: "
        f"{best.way.accumulation}, gradient_checkpointing: {str(best.way.checkpointing).lower()}.\n"
    )
    settings = dict(best.way.spread.settings)
    if best.way.places != ON_DEVICE:
        moved = best.way.places.options()
        on_disk = "nvme" in moved.values()
        settings |= {name: value for name, value in moved.items() if on_disk or "nvme" not in name}
    chosen = replace(request, config=best.way.config)
    accelerate_yaml(chosen, best.way.config.zero_stage, head, path, settings)
