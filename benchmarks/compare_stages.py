"""Train one model for a few steps at every ZeRO stage, and compare speed, memory and the largest micro-batch.

    python benchmarks/compare_stages.py --model outputs/demo/base --num_processes 2 --steps 5 --budget 200MB \
        --output outputs/compare

writes comparison.md, comparison.json and, where matplotlib is installed, comparison.png. Weights and tokens are
random: only sizes and times matter here. The largest micro-batch that fits `--budget` (bytes of one rank) is
predicted as `hf-zero plan` predicts it, not tried.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from hf_zero import ZeroAccelerator, ZeroConfig, ZeroPlugin, gathered_parameters, memory_report
from hf_zero.config import values
from hf_zero.planning.model import BatchShape, PlanError, build, read_config
from hf_zero.planning.trace import Scenario, trace
from hf_zero.tools.memory import measure_peak


_MOST_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Options:
    """What both the driver and its ranks need to know."""

    model: str
    rows: int
    length: int
    steps: int
    precision: str


def train(options: Options, stage: int, target: Path) -> None:
    """One rank: train, and have rank 0 write what it has measured."""
    accelerator = ZeroAccelerator(
        zero_plugin=ZeroPlugin(zero_stage=stage), mixed_precision=options.precision, cpu=not torch.cuda.is_available()
    )
    torch.manual_seed(0)
    config = read_config(options.model)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.randint(0, config.vocab_size, (options.rows, options.length), device=accelerator.device)

    def step() -> float:
        began = time.perf_counter()
        accelerator.backward(model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - began

    step()
    with measure_peak(model) as peak:
        step()
    seconds = [step() for _ in range(options.steps)]
    found = {
        "stage": stage,
        "seconds_per_step": statistics.median(seconds),
        "tokens_per_second": accelerator.num_processes * ids.numel() / statistics.median(seconds),
        "state_bytes": memory_report(model).state_bytes,
        "peak_bytes": peak.value,
    }
    if accelerator.is_main_process:
        target.write_text(json.dumps(found))
    with gathered_parameters(model):  # nothing is on its way when the ranks part
        accelerator.wait_for_everyone()
    accelerator.end_training()


def largest_micro_batch(options: Options, stage: int, ranks: int, budget: int) -> int:
    """The most rows whose predicted peak fits the budget, 0 if not even one does."""
    model = build(read_config(options.model))

    def fits(rows: int) -> bool:
        scenario = Scenario(
            config=ZeroConfig(zero_stage=stage, mixed_precision=options.precision),
            world_size=ranks,
            batch=BatchShape(rows=rows, length=options.length),
            backend="nccl" if torch.cuda.is_available() else "gloo",
        )
        return trace(model, scenario).peak_bytes <= budget

    low, high = 0, 1
    while high <= _MOST_ROWS and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def recommend(rows: list[dict]) -> str:
    """The fastest of the stages with the largest micro-batch within a tenth of each other."""
    most = max(row["micro_batch"] for row in rows)
    if not most:
        return "No stage fits the budget with a single row: use more ranks, shorter rows or checkpointing."
    good = [row for row in rows if row["micro_batch"] >= 0.9 * most]
    best = max(good, key=lambda row: row["tokens_per_second"])
    return (
        f"Stage {best['stage']}: {best['micro_batch']} rows fit, and of the stages that fit about as many it is the "
        f"fastest ({best['tokens_per_second']:,.0f} tokens/s)."
    )


def report(rows: list[dict], options: Options, ranks: int, budget: int) -> str:
    lines = [
        f"# {options.model}: stages compared",
        "",
        f"{ranks} ranks, {options.rows} x {options.length} tokens per rank, precision {options.precision}; medians of "
        f"{options.steps} steps. Largest micro-batch: predicted, for {budget / 1e6:,.0f} MB per rank.",
        "",
        "| stage | ms per step | tokens/s | state, MB | peak, MB | largest micro-batch |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['stage']} | {1e3 * row['seconds_per_step']:,.0f} | {row['tokens_per_second']:,.0f} | "
            f"{row['state_bytes'] / 1e6:,.1f} | {row['peak_bytes'] / 1e6:,.1f} | {row['micro_batch']} |"
        )
    return "\n".join([*lines, "", recommend(rows), ""])


def draw(rows: list[dict], title: str, target: Path) -> None:
    """A chart for each figure, as no scale fits two of them, with the numbers on the bars."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: it needs matplotlib (pip install 'hf_zero[plot]')", file=sys.stderr)
        return
    charts = {
        "state between steps, MB per rank": [row["state_bytes"] / 1e6 for row in rows],
        "peak, MB per rank": [row["peak_bytes"] / 1e6 for row in rows],
        "tokens per second, all ranks": [row["tokens_per_second"] for row in rows],
        "largest micro-batch, rows": [row["micro_batch"] for row in rows],
    }
    figure = Figure(figsize=(9, 6), layout="constrained")
    figure.suptitle(title)
    for axes, (what, heights) in zip(figure.subplots(2, 2).flat, charts.items(), strict=True):
        axes.bar_label(axes.bar([str(row["stage"]) for row in rows], heights), fmt="{:,.4g}")
        axes.set(title=what, xlabel="stage")
        axes.margins(y=0.15)
    figure.savefig(target)


def run_stage(options: Options, stage: int, ranks: int, folder: Path) -> dict:
    target = folder / f"stage{stage}.json"
    command = [sys.executable, "-m", "hf_zero.cli", "launch", "--num_processes", str(ranks), __file__]
    command += ["--model", options.model, "--rows", str(options.rows), "--length", str(options.length)]
    command += ["--steps", str(options.steps), "--precision", options.precision]
    command += ["--one_stage", str(stage), "--output", str(target)]
    status = subprocess.run(command).returncode
    if status:
        sys.exit(f"compare_stages: stage {stage} ended with exit status {status}")
    return json.loads(target.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, config.json or hub name of a causal language model")
    parser.add_argument("--num_processes", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2, help="rows of a micro-batch")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--precision", choices=("no", "bf16"), default="no")
    parser.add_argument("--budget", default="80GB", help="memory of one rank, for the largest micro-batch")
    parser.add_argument("--output", default="outputs/compare", type=Path)
    parser.add_argument("--one_stage", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    options = Options(
        model=given.model, rows=given.rows, length=given.length, steps=given.steps, precision=given.precision
    )
    if given.one_stage is not None:
        train(options, given.one_stage, given.output)
        return
    budget = values.byte_size(given.budget)
    try:
        if not budget:
            raise PlanError(f"--budget {given.budget}: write a size such as 80GB")
        read_config(options.model)
    except PlanError as error:
        print(f"compare_stages: {error}", file=sys.stderr)
        sys.exit(2)
    given.output.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for stage in range(4):
            row = run_stage(options, stage, given.num_processes, Path(folder))
            rows.append(row | {"micro_batch": largest_micro_batch(options, stage, given.num_processes, budget)})
    text = report(rows, options, given.num_processes, budget)
    (given.output / "comparison.md").write_text(text)
    (given.output / "comparison.json").write_text(json.dumps(rows, indent=2))
    draw(rows, f"{options.model} on {given.num_processes} ranks", given.output / "comparison.png")
    print(text)


if __name__ == "__main__":
    main()
