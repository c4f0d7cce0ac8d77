"""Measures how far every model of the test suite ends from DDP, and writes the tables of docs/parity.md.

    python -m benchmarks.parity_report docs/parity.md

It trains by the functions of the parity tests (`tests/support/reference.py`, `tests/support/zoo.py`), on CPU ranks, so
each number is one that a test bounds; a model that is out of bounds ends the run and leaves the page as it was. Only
what stands between the two marks of the page is replaced. Run it from the root of the repository, where it takes some
minutes.
"""

import argparse
import datetime
import functools
import itertools
import os
import platform
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from tests.support import zoo
from tests.support.harness import run_ranks
from tests.support.reference import OPTIMIZERS, Plan, check_stages


BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
MEASURES = ("loss", "norm", "weight")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One table: how many ranks train, and what each step does."""

    title: str
    world_size: int
    plan: Plan


SETUPS = (
    Setup(title="2 ranks, one micro-batch per step", world_size=2, plan=Plan()),
    Setup(
        title="2 ranks, 3 micro-batches per step and a last step of 2",
        world_size=2,
        plan=Plan(accumulation=3, ragged=True),
    ),
    Setup(
        title="2 ranks, 3 micro-batches per step, clipped to a norm of 0.3",
        world_size=2,
        plan=Plan(accumulation=3, clip=0.3),
    ),
    Setup(
        title="4 ranks, 3 micro-batches per step and a last step of 2, clipped to a norm of 0.3",
        world_size=4,
        plan=Plan(accumulation=3, ragged=True, clip=0.3),
    ),
)


def measure(model: str, optimizer: str, setup: Setup) -> dict[int, dict[str, float]]:
    """The largest differences from DDP at each stage, over all ranks. Raises where one is out of the tests' bounds."""
    ranks = run_ranks(
        check_stages,
        functools.partial(zoo.build, model),
        functools.partial(zoo.batch, model),
        setup.plan,
        optimizer=OPTIMIZERS[optimizer],
        ddp={"find_unused_parameters": model in zoo.WITH_UNUSED_PARAMETERS},
        world_size=setup.world_size,
        timeout=600,
    )
    return {stage: {what: max(rank[stage][what] for rank in ranks) for what in MEASURES} for stage in ranks[0]}


def rows(model: str, measured: dict[str, dict[int, dict[str, float]]]) -> list[str]:
    """A model's lines of a table, from its differences by optimizer; stages with the same ones share a line."""
    stages = sorted(next(iter(measured.values())))
    cells = {
        stage: [number(measured[name][stage][what]) for name in measured for what in MEASURES] for stage in stages
    }
    lines = []
    for row, group in itertools.groupby(stages, key=cells.__getitem__):
        lines.append(f"| {model} | {', '.join(map(str, group))} | {' | '.join(row)} |")
    return lines


def number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def table(setup: Setup, models: list[str]) -> str:
    heads = [f"{name} {what}" for name in OPTIMIZERS for what in MEASURES]
    lines = [f"### {setup.title}", "", f"| model | stage | {' | '.join(heads)} |", "| --- " * (len(heads) + 2) + "|"]
    for model in models:
        print(f"{setup.title}: {model}", file=sys.stderr, flush=True)
        lines += rows(model, {name: measure(model, name, setup) for name in OPTIMIZERS})
    return "\n".join(lines)


def describe() -> str:
    text = (
        f"Measured on {datetime.date.today()}: {processor()}, {os.cpu_count()} cores; Python "
        f"{platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}; gloo, one "
        "thread per rank, fp32."
    )
    return textwrap.fill(text, 119)


def processor() -> str:
    """The processor's name; platform.processor() is empty on many Linux machines."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def put(page: str, measured: str) -> str:
    """The page with `measured` between its marks. Raises ValueError where it does not have both, in order."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN!r} and {END!r}, between which the tables go")
    return f"{head}{BEGIN}\n\n{measured}\n\n{END}{tail}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--models", nargs="+", choices=zoo.NAMES, default=list(zoo.NAMES))
    options = parser.parse_args(argv)
    put(options.page.read_text(encoding="utf-8"), "")  # an unfit page is found before the minutes pass
    tables = [table(setup, options.models) for setup in SETUPS]
    text = "\n\n".join([describe(), *tables])
    options.page.write_text(put(options.page.read_text(encoding="utf-8"), text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
