"""Times saving and loading with hf_zero, FSDP2 and DeepSpeed (where it is installed) beside the disk's own rate.

    torchrun --nproc_per_node 4 benchmarks/benchmark_checkpoint.py --size 125m --folder /path/on/the/disk

CPU ranks, stage 3, fp32 (so that all save the same 4 bytes of weights and 8 of AdamW per parameter). Every round
takes all ways in turn: it saves, with the whole folder flushed to the disk inside the measured time, drops the folder
from the page cache, loads, and removes it. Ratios are medians over rounds of figures of one round. A last round, which
is not timed, measures memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import statistics
import threading
import time
from collections import defaultdict
from pathlib import Path

import benchmark_pretrained
import torch
import torch.distributed as dist
import transformers
from benchmark_checkpoint_systems import (
    STATE,
    SYSTEMS,
    WEIGHTS,
    Way,
    missing,
    prepare,
    raw_ways,
    remove_deepspeed_buffers,
)
from benchmark_report import describe_machine
from benchmark_systems import SIZES, Case, build_model, give_back_memory


OURS = "hf_zero"
# Columns of a table, by the figure that they show.
COLUMNS = {
    "save": {"written by a rank, MB": "written"},
    "load": {"read by a rank, MB": "read", "all from the disk, MB": "fetched"},
}
GOAL_RATE, GOAL_TIMES, GOAL_SHARE, GOAL_LOAD = 0.85, 3.0, 1.02, 0.8


@dataclasses.dataclass(kw_only=True)
class Figures:
    """One save or load: the slowest rank's seconds, bytes of the folder, and what the ranks did for it."""

    seconds: float
    nbytes: int
    written: int = 0  # most bytes that one rank put into files
    read: int = 0  # most bytes that one rank asked for, messages included
    fetched: int = 0  # bytes that all ranks together took from the disk
    memory: int = 0  # most memory that one rank had on top


class PeakMemory:
    """The most memory that this process has while the block runs, over what it had before; mapped files left out."""

    def __enter__(self) -> PeakMemory:
        self._begin, self.peak, self._done = self._now(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, self._now() - self._begin)

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def _traffic() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(count) for name, count in (line.split(": ") for line in lines)}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _on_files(folder: Path, action) -> None:
    """Call `action` with a descriptor of every file, shared out over the ranks."""
    for path in _files(folder)[dist.get_rank() :: dist.get_world_size()]:
        descriptor = os.open(path, os.O_RDONLY)
        action(descriptor)
        os.close(descriptor)


def _drop(descriptor: int) -> None:
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def measure(action, folder: Path, *, saves: bool, memory: bool) -> Figures:
    """Call `action` on all ranks. A save ends when everything in the folder is on the disk, whoever flushes it."""
    dist.barrier()
    before, begin = _traffic(), time.perf_counter()
    watch = PeakMemory() if memory else None
    if watch is not None:
        watch.__enter__()
    action(folder)
    if saves:
        dist.barrier()
        _on_files(folder, os.fsync)
    dist.barrier()
    seconds = time.perf_counter() - begin
    if watch is not None:
        watch.__exit__()
    after = _traffic()
    done = {name: after[name] - before[name] for name in after}
    counts = torch.tensor([done["write_bytes"], done["rchar"], watch.peak if watch else 0, done["read_bytes"]])
    total = counts.clone()
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    written, read, peak, _ = counts.tolist()
    nbytes = sum(path.stat().st_size for path in _files(folder))
    return Figures(seconds=seconds, nbytes=nbytes, written=written, read=read, fetched=int(total[3]), memory=peak)


def _timed(action, folder: Path, saves: bool, memory: bool) -> tuple[float, int]:
    """Seconds, and the most memory that one rank had on top, for `benchmark_pretrained`."""
    figures = measure(action, folder, saves=saves, memory=memory)
    return figures.seconds, figures.memory


def try_out(way: Way, folder: Path, *, memory: bool) -> dict[str, Figures]:
    """Save, drop from the page cache, load, remove."""
    give_back_memory()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        os.sync()  # nothing of what came before is left to write
    dist.barrier()
    found = {"save": measure(way.save, folder, saves=True, memory=memory)}
    if way.load is not None:
        _on_files(folder, _drop)
        found["load"] = measure(way.load, folder, saves=False, memory=memory)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    return found


def run(options: argparse.Namespace) -> dict[tuple[str, str], dict[str, list[Figures]]]:
    """Figures of every way, by (what, system), then by save and load; the last of each list has the memory."""
    case = Case(system="", size=options.size, precision="fp32", accumulation=1, rows=1, length=16)
    names = [name for name in options.systems if missing(name) is None]
    ways = prepare(names, case)
    with torch.device("meta"):
        numel = sum(param.numel() for param in build_model(options.size).parameters())
    for what, width in ((STATE, 12), (WEIGHTS, 4)):
        ways += raw_ways(what, width * numel)
    found: dict[tuple[str, str], dict[str, list[Figures]]] = defaultdict(lambda: defaultdict(list))
    for number in range(-1, options.rounds + 1):  # -1: to warm up
        for way in ways:
            memory = number == options.rounds
            for kind, figures in try_out(way, options.folder / "checkpoint", memory=memory).items():
                if number >= 0:
                    found[way.what, way.system][kind].append(figures)
    return found


