"""Rows of the checkpoint benchmark: from pretrained files to a prepared model, beside DDP and FSDP2, and back.

Every way begins with `from_pretrained` of the same folder, whose files are in the page cache for all, and ends when
the model can be trained. Then hf_zero's stages save it again by `save_pretrained`, flushed to the disk.
"""

from __future__ import annotations

import gc
import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from benchmark_systems import OPTIMIZER, build_model
from torch import nn


PEERS = ("DDP", "FSDP2")
# (seconds, most bytes that one rank had on top) of an action, by all ranks together.
Timed = Callable[[Callable[[Path], object], Path, bool, bool], tuple[float, int]]


@dataclass
class Way:
    """One way to prepare a model; what it is to keep until the next way begins."""

    system: str
    start: Callable[[Path], nn.Module]
    stage: int | None = None
    kept: list[nn.Module] = field(default_factory=list)

    def run(self, folder: Path) -> None:
        self.kept.append(self.start(folder))

    def save(self, folder: Path) -> None:
        self.kept[0].save_pretrained(folder, is_main_process=dist.get_rank() == 0)

    def drop(self) -> None:
        for model in self.kept:
            engine = model.__dict__.get("_zero_engine")
            if engine is not None and engine.comm.watchdog is not None:
                engine.comm.watchdog.stop()
        self.kept.clear()
        gc.collect()


def ways() -> Iterator[Way]:
    """DDP, FSDP2, and each stage of hf_zero; stage 3 under `zero_init`, too."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from transformers import AutoModelForCausalLM

    import hf_zero

    def load(folder: Path) -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def fsdp2(folder: Path) -> nn.Module:
        model, mesh = load(folder), dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        torch.optim.AdamW(model.parameters(), **OPTIMIZER)
        return model

    def ours(stage: int, folder: Path, sliced: bool = False) -> nn.Module:
        config = {"zero_stage": stage}
        if sliced:
            with hf_zero.zero_init(config):
                model = load(folder)
        else:
            model = load(folder)
        hf_zero.shard(model, torch.optim.AdamW(model.parameters(), **OPTIMIZER), config)
        return model

    yield Way("DDP", lambda folder: DistributedDataParallel(load(folder)))
    yield Way("FSDP2", fsdp2)
    for stage in (1, 2, 3):
        yield Way(f"hf_zero, stage {stage}", lambda folder, stage=stage: ours(stage, folder), stage)
    yield Way("hf_zero, stage 3, zero_init", lambda folder: ours(3, folder, sliced=True), 3)


def run(size: str, folder: Path, rounds: int, timed: Timed, held: Callable[[], int]) -> list[str]:
    """The lines of both tables and of their goals; `held` gives the bytes that this process has."""
    source, target = folder / "pretrained", folder / "saved"
    if dist.get_rank() == 0:
        build_model(size).save_pretrained(source)
    dist.barrier()
    starts: dict[str, list[tuple[float, int]]] = defaultdict(list)
    saves: dict[str, list[tuple[float, int]]] = defaultdict(list)
    rests: dict[str, int] = {}
    asked = list(ways())
    for number in range(-1, rounds + 1):  # -1 is to warm up, the last to measure memory
        for way in asked:
            before, memory = held(), number == rounds
            start = timed(lambda _, way=way: way.run(source), source, False, memory)
            rest = torch.tensor(held() - before)
            dist.all_reduce(rest, dist.ReduceOp.MAX)
            rests[way.system] = int(rest)
            save = None if way.stage is None else timed(way.save, target, True, memory)
            way.drop()
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(target, ignore_errors=True)
            if number >= 0:
                starts[way.system].append(start)
                saves[way.system] += [] if save is None else [save]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(source)
    with torch.device("meta"):
        largest = max(4 * param.numel() for param in build_model(size).parameters())
    return lines(starts, {name: rows for name, rows in saves.items() if rows}, rests, largest)


def lines(starts: dict, saves: dict, rests: dict[str, int], largest: int) -> list[str]:
    """What is printed; of each list of (seconds, bytes) the last gives the memory and the others the time."""
    seconds = {name: statistics.median(one for one, _ in rows[:-1]) for name, rows in starts.items()}
    found = ["\nfrom_pretrained and prepare:\n", "| system | seconds | memory at the peak, MB | that rests, MB |"]
    found.append("| --- " * 4 + "|")
    found += [
        f"| {name} | {seconds[name]:.2f} | {rows[-1][1] / 1e6:.0f} | {rests[name] / 1e6:.0f} |"
        for name, rows in starts.items()
    ]
    found += ["\nsave_pretrained:\n", "| system | seconds | memory at the peak, MB |", "| --- " * 3 + "|"]
    for name, rows in saves.items():
        found.append(f"| {name} | {statistics.median(one for one, _ in rows[:-1]):.2f} | {rows[-1][1] / 1e6:.0f} |")
    found += ["\n| goal | measured | wanted | met |", "| --- | --- | --- | --- |"]
    for name, rows in starts.items():
        if name not in PEERS:
            pairs = zip(rows[:-1], *(starts[peer][:-1] for peer in PEERS), strict=True)
            ratio = statistics.median(own / min(one for one, _ in peers) for (own, _), *peers in pairs)
            found.append(_goal(f"{name}: times the fastest of DDP and FSDP2", ratio, 1.0))
            over = (rows[-1][1] - rests[name]) / largest
            found.append(_goal(f"{name}: peak over what rests, in largest parameters", over, 2.0))
    base = next(name for name in saves if name.endswith("stage 3"))
    for name, rows in saves.items():
        if name[-1] in "12":
            ratio = statistics.median(o / t for (o, _), (t, _) in zip(rows[:-1], saves[base][:-1], strict=True))
            found.append(_goal(f"save_pretrained, {name}: times stage 3", ratio, 1.0))
    return found


def _goal(name: str, value: float, most: float) -> str:
    return f"| {name} | {value:.2f} | at most {most:g} | {'yes' if value <= most else 'no'} |"
