"""Turns the benchmark's records into medians, ratios, tables, goals and a picture."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmark_formulas import Traffic, resident_bytes, wire_bytes
from benchmark_measure import PHASES
from benchmark_systems import SIZES, SYSTEMS, build_model, reads_memory
from rich.table import Table


PACKAGES = ("hf_zero", "torch", "transformers", "accelerate", "deepspeed", "numpy")
# (what, our system, whose figure it is divided by, field, accumulation or None for all, the goal)
GOALS = (
    ("step wall time", "zero3", "fsdp2", "wall_step", None, 0.55),
    ("step CPU time", "zero3", "fsdp2", "cpu_step", None, 0.65),
    ("step wall time", "zero3-sent", "fsdp2", "wall_step", None, 0.75),
    ("step wall time", "zero3", "ddp", "wall_step", 1, 0.90),
    ("step wall time", "zero3", "ddp", "wall_step", 4, 1.05),
    ("step wall time", "zero2", "ddp", "wall_step", 1, 0.88),
    ("step wall time", "zero2", "ddp", "wall_step", 4, 1.00),
    ("step wall time", "zero2-local", "ddp", "wall_step", 4, 0.95),
    ("step wall time", "zero2", "fsdp2-keep", "wall_step", None, 0.60),
    ("step wall time", "zero2", "deepspeed2", "wall_step", None, 0.60),
    ("step wall time", "zero3-compiled", "zero3", "wall_step", None, 1.00),
    ("transient peak", "zero3", "fsdp2", "transient", None, 0.70),
    ("bytes moved", "zero2-local", "ddp", "wire", 4, 1.01),
    ("host time beyond single", "zero3", "fsdp2", "overhead", None, 0.30),
    ("optimizer step", "zero3", "one fused AdamW call", "optimizer_over_floor", None, 1.10),
)


def describe_machine(private_loopback: bool) -> dict:
    """What a reader must know to judge the figures."""
    import psutil
    import torch

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        processor = models[0].partition(":")[2].strip() if models else processor
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions,
        "wire": "a private loopback's kernel counter" if private_loopback else "the shared loopback's kernel counter",
    }


# -- figures ---------------------------------------------------------------------------------------------------------


def summarise(records: list[dict], ranks: int) -> list[dict]:
    """One row per case: medians over rounds, the formulas, and the difference of its losses to DDP's."""
    cases: dict[tuple, list[dict]] = defaultdict(list)
    for record in records:
        case = record["case"]
        cases[case["precision"], case["accumulation"], case["system"]].append(record)
    units = None
    rows = []
    for (precision, accumulation, system), mine in cases.items():
        units = units or unit_elements(mine[0]["case"]["size"])
        row = {"precision": precision, "accumulation": accumulation, "system": system, "rounds": len(mine)}
        alone = cases.get((precision, accumulation, "single")) or [None] * len(mine)
        row["samples"] = [_sample(*pair) for pair in zip(mine, alone, strict=True)]
        row.update({name: statistics.median(one[name] for one in row["samples"]) for name in row["samples"][0]})
        row.update(_bytes(mine[0], units, ranks))
        floor = mine[0]["optimizer_floor"]
        clock = "cpu" if mine[0]["case"]["device"] == "cpu" else "wall"
        row["optimizer_over_floor"] = row[f"{clock}_optimizer"] / floor if floor else None
        ddp = cases.get((precision, accumulation, "ddp"))
        same_data = system != "single" and ddp is not None
        pairs = zip(mine[0]["losses"], ddp[0]["losses"], strict=True) if same_data else ()
        row["loss_difference"] = max((abs(a - b) for a, b in pairs), default=None)
        row["note"] = SYSTEMS[system][0].note
        rows.append(row)
    return rows


def _sample(record: dict, alone: dict | None) -> dict[str, float]:
    """The figures of one round; `alone` is the process without communication in the same round."""
    case = record["case"]
    tokens = case["rows"] * case["length"] * case["accumulation"]
    figures = {f"{kind}_{phase}": value for kind in ("wall", "cpu") for phase, value in record[kind].items()}
    if alone is not None:
        added = [record["cpu"][phase] - alone["cpu"][phase] for phase in ("forward", "backward")]
        figures["overhead"] = sum(added)
    return {**figures, "tokens_per_second": tokens / record["wall"]["step"]}


