"""Shows a plan: a table on the terminal, JSON, an Accelerate YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from hf_zero.command_line import wide_console
from hf_zero.planning.compare import Comparison
from hf_zero.planning.model import PlanError
from hf_zero.planning.optimizers import kept_by
from hf_zero.planning.places import PLACES
from hf_zero.planning.plan import HEADROOM, Plan, Request, Row
from hf_zero.planning.spread import ALL_RANKS
from hf_zero.planning.units import BYTES, cell, count, size, unit_for


# Columns of the table, each with the categories of a footprint that it adds up.
COLUMNS = {
    "params": ("parameters",),
    "unsharded": ("unsharded parameters",),
    "grads": ("gradients",),
    "reducing": ("unreduced gradients", "communication", "transfers"),
    "optimizer": ("master weights", "optimizer states"),
    "activations": ("activations",),
    "logits": ("logits",),
}

TABLE_WIDTH = 200
# What a rank sends for micro-batches that several ranks share, and the name of its column.
SHARED = {"tensor parallelism": "of it for layers", "sequences": "of it for sequences"}


def columns(row: Row) -> dict[str, int]:
    """The bytes of every column at the moment of the peak; they add up to the peak."""
    peak = row.footprint.peak
    return {name: sum(peak.get(category, 0) for category in parts) for name, parts in COLUMNS.items()}


def _optimizer(request: Request) -> str:
    return request.optimizer + (" (each matrix owned by one rank)" if kept_by(request.optimizer).whole else "")


def shares(request: Request) -> str:
    """Which ranks compute with one micro-batch, if more than one, for people."""
    config = request.config
    words = [(config.tp_size, "layers"), (config.sp_size, "sequences")]
    return "".join(f", {size} of which share {what}" for size, what in words if size > 1)


def print_table(plan: Plan) -> None:
    console = wide_console(TABLE_WIDTH)
    request = plan.request
    precision = request.config.mixed_precision
    console.print(
        f"{request.name}: {plan.architecture}, {count(plan.parameters)} parameters"
        + (f" ({count(plan.trained)} trained)" if plan.trained != plan.parameters else "")
        + f", {'fp32' if precision == 'no' else precision}, {_optimizer(request)}; {request.nodes} x {request.gpus} "
        f"ranks{shares(request)}, {request.batch.rows} x {request.batch.length} tokens per "
        f"{'rank and ' if request.batches == request.world_size else ''}micro-batch, "
        f"{request.accumulation} micro-batch(es) per step",
        soft_wrap=True,
        markup=False,
    )
    rows = [row for row in _on_device(plan) if row.spread is ALL_RANKS]
    print_rows(console, [_stage_cells(plan, row) for row in rows])
    if request.link:
        _print_links(plan, console)
    for line in _notes(plan):
        console.print(line, markup=False, soft_wrap=True)
    if plan.request.shows_offload:
        _print_offload(plan, console)


def print_rows(console: Console, rows: Sequence[Mapping[str, str]], *, labels: int = 1) -> None:
    """A table with a column for each key of its rows, of which the first are `labels` and the others numbers.

    A row whose first label has a star is set in bold.
    """
    table = Table(box=None, pad_edge=False)
    for at, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if at < labels else "right")
    for row in rows:
        first, *others = row.values()
        table.add_row(first, *others, style="bold" if first.endswith(" *") else None)
    console.print(table, markup=False)


def _stage_cells(plan: Plan, row: Row) -> dict[str, str]:
    footprint, unit = row.footprint, _unit(plan)
    shared = {SHARED[name]: name for name in SHARED if any(name in one.footprint.sent for one in plan.rows)}
    numbers = columns(row) | {
        "peak": footprint.peak_bytes,
        "at rest": footprint.resident_bytes,
        "sent/step": footprint.sent_bytes,
        **{column: footprint.sent.get(name, 0) for column, name in shared.items()},
    }
    return {
        "stage": _label(row) + " *" * (row is plan.recommended),
        **{name: cell(nbytes, unit) for name, nbytes in numbers.items()},
        "fits": "yes" if row.fits else "no",
    }


def _stage(row: Row) -> str:
    return f"{row.stage}{' + checkpointing' if row.checkpointing else ''}"


def _label(row: Row) -> str:
    return f"{_stage(row)}{' + tiles' if row.tiles else ''}"


def write_plot(plan: Plan, path: Path) -> None:
    """The table's rows as bars, in one SVG file."""
    from hf_zero.tools.run_charts import stages  # imports matplotlib

    rows = [row for row in _on_device(plan) if row.spread is ALL_RANKS]
    bars = {f"stage {_label(row)}": columns(row) for row in rows}
    path.write_text(stages(bars, plan.request.gpu_memory, f"{plan.request.name}: {plan.request.world_size} ranks"))


