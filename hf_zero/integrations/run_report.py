"""Gathers what a run did, and writes it as one page when training ends (`zero_report`)."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments

from hf_zero.config import ZeroConfig
from hf_zero.config.explain import rows, was_set
from hf_zero.core.engine import ZeroEngine, engine_of
from hf_zero.core.placement import Extent, Placement
from hf_zero.errors import ZeroConfigError
from hf_zero.integrations.callbacks import TIMELINE


logger = logging.getLogger(__name__)

PAGE = "report.html"
_MOST_BARS = 400
_MOST_SKIPPED = 100
_DISTRIBUTIONS = ("hf_zero", "torch", "transformers", "accelerate")


class Bins:
    """Counts of many steps in few entries: neighbours are added up when there are more than `most`.

    Each entry has the number of the last step in it (`step`), how many there are (`steps`), and sums.
    """

    def __init__(self, most: int = _MOST_BARS) -> None:
        self.most, self.width = most, 1
        self.entries: list[Counter[str]] = []
        self.numbers: list[int] = []

    def add(self, step: int, counts: Mapping[str, float]) -> None:
        if not self.entries or self.entries[-1]["steps"] == self.width:
            self.entries.append(Counter())
            self.numbers.append(step)
        self.entries[-1].update(counts, steps=1)
        self.numbers[-1] = step
        if len(self.entries) > self.most:
            pairs = [self.entries[i : i + 2] for i in range(0, len(self.entries), 2)]
            self.numbers = [self.numbers[min(i + 1, len(self.numbers) - 1)] for i in range(0, len(self.numbers), 2)]
            self.entries = [sum(pair, Counter()) for pair in pairs]
            self.width *= 2

    def to_list(self) -> list[dict[str, float]]:
        return [{**entry, "step": step} for entry, step in zip(self.entries, self.numbers, strict=True)]


class ZeroRunReport(TrainerCallback):
    """Writes `report.html` into `output_dir` at the end of training, from rank 0.

    It stands behind `ZeroMemoryCallback`, whose files it reads. Raises ZeroConfigError where matplotlib is missing.

    Args:
        config: of the run, with its sources.
        memory: the folder that the memory callback writes to.
    """

    def __init__(self, config: ZeroConfig, memory: Path) -> None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ZeroConfigError("zero_report draws with matplotlib: pip install 'hf_zero[plot]', or leave it out")
        self.config, self.memory = config, memory
        self.bins = Bins()
        self.skipped: list[dict[str, Any]] = []

    def add(self, step: int, counts: Mapping[str, float], first_bad: str | None) -> None:
        """Note what one optimizer step took."""
        self.bins.add(step, counts)
        if counts["skipped"] and len(self.skipped) < _MOST_SKIPPED:
            self.skipped.append({"step": step, "first_bad": first_bad or "the gradient norm"})

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, model: nn.Module, **__: Any) -> None:
        engine = engine_of(model)
        if engine is None or not state.is_world_process_zero:
            return
        from hf_zero.tools.run_page import render  # imports matplotlib

        page = render(self.facts(model, engine, state, Path(args.output_dir)))
        target = Path(args.output_dir) / PAGE
        written = target.with_suffix(".tmp")
        written.write_text(page, encoding="utf-8")
        os.replace(written, target)
        logger.warning("hf_zero: the page of this run is %s", target)

    def facts(self, model: nn.Module, engine: ZeroEngine, state: TrainerState, folder: Path) -> dict[str, Any]:
        """Everything on the page, as plain values; bytes and seconds are of rank 0 unless they say otherwise."""
        lines = _lines(self.memory / "memory_rank0.jsonl")
        others = (line for rank in range(engine.comm.world_size) for line in _peaks(self.memory, rank))
        return {
            "model": type(model).__name__,
            "stage": engine.config.zero_stage,
            "ranks": engine.comm.world_size,
            "device": str(engine.device.type).upper(),
            "versions": {name: metadata.version(name) for name in _DISTRIBUTIONS},
            "placement": placement(engine),
            "arranged": _arranged(engine),
            "memory": [{"step": line["step"], "categories": line["categories"]} for line in _thinned(lines)],
            "peaks": [
                {"rank": line["rank"], "step": line["step"], "bytes": line["peak"], "moment": line.get("moment", "")}
                for line in others
            ],
            "plan": _json(self.memory / "memory_comparison.json"),
            "timeline": _json(self.memory / TIMELINE),
            "steps": self.bins.to_list(),
            "skipped": self.skipped,
            "losses": [(entry["step"], entry["loss"]) for entry in state.log_history if "loss" in entry],
            "configuration": [
                {name: value if name == "key" else str(value) for name, value in row.items()}
                for row in rows(self.config)
                if was_set(self.config, row["key"])
            ],
            "notes": list(self.config.notes),
            "certificate": _json(folder / "certificate.json"),
        }


def placement(engine: ZeroEngine) -> dict[str, list[tuple[float, float]]]:
    """For each kind of state the part that each rank keeps, as (begin, length) of the whole."""
    placements, topology = engine.placements, engine.mesh.topology
    kept = {
        "parameters": (placements.parameter, placements.parameter_extent),
        "gradients": (placements.gradient, Extent.SHARD),
        "optimizer": (placements.optimizer, Extent.SHARD),
    }
    found, ranks = {}, range(topology.size)
    for kind, (where, extent) in kept.items():
        if where is not Placement.SHARDED:
            found[kind] = [(0.0, 1.0)] * topology.size
        elif extent is Extent.NODE:
            found[kind] = [(topology.place_of(rank)[2] / topology.local, 1 / topology.local) for rank in ranks]
        else:
            found[kind] = [(topology.slice_of(rank) / topology.shards, 1 / topology.shards) for rank in ranks]
    return found


def _arranged(engine: ZeroEngine) -> str:
    topology, partial = engine.mesh.topology, engine.placements.gradient is Placement.PARTIAL
    said = f"{topology.shards} rank(s) share one copy of what is sharded"
    said += f"; {topology.replicas} replicas of it" if topology.replicas > 1 else ""
    said += f"; {topology.nodes} nodes of {topology.local} in each" if topology.nodes > 1 else ""
    return f"{said}. Gradients are whole on each rank until the step's last micro-batch." if partial else f"{said}."


def _lines(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that its rank may still be writing."""
    text = file.read_text() if file.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _peaks(folder: Path, rank: int) -> Iterable[dict[str, Any]]:
    """The lines of a rank with a measured peak: one on CPU ranks, and of those of a GPU the largest."""
    found = [line for line in _lines(folder / f"memory_rank{rank}.jsonl") if line.get("peak")]
    return [max(found, key=lambda line: line["peak"])] if found else []


def _thinned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return lines[:: max(1, -(-len(lines) // _MOST_BARS))]


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}
