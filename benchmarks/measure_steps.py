"""Takes the times of steps on CPU ranks, one setting after another; each is on disk at once, so it can go on later.

Settings come in a random order, always the same one, so that those of the first minutes are a sample of all. A time
that other processes had a part in counts as not taken.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from benchmark_measure import measure, over_ranks
from benchmark_systems import Case, build_model
from torch import multiprocessing

from hf_zero.comm.process_groups import join


LENGTH = 128  # tokens of the one row of a micro-batch
MOST_OTHERS = 0.05  # of the cores' time that other processes may have while a setting is measured


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and how: `system` is one of benchmark_systems.SYSTEMS."""

    size: str
    ranks: int
    precision: str
    accumulation: int
    system: str

    def __str__(self) -> str:
        return f"{self.size}, {self.ranks} ranks, {self.precision}, {self.accumulation} micro-batch(es), {self.system}"


def all_settings(
    sizes: Sequence[str],
    ranks: Sequence[int],
    precision: Sequence[str],
    accumulation: Sequence[int],
    systems: Sequence[str],
) -> list[Setting]:
    """Every combination, in the order in which they are measured."""
    found = [
        Setting(size=size, ranks=of, precision=dtype, accumulation=micro, system=system)
        for size, of, dtype, micro, system in itertools.product(sizes, ranks, precision, accumulation, systems)
    ]
    random.Random(0).shuffle(found)
    return found


def read_records(file: Path) -> list[tuple[Setting, int, float]]:
    """The setting, the round and the seconds of a step of all that was measured undisturbed so far."""
    lines = file.read_text().splitlines() if file.exists() else []
    records = [record for record in map(json.loads, lines) if record.get("others", 0.0) <= MOST_OTHERS]
    return [(Setting(**record["setting"]), record["round"], record["wall"]["step"]) for record in records]


def take(settings: Sequence[Setting], file: Path, *, rounds: int, steps: int, minutes: float) -> None:
    """Measure what `file` lacks, round after round, until the time is over; the setting under way is finished."""
    stop = time.time() + 60 * minutes
    of_all = sorted({setting.ranks for setting in settings})
    for round_ in range(rounds):
        for number, ranks in enumerate(of_all):
            done = {(setting, of) for setting, of, _ in read_records(file)}
            missing = [one for one in settings if one.ranks == ranks and (one, round_) not in done]
            # Each number of ranks has its share of the time that is left.
            until = time.time() + max(0.0, stop - time.time()) / (len(of_all) - number)
            if missing and until > time.time():
                with tempfile.TemporaryDirectory() as folder:
                    multiprocessing.spawn(_run_rank, (missing, round_, steps, until, file, Path(folder)), ranks)


def step_seconds(settings: Sequence[Setting], file: Path) -> dict[Setting, float]:
    """The median over rounds, of what was measured."""
    found: dict[Setting, list[float]] = {}
    for setting, _, seconds in read_records(file):
        found.setdefault(setting, []).append(seconds)
    return {setting: statistics.median(found[setting]) for setting in settings if setting in found}


def _run_rank(
    rank: int, settings: list[Setting], round_: int, steps: int, until: float, file: Path, folder: Path
) -> None:
    torch.set_num_threads(1)
    join("gloo", folder / "store", rank, settings[0].ranks)
    bases: dict[str, torch.nn.Module] = {}
    for setting in settings:
        if not _all_go_on(until):
            break
        if setting.size not in bases:
            bases[setting.size] = build_model(setting.size)
        case = Case(
            system=setting.system,
            size=setting.size,
            precision=setting.precision,
            accumulation=setting.accumulation,
            rows=1,
            length=LENGTH,
        )
        began = _spent()
        figures = measure(bases[setting.size], case, steps, with_memory=False)
        others = _others(began)
        record = over_ranks(figures)
        if record is not None:
            times = {"wall": record["wall"], "cpu": record["cpu"], "others": others}
            line = {"setting": asdict(setting), "round": round_, **times}
            with open(file, "a") as records:
                records.write(json.dumps(line) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _spent() -> tuple[float, float, float]:
    """Seconds so far: of the clock, of all processes on the cores, of this process on them."""
    cores = psutil.cpu_times()
    busy = cores.user + cores.system + getattr(cores, "softirq", 0.0)
    return time.perf_counter(), busy, time.process_time()


def _others(began: tuple[float, float, float]) -> float:
    """The share of the cores' time since then that no rank had. A collective."""
    passed, busy, own = (now - before for now, before in zip(_spent(), began, strict=True))
    ours = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(ours)
    return max(0.0, busy - float(ours)) / (passed * (os.cpu_count() or 1))


def _all_go_on(until: float) -> bool:
    """Whether there is time left, by the clock of rank 0."""
    said = torch.tensor(float(time.time() < until))
    dist.broadcast(said, 0)
    return bool(said)