def _on_device(plan: Plan) -> list[Row]:
    return [row for row in plan.rows if not row.offloads]


def _unit(plan: Plan) -> str:
    """The unit of the tables: the one of the largest peak."""
    return unit_for(max(row.footprint.peak_bytes for row in _on_device(plan)))


def _print_links(plan: Plan, console: Console) -> None:
    """Over which ranks each row shares its state out, and what a rank sends over which link."""
    request, unit = plan.request, _unit(plan)
    cells = [
        {
            "stage": _stage(row) + " *" * (row is plan.recommended),
            "shared out over": row.spread.name if row.stage else "nothing is",
            "peak": cell(row.footprint.peak_bytes, unit),
            "inside/step": cell(row.footprint.sent_bytes - row.footprint.between_nodes, unit),
            "between/step": cell(row.footprint.between_nodes, unit),
            f"at {size(request.link or 0)}/s": f"{request.link_seconds(row.footprint):.3g} s",
            "fits": "yes" if row.fits else "no",
        }
        for row in _on_device(plan)
    ]
    console.print(
        "\nWhat a rank sends inside its node and between nodes, and how long a node's link is busy", markup=False
    )
    print_rows(console, cells, labels=2)


def _offload_cells(plan: Plan, row: Row) -> dict[str, str]:
    footprint, ranks, unit = row.footprint, plan.request.gpus, _unit(plan)
    disk = any(one.footprint.disk for one in plan.rows)
    numbers = {
        "peak": footprint.peak_bytes,
        "at rest": footprint.resident_bytes,
        "host/node": ranks * footprint.host_bytes,
        **({"disk/node": ranks * footprint.disk_bytes} if disk else {}),
        "PCIe/step": footprint.pcie_bytes,
        **({"disk/step": footprint.disk_traffic} if disk else {}),
    }
    return {
        "stage": _stage(row),
        "optimizer in": PLACES[row.places.optimizer],
        "weights in": PLACES[row.places.parameters],
        **{name: cell(nbytes, unit) for name, nbytes in numbers.items()},
        "would fit": "yes" if row.fits else "no",
    }


def _print_offload(plan: Plan, console: Console) -> None:
    """What each stage needs with its state elsewhere; a table of its own, as none of it is recommended."""
    request = plan.request
    console.print("\nOffload, predicted and not run on a GPU yet: state in other places", markup=False)
    print_rows(console, [_offload_cells(plan, row) for row in plan.rows if row.offloads], labels=3)
    limits = [
        f"{size(nbytes)} of {what} per node{note}"
        for nbytes, what, note in (
            (request.host_memory, "host memory", f", {HEADROOM:.0%} of it left free"),
            (request.nvme, "disk", ""),
        )
        if nbytes is not None
    ]
    lines = [
        "Peak, at rest and bytes per step (PCIe both ways, disk read and written) are of one GPU, host and disk of one"
        " node. The optimizer steps on the host.",
        f"Would fit: the GPU as above{''.join(f', and {limit}' for limit in limits)}.",
    ]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _notes(plan: Plan) -> list[str]:
    request = plan.request
    rows = _on_device(plan)
    plain = next((row for row in rows if not row.checkpointing), None)
    checkpointed = next((row for row in rows if row.checkpointing), None)
    kept = [
        f"{size(row.footprint.activations)} {how}"
        for row, how in ((plain, "without checkpointing"), (checkpointed, "with it"))
        if row is not None
    ]
    unit = _unit(plan)
    largest = max(row.footprint.largest_unit for row in rows)
    logits = max(row.footprint.logits for row in rows)
    lines = [
        f"{unit} ({BYTES[unit]:,} bytes) of each rank at the moment of its peak; at rest: between steps; "
        "* recommended.",
        f"A forward leaves {', '.join(kept)} for backward. Largest unit: {size(largest)}"
        + (f", logits at most: {size(logits)}." if logits else "."),
        f"Fits: the peak, with {HEADROOM:.0%} of {size(request.gpu_memory)} left free"
        + (" (this machine's memory, shared by its ranks)." if request.shares_host else "."),
    ]
    configured = request.config.zero_stage
    if request.config.is_set("zero_stage") and not any(r.fits for r in rows if r.stage == configured):
        lines.append(f"The configured stage {configured} does not fit.")
    if plan.recommended is None:
        return [*lines, plan.reason[0].upper() + plan.reason[1:] + "."]
    best = plan.recommended
    way = " with gradient checkpointing" if best.checkpointing else ""
    over = f", {best.spread.name}" if best.spread is not ALL_RANKS else ""
    return [*lines, f"Recommended: stage {best.stage}{over}{way}: {plan.reason}."]


