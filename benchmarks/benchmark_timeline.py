"""Compares predicted step times with measured ones: of this machine's CPU ranks, and published ones of GPUs.

    python benchmarks/benchmark_timeline.py here --output outputs/timeline
    python benchmarks/benchmark_timeline.py links --output outputs/timeline
    python benchmarks/benchmark_timeline.py published --output outputs/timeline

`here` calibrates this machine once, takes the times of steps (benchmarks/measure_steps.py) for so many minutes, and
predicts the same steps; run again, it goes on where it ended.
`links` does the same for two nodes with a slow link between them (benchmarks/benchmark_link.py, which needs root).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import benchmark_link
import yaml
from benchmark_systems import build_model
from measure_steps import LENGTH, all_settings, step_seconds, take
from rich.console import Console
from torch import nn
from transformers import AutoConfig

from hf_zero.config import ZeroConfig
from hf_zero.planning.costs import Machine, read_machine
from hf_zero.planning.model import BatchShape, build
from hf_zero.planning.plan import Request
from hf_zero.planning.step_time import Pace, Way, time_step
from hf_zero.tools.calibrate import calibrate


HERE = Path(__file__).parent
# Systems of benchmark.py, with the stage and the way of moving that they stand for.
SYSTEMS = {f"zero{stage}{way}": (stage, not way) for stage in range(4) for way in ("", "-sent")}


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Seconds of a step, or tokens per second: what was measured, and what was predicted."""

    what: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def predict(model: nn.Module, machine: Machine, config: ZeroConfig, backend: str, work: dict) -> Pace:
    """The pace of one way to train: gpus, nodes, rows, length, and perhaps accumulation and checkpointing."""
    request = Request(
        name="",
        config=config,
        gpus=work["gpus"],
        nodes=work["nodes"],
        gpu_memory=int(machine.memory),
        batch=BatchShape(rows=work["rows"], length=work["length"]),
        accumulation=work.get("accumulation", 1),
        optimizer="adamw",
        backend=backend,
    )
    way = Way(
        config=config,
        checkpointing=work.get("checkpointing", False),
        rows=work["rows"],
        accumulation=request.accumulation,
    )
    return time_step(model, request, way, machine)


# -- published --------------------------------------------------------------------------------------------------------