def _bytes(record: dict, units: tuple[list[int], list[int]], ranks: int) -> dict:
    """Bytes of the first round, and over the formula where there is one for the system."""
    case, (_, settings) = record["case"], SYSTEMS[record["case"]["system"]]
    kind = SYSTEMS[case["system"]][0]
    counted, loopback = record["wire_counted"], record["wire_loopback"]
    row = {name: record[name] for name in ("resident", "transient", "wire_counted", "wire_loopback", "calls")}
    row["total"] = record["resident"] + record["transient"]
    # On one machine the kernel counts what is sent; elsewhere, and where memory is read, only ours are known.
    row["wire"] = loopback if loopback and case["device"] == "cpu" and not reads_memory(case["system"]) else counted
    row["wire_over_formula"] = row["resident_over_formula"] = None
    stage = settings.get("stage", kind.stage)
    if stage is not None and case["system"].startswith(("zero", "ddp")):
        ours = case["system"] != "ddp"
        half = ours and case["precision"] == "bf16"
        traffic = Traffic(
            units=units[0],
            kept=units[1],
            ranks=ranks,
            accumulation=case["accumulation"],
            weight_bytes=2 if half else 4,
            local=settings.get("local", False),
        )
        formula = wire_bytes(stage, traffic)
        row["wire_over_formula"] = (counted if ours else row["wire"]) / formula if formula and row["wire"] else None
        held = resident_bytes(stage, record["elements"], ranks, traffic.weight_bytes)
        row["resident_over_formula"] = record["resident"] / held if ours else None
    return row


def unit_elements(size: str) -> tuple[list[int], list[int]]:
    """The elements of every unit of the model, and of those that stage 3 gathers once per micro-batch."""
    import torch

    with torch.device("meta"):
        model = build_model(size)
    embedding = model.model.embed_tokens.weight.numel()
    head = model.lm_head.weight.numel() + model.model.norm.weight.numel()
    layers = [sum(param.numel() for param in layer.parameters()) for layer in model.model.layers]
    return [embedding, *layers, head], [embedding, head]


def goals(rows: list[dict], settings: dict) -> Iterator[dict]:
    """Every goal that the measured systems allow to judge; a ratio of times is the median of its rounds."""
    found = {(row["precision"], row["accumulation"], row["system"]): row for row in rows}
    for what, ours, peer, field, accumulation, goal in GOALS:
        for (precision, micro, system), mine in found.items():
            if system != ours or accumulation not in (None, micro):
                continue
            if field == "optimizer_over_floor":
                ratio = mine[field]
            elif field == "overhead" and not settings["fake_ranks"]:
                ratio = None  # between real ranks the difference is mostly gloo's
            else:
                theirs = found.get((precision, micro, peer))
                ratio = _ratio(mine, theirs, field) if theirs else None
            if ratio is not None:
                names = {"what": f"{what}, {ours} over {peer}", "precision": precision, "accumulation": micro}
                yield {**names, "ratio": ratio, "goal": goal, "met": ratio <= goal}


def _ratio(mine: dict, theirs: dict, field: str) -> float | None:
    if field in mine["samples"][0]:
        pairs = zip(mine["samples"], theirs["samples"], strict=False)
        return statistics.median(a[field] / b[field] for a, b in pairs)
    return mine[field] / theirs[field] if mine[field] and theirs[field] else None


# -- tables ----------------------------------------------------------------------------------------------------------

COLUMNS = (
    ("step ms", "wall_step", 1e3, "{:.1f}"),
    ("CPU ms", "cpu_step", 1e3, "{:.1f}"),
    ("fwd", "cpu_forward", 1e3, "{:.1f}"),
    ("bwd", "cpu_backward", 1e3, "{:.1f}"),
    ("clip", "cpu_clip", 1e3, "{:.1f}"),
    ("opt", "cpu_optimizer", 1e3, "{:.1f}"),
    ("/floor", "optimizer_over_floor", 1, "{:.2f}"),
    ("tokens/s", "tokens_per_second", 1, "{:.0f}"),
    ("moved MB", "wire", 1e-6, "{:.2f}"),
    ("/formula", "wire_over_formula", 1, "{:.3f}"),
    ("resident MB", "resident", 1e-6, "{:.1f}"),
    ("/formula", "resident_over_formula", 1, "{:.3f}"),
    ("transient MB", "transient", 1e-6, "{:.1f}"),
    ("loss - DDP's", "loss_difference", 1, "{:.1e}"),
)