def to_dict(plan: Plan) -> dict:
    """Everything, as plain values; counts are bytes."""
    request, best = plan.request, plan.recommended
    return {
        "model": request.name,
        "architecture": plan.architecture,
        "parameters": plan.parameters,
        "trained": plan.trained,
        "world_size": request.world_size,
        "tp_size": request.config.tp_size,
        "sp_size": request.config.sp_size,
        "precision": request.config.mixed_precision,
        "optimizer": request.optimizer,
        "micro_batch": request.batch.rows,
        "seq_len": request.batch.length,
        "gradient_accumulation_steps": request.accumulation,
        "gpu_memory": request.gpu_memory,
        "host_memory": request.host_memory,
        "nvme": request.nvme,
        "rows": [
            {
                "stage": row.stage,
                "gradient_checkpointing": row.checkpointing,
                "offloads": row.offloads,  # and is shown only: see `recommended`
                "optimizer_home": row.places.optimizer.value,
                "parameter_home": row.places.parameters.value,
                "fits": row.fits,
                "peak_bytes": row.footprint.peak_bytes,
                "resident_bytes": row.footprint.resident_bytes,
                "sent_bytes_per_step": row.footprint.sent_bytes,
                "spread": row.spread.name,
                "settings": row.settings,
                "between_nodes_bytes_per_step": row.footprint.between_nodes,
                "link_seconds_per_step": request.link_seconds(row.footprint) if request.link else None,
                "host_bytes_per_node": request.gpus * row.footprint.host_bytes,
                "disk_bytes_per_node": request.gpus * row.footprint.disk_bytes,
                "pcie_bytes_per_step": row.footprint.pcie_bytes,
                "disk_bytes_per_step": row.footprint.disk_traffic,
                "largest_unit_bytes": row.footprint.largest_unit,
                "activation_bytes": row.footprint.activations,
                "logits_bytes": row.footprint.logits,
                "peak": row.footprint.peak,
                "resident": row.footprint.resident,
                "host": row.footprint.host,
                "disk": row.footprint.disk,
                "sent": row.footprint.sent,
                "collectives": row.footprint.calls,
            }
            for row in plan.rows
        ],
        "recommended": None
        if best is None
        else {
            "stage": best.stage,
            "gradient_checkpointing": best.checkpointing,
            "settings": best.settings,
        },
        "reason": plan.reason,
    }


def to_json(plan: Plan, measured: Comparison | None = None) -> str:
    return json.dumps(to_dict(plan) | ({} if measured is None else {"measured": measured.to_dict()}), indent=2)


def write_yaml(plan: Plan, path: Path) -> None:
    """The Accelerate YAML of the recommended stage. Raises PlanError where there is none, or it cannot be written."""
    if plan.recommended is None:
        raise PlanError(f"--write: {plan.reason}")
    stage = plan.recommended.stage
    head = f"# ZeRO-{stage} for {plan.request.name}: {plan.reason}.\n"
    if plan.recommended.checkpointing:
        head += "# Train with gradient_checkpointing: true (an argument of the script).\n"
    accelerate_yaml(plan.request, stage, head, path, plan.recommended.settings)


def accelerate_yaml(request: Request, stage: int, head: str, path: Path, more: Mapping[str, object]) -> None:
    """A configuration of this stage, under `head`, with `more` keys. Raises PlanError where it cannot be written."""
    content: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "deepspeed_config": {
            "deepspeed_multinode_launcher": "standard",
            "zero_stage": stage,
            "zero3_init_flag": stage == 3,
            "zero3_save_16bit_model": stage == 3,
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            **more,
        },
        "distributed_type": "DEEPSPEED",
        "machine_rank": 0,
        "mixed_precision": request.config.mixed_precision,
        "num_machines": request.nodes,
        "num_processes": request.world_size,
        "rdzv_backend": "static",
        "use_cpu": False,
    }
    sizes = {name: getattr(request.config, name) for name in ("tp_size", "sp_size")}
    if max(sizes.values()) > 1:
        content["parallelism_config"] = {f"parallelism_config_{name}": n for name, n in sizes.items() if n > 1}
    try:
        path.write_text(head + yaml.safe_dump(content, sort_keys=True))
    except OSError as error:
        raise PlanError(f"--write {path}: {error.strerror}") from error
