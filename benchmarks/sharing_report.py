"""Measures how far ranks that share layers or sequences end from those that do not: the tables of docs/parallelism.md.

    python -m benchmarks.sharing_report layers|resume|sequences [--models NAME ...]

It trains by the functions of the tests, on CPU ranks, so each number is one that a test bounds; one that is out of
bounds ends the run. Run it from the root of the repository, where each table takes some minutes.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.parity_report import MEASURES, describe, number
from tests.integration import test_ulysses
from tests.ranks import test_tensor_parallel, test_tensor_parallel_files
from tests.support import sequences
from tests.support.harness import run_ranks
from tests.support.reference import ADAMW, SGD


MODELS = ("llama", "qwen3", "gemma", "phi3")
LAYOUTS = {"dp 2 x tp 2": (4, 2), "tp 2": (2, 2), "dp 4": (4, 1), "one process": (1, 1)}
STAGES = (0, 1, 2, 3)


def layers(models: list[str]) -> Iterator[str]:
    """Three steps of two micro-batches, clipped: from one process, at most, over all ranks and stages."""
    yield from _head("model", "ranks", *(f"{name} {what}" for name in ("SGD", "AdamW") for what in MEASURES))
    check = test_tensor_parallel.check
    for model in models:
        for layout, (ranks, width) in LAYOUTS.items():
            if ranks == 1:
                continue
            cells = []
            for optimizer in (SGD, ADAMW):
                options = {"optimizer": optimizer, "clip": 0.1, "accumulation": 2}
                found = run_ranks(check, model, width, STAGES, world_size=ranks, **options)
                cells += [max(stage[what] for rank in found for stage in rank.values()) for what in MEASURES]
            yield _row(model, layout, *map(number, cells))


def resume(models: list[str]) -> Iterator[str]:
    """Two steps, saved at stage 2, and two more at stage 3 in any layout: weights, from the run that goes on."""
    yield from _head("model", "saved by", *(f"goes on: {layout}" for layout in LAYOUTS))
    for model in models:
        for layout, before in LAYOUTS.items():
            with tempfile.TemporaryDirectory() as folder:
                after = list(LAYOUTS.values())
                found = test_tensor_parallel_files.resume(model, before, after, Path(folder, "state"))
            yield _row(model, layout, *(number(found[each]) for each in after))


def whole_and_shared(batches: str, keys: int) -> dict[int, dict[str, float]]:
    """The largest differences of Trainer's logs and weights at each stage: sequence groups 2 x dp 2, and dp 2."""
    worst = {}
    with tempfile.TemporaryDirectory() as folder:
        train, options = test_ulysses.train_grouped, {"batches": batches, "keys": keys}
        (logs, weights), *_ = run_ranks(train, Path(folder), None, world_size=2, **options)
        for stage in (0, 2, 3):
            found = run_ranks(train, Path(folder), stage, zero_sp_size=2, world_size=4, **options)
            for ours in found:
                test_ulysses._compare(ours, (logs, weights), f"stage {stage}, {batches}, {keys} head(s) of keys")
            worst[stage] = {
                "loss": max(_apart(ours, logs, name) for ours, _ in found for name in ("loss", "eval_loss")),
                "norm": max(_apart(ours, logs, "grad_norm", relative=True) for ours, _ in found),
                "weight": max((mine[name] - w).abs().max().item() for _, mine in found for name, w in weights.items()),
            }
    return worst


def _apart(ours: list[dict], logs: list[dict], name: str, relative: bool = False) -> float:
    pairs = [(mine[name], theirs[name]) for mine, theirs in zip(ours, logs, strict=True) if name in theirs]
    return max(abs(mine - theirs) / (theirs if relative else 1.0) for mine, theirs in pairs)


def shared_sequences(models: list[str]) -> Iterator[str]:
    """Four steps of Trainer with clipping and evaluation; at most, over all ranks and stages 0, 2 and 3."""
    yield from _head("batches", "heads of keys", *MEASURES)
    for batches in sequences.BATCHES:
        for keys in (4, 2, 1):
            found = whole_and_shared(batches, keys).values()
            yield _row(batches, f"{keys} of 4", *(number(max(stage[what] for stage in found)) for what in MEASURES))


def _head(*names: str) -> list[str]:
    return [_row(*names), "| --- " * len(names) + "|"]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


TABLES = {"layers": layers, "resume": resume, "sequences": shared_sequences}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args(argv)
    print(f"{describe()}\n", flush=True)
    for line in TABLES[options.table](options.models):
        print(line, flush=True)


if __name__ == "__main__":
    main()