def published(args: argparse.Namespace) -> Iterator[Compared]:
    """Tokens per second and GPU of other systems, against ours on the same machines by the cost model."""
    data = yaml.safe_load((HERE / "published.yaml").read_text())
    models = {name: _model(**about) for name, about in data["models"].items()}
    for run in data["runs"]:
        like = dict(data["machines"].get(run["machine"], {"like": run["machine"]}))
        machine = replace(read_machine(like.pop("like")), **like)
        nodes, gpus = max(1, run["gpus"] // machine.ranks_per_node), min(run["gpus"], machine.ranks_per_node)
        config = ZeroConfig(zero_stage=run["stage"], mixed_precision="bf16")
        pace = predict(models[run["model"]], machine, config, "nccl", {**run, "nodes": nodes, "gpus": gpus})
        what = f"{run['source']}: {run['model']}, {run['gpus']} {run['machine']}, stage {run['stage']}"
        what += ", checkpointing" if run.get("checkpointing") else ""
        what += " (fitted)" if run.get("fitted") else ""
        yield Compared(what=what, measured=run["tokens"], predicted=pace.tokens_per_second)


def _model(type: str, **about: object) -> nn.Module:
    if type == "gpt2":
        about |= {"activation_function": "gelu", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return build(AutoConfig.for_model(type, n_positions=8192, **about))
    return build(AutoConfig.for_model(type, max_position_embeddings=8192, **about))


# -- here -------------------------------------------------------------------------------------------------------------


def here(args: argparse.Namespace) -> Iterator[Compared]:
    """Seconds of a step on CPU ranks of this machine; what was measured before is not measured again."""
    machine = read_machine(str(_calibrated(args.output)))
    settings = all_settings(args.sizes, args.ranks, args.precision, args.accumulation, args.systems)
    file = args.output / "steps.jsonl"
    take(settings, file, rounds=args.rounds, steps=args.steps, minutes=args.minutes)
    measured = step_seconds(settings, file)
    print(f"{len(measured)} of {len(settings)} settings are measured")
    for setting, seconds in measured.items():
        stage, reads = SYSTEMS[setting.system]
        dtype = "bf16" if setting.precision == "bf16" else "no"
        config = ZeroConfig(zero_stage=stage, mixed_precision=dtype, peer_memory=reads)
        work = {"gpus": setting.ranks, "nodes": 1, "rows": 1, "length": LENGTH, "accumulation": setting.accumulation}
        pace = predict(build_model(setting.size).to("meta"), machine, config, "gloo", work)
        yield Compared(what=str(setting), measured=seconds, predicted=pace.timeline.seconds)


def _calibrated(folder: Path) -> Path:
    """The description of this machine, measured with a rank on each core."""
    path = folder / "machine.yaml"
    if not path.exists():
        path.write_text(calibrate(os.cpu_count() or 1))
    return path


# -- links ------------------------------------------------------------------------------------------------------------

RATES = (100, 20)  # MB/s from node to node
_ON_LINKS = ("hf_zero, stage 3", "hf_zero, nodes keep weights")


def links(args: argparse.Namespace) -> Iterator[Compared]:
    """Seconds of a step of 2 x 2 CPU ranks of this machine, whose nodes are linked slowly."""
    of_node, size, precision = benchmark_link.RANKS_OF_A_NODE, args.sizes[0], args.precision[0]
    work = {"rows": 1, "length": 32, "accumulation": 8}
    # The ranks of a node share the link, and all ranks share the cores.
    machine = read_machine(str(_calibrated(args.output))).shared_by(2 * of_node)
    for rate in RATES:
        rows = args.output / f"link-{size}-{precision}-{rate}.json"
        if not rows.exists():
            command = [sys.executable, str(HERE / "benchmark_link.py"), "--size", size, "--rate", str(rate)]
            command += ["--precision", precision, "--rows", *_ON_LINKS, "--output", str(rows)]
            subprocess.run(command, check=True)
        linked = replace(machine, ranks_per_node=of_node, net_rate=rate * 1e6 / of_node)
        for row in json.loads(rows.read_text()):
            settings = benchmark_link.ROWS[row["row"]]
            dtype = "bf16" if precision == "bf16" else "no"
            config = ZeroConfig(zero_stage=3, mixed_precision=dtype, node_size=of_node, **settings)
            pace = predict(build_model(size).to("meta"), linked, config, "gloo", {**work, "nodes": 2, "gpus": of_node})
            what = f"{size}, {precision}, 2 x {of_node} ranks, {rate} MB/s, "
            what += row["row"].removeprefix("hf_zero, ")
            yield Compared(what=what, measured=row["seconds"], predicted=pace.timeline.seconds)


# -- tables -----------------------------------------------------------------------------------------------------------


def kendall(pairs: Iterable[tuple[float, float]]) -> float:
    """Kendall's tau: pairs in the same order less pairs in opposite orders, over all pairs (M. Kendall, 1938)."""
    signs = [
        ((one[0] > other[0]) - (one[0] < other[0])) * ((one[1] > other[1]) - (one[1] < other[1]))
        for one, other in itertools.combinations(list(pairs), 2)
    ]
    return sum(signs) / len(signs)


def show(found: list[Compared], unit: str) -> str:
    """A table in Markdown, and what it says as a whole."""
    lines = [f"| what | measured, {unit} | predicted, {unit} | error |", "| --- | --- | --- | --- |"]
    lines += [f"| {one.what} | {one.measured:.4g} | {one.predicted:.4g} | {one.error:+.0%} |" for one in found]
    free = [one for one in found if not one.what.endswith("(fitted)")]
    errors = [abs(one.error) for one in free]
    tau = kendall((one.measured, one.predicted) for one in free)
    lines += ["", f"Median error {statistics.median(errors):.0%}, worst {max(errors):.0%}, Kendall's tau {tau:.2f}."]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("against", choices=("here", "links", "published"))
    parser.add_argument("--sizes", nargs="+", default=["33m", "125m"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=15, help="`here` measures no longer than that")
    parser.add_argument("--output", type=Path, default=Path("outputs/timeline"))
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    found = list({"here": here, "links": links, "published": published}[args.against](args))
    text = show(found, "tokens/s/GPU" if args.against == "published" else "s")
    (args.output / f"{args.against}.md").write_text(text + "\n")
    Console(width=200).print(text, markup=False)


if __name__ == "__main__":
    main()