def tables(results: dict) -> Iterator[Table]:
    """One table per kind of work, then the goals, then who did not take part."""
    settings, rows = results["settings"], results["summary"]
    group = f"rank 0 of {settings['fake_ranks']} imagined" if settings["fake_ranks"] else f"{settings['ranks']} ranks"
    work = f"{settings['size']}, {group}, {settings['rows']} x {settings['length']} tokens per micro-batch"
    for precision, accumulation in dict.fromkeys((row["precision"], row["accumulation"]) for row in rows):
        mine = [row for row in rows if (row["precision"], row["accumulation"]) == (precision, accumulation)]
        title = f"{work}, accumulation {accumulation}, {precision} (per rank and step; fwd to opt: CPU ms)"
        table = Table(title=title, title_justify="left")
        table.add_column("system")
        for heading, *_ in COLUMNS:
            table.add_column(heading, justify="right")
        for row in mine:
            cells = [
                "" if row[field] is None else text.format(row[field] * factor) for _, field, factor, text in COLUMNS
            ]
            table.add_row(row["system"], *cells)
        yield table
    reached = list(goals(rows, settings))
    if reached:
        table = Table(
            "ratio (median of rounds)", "precision", "accumulation", "measured", "goal", "met", title="Goals"
        )
        for goal in reached:
            numbers = (f"{goal['ratio']:.3f}", f"{goal['goal']:.2f}", "yes" if goal["met"] else "no")
            table.add_row(goal["what"], goal["precision"], str(goal["accumulation"]), *numbers)
        yield table
    if settings["fake_ranks"]:
        layers = SIZES[settings["size"]]["num_hidden_layers"]
        table = Table("system", "precision", "accumulation", "ms", title="Host time per layer beyond `single`")
        for row in rows:
            if row["system"] != "single" and "overhead" in row:
                per_layer = row["overhead"] * 1e3 / layers / row["accumulation"]
                table.add_row(row["system"], row["precision"], str(row["accumulation"]), f"{per_layer:.3f}")
        yield table
    if results["skipped"]:
        table = Table("system", "not measured because", title="Left out")
        for system, reason in results["skipped"].items():
            table.add_row(system, reason)
        yield table


# -- picture ---------------------------------------------------------------------------------------------------------


def draw(results: dict, path: Path) -> None:
    """Bars of time, bytes sent and bytes held; one line of panels per kind of work."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, machine, settings = results["summary"], results["machine"], results["settings"]
    works = list(dict.fromkeys((row["precision"], row["accumulation"]) for row in rows))
    figure, grid = pyplot.subplots(len(works), 3, figsize=(15, 0.8 + 3.4 * len(works)), squeeze=False)
    for axes, work in zip(grid, works, strict=True):
        mine = [row for row in rows if (row["precision"], row["accumulation"]) == work][::-1]
        names = [row["system"] for row in mine]
        _stack(axes[0], names, mine, [f"cpu_{p}" for p in PHASES], 1e3)
        axes[0].set_title(f"CPU ms per step ({work[0]}, accumulation {work[1]})")
        axes[1].barh(names, [(row["wire"] or 0) * 1e-6 for row in mine])
        axes[1].set_title("MB sent or read per rank and step")
        _stack(axes[2], names, mine, ["resident", "transient"], 1e-6)
        axes[2].set_title("MB per rank: at rest, and more at the peak")
    versions = machine["versions"]
    figure.suptitle(
        f"{settings['size']}, {settings['ranks']} ranks, {machine['processor']} ({machine['cores']} cores), "
        f"torch {versions['torch']}, {machine['date'][:10]}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _stack(axes: object, names: list[str], rows: list[dict], fields: list[str], factor: float) -> None:
    left = [0.0] * len(rows)
    for field in fields:
        widths = [row[field] * factor for row in rows]
        axes.barh(names, widths, left=left, label=field.removeprefix("cpu_"))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.legend(fontsize="small")