# -- what is printed -------------------------------------------------------------------------------------------------


def tables(found: dict, ranks: int) -> list[str]:
    """A table of saves and one of loads for each thing that is saved, and the goals."""
    lines = []
    for what in (STATE, WEIGHTS):
        rows = {system: kinds for (thing, system), kinds in found.items() if thing == what}
        for kind in ("save", "load"):
            mine = {system: kinds[kind] for system, kinds in rows.items() if kind in kinds}
            head = ["system", "seconds", "MB", "MB/s", "ours / it", *COLUMNS[kind], "memory, MB"]
            lines += [f"\n{kind}, {what}:\n", f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
            lines += [_row(system, figures, mine[OURS], kind) for system, figures in mine.items()]
    lines += ["\n| goal | measured | wanted | met |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {name} | {value:.2f} | {wanted} | {'yes' if met else 'no'} |"
        for name, value, wanted, met in goals(found, ranks)
    ]
    return lines


def _row(system: str, figures: list[Figures], ours: list[Figures], kind: str) -> str:
    *timed, last = figures
    seconds = statistics.median(one.seconds for one in timed)
    amounts = [statistics.median(getattr(one, name) for one in timed) for name in COLUMNS[kind].values()]
    cells = [system, f"{seconds:.2f}", f"{last.nbytes / 1e6:.0f}", f"{last.nbytes / seconds / 1e6:.0f}"]
    cells += [f"{ratio(ours, figures):.2f}", *(f"{count / 1e6:.0f}" for count in (*amounts, last.memory))]
    return f"| {' | '.join(cells)} |"


def ratio(ours: list[Figures], theirs: list[Figures]) -> float:
    """Median over the timed rounds of our time over theirs."""
    pairs = zip(ours[:-1], theirs[:-1], strict=True)
    return statistics.median(mine.seconds / other.seconds for mine, other in pairs)


def goals(found: dict, ranks: int) -> list[tuple[str, float, str, bool]]:
    """(goal, measured, wanted, met)."""
    reached = []
    for what in (STATE, WEIGHTS):
        for kind in ("save", "load"):
            mine = {system: kinds[kind] for (thing, system), kinds in found.items() if thing == what and kind in kinds}
            ours = mine.pop(OURS)
            # The raw file has no header, so compare rates: our bytes per second over those of the faster raw way.
            rate = min(
                ratio(figures, ours) * ours[-1].nbytes / figures[-1].nbytes
                for system, figures in mine.items()
                if system.startswith("raw")
            )
            peers = [1 / ratio(ours, figures) for system, figures in mine.items() if not system.startswith("raw")]
            reached.append(
                (f"{kind}, {what}: share of the raw rate", rate, f"at least {GOAL_RATE}", rate >= GOAL_RATE)
            )
            if peers and kind == "save":
                times = min(peers)
                name = f"{kind}, {what}: times as fast as the fastest peer"
                reached.append((name, times, f"at least {GOAL_TIMES:.0f}", times >= GOAL_TIMES))
            if peers and kind == "load" and what == STATE:
                times = 1 / min(peers)
                name = f"{kind}, {what}: times the fastest peer's time"
                reached.append((name, times, f"at most {GOAL_LOAD}", times <= GOAL_LOAD))
            if kind == "load":
                # Not of the last round, which reads its own memory figures too.
                share = statistics.median(one.read * ranks / one.nbytes for one in ours[:-1])
                name = f"{kind}, {what}: bytes read by a rank, times N"
                reached.append((name, share, f"at most {GOAL_SHARE}", share <= GOAL_SHARE))
    return reached


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder on the disk to be measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if OURS not in options.systems:
        parser.error(f"--systems must name {OURS}: all ratios are to it")
    if (options.folder / "checkpoint").exists():
        parser.error(f"--folder: {options.folder}/checkpoint exists already")
    return options


def main() -> None:
    options = parse_arguments()
    os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]  # DeepSpeed asks for it
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    begin = describe_machine(private_loopback=False)
    found = run(options)
    more = benchmark_pretrained.run(options.size, options.folder, options.rounds, _timed, PeakMemory._now)
    if dist.get_rank() == 0:
        end = describe_machine(private_loopback=False)
        print(f"{options.size}, {dist.get_world_size()} ranks, {options.rounds} rounds, {begin['date']}")
        print(f"{begin['processor']}, {begin['cores']} cores, {begin['system']}, Python {begin['python']}")
        print(", ".join(f"{name} {version}" for name, version in begin["versions"].items()))
        print(f"load average before {begin['load_average']}, after {end['load_average']}")
        skipped = {name: missing(name) for name in options.systems if missing(name)}
        print(
            "\n".join(
                [*(f"{name}: {why}" for name, why in skipped.items()), *tables(found, dist.get_world_size()), *more]
            )
        )
        remove_deepspeed_buffers()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
