"""Runs hf_zero, DDP, FSDP2, DeepSpeed (where it is installed) and a process alone on the same work, and compares them.

    python benchmarks/benchmark.py --size 33m --ranks 2 --accumulation 1 4 --precision fp32 bf16

Every rank process measures all systems in turn, round after round, so that a busy machine slows all of them alike; the
ratios are medians over rounds of figures taken in the same round. It writes results.json, table.txt and plot.png to
the output folder. docs/benchmarks.md says what each figure means and how far it can be trusted.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import fcntl
import itertools
import json
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from benchmark_systems import Case


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    # Only names are needed here; the modules that hold them import torch, which must not start threads yet.
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="33m", choices=("tiny", "deep", "33m", "125m"), help="the model")
    parser.add_argument("--ranks", type=int, default=2, help="processes (on GPUs: one each)")
    parser.add_argument("--fake_ranks", type=int, help="one process as rank 0 of this many; nothing is sent")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1], help="micro-batches per step")
    parser.add_argument("--precision", nargs="+", default=["fp32"], choices=("fp32", "bf16"))
    parser.add_argument("--systems", nargs="+", help="which of them (default: all)")
    parser.add_argument("--rows", type=int, default=1, help="sequences per micro-batch and rank")
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="timed steps per round and system")
    parser.add_argument("--threads", type=int, default=1, help="threads of every rank")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that a rank waits for the others")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark"), help="folder for the results")
    args = parser.parse_args(argv)
    for name in ("ranks", "rows", "rounds", "steps", "threads", *(["fake_ranks"] if args.fake_ranks else [])):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if min(args.accumulation) < 1:
        parser.error(f"--accumulation must be at least 1, got {min(args.accumulation)}")
    if args.length < 2:
        parser.error(f"--length must be at least 2 (the loss is on the next token), got {args.length}")
    if args.fake_ranks:
        args.ranks = 1
    return args


def own_loopback() -> bool:
    """Give this process and its children a loopback that nobody else sends through, where the system allows it."""
    if not sys.platform.startswith("linux"):
        return False
    new_user, new_network, get_flags, set_flags, up = 0x10000000, 0x40000000, 0x8913, 0x8914, 1
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    if unshare(new_network) and unshare(new_user | new_network):  # the second for users other than root
        return False
    with socket.socket() as probe:
        request = fcntl.ioctl(probe, get_flags, struct.pack("16sh", b"lo", 0))
        flags = struct.unpack("16sh", request)[1]
        fcntl.ioctl(probe, set_flags, struct.pack("16sh", b"lo", flags | up))
    return True


def choose_systems(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The systems that take part, and for those that do not, why. Raises SystemExit for unknown names."""
    from benchmark_systems import SYSTEMS, why_not

    asked = args.systems or list(SYSTEMS)
    unknown = sorted(set(asked) - set(SYSTEMS))
    if unknown:
        raise SystemExit(f"benchmark.py: no system is called {unknown[0]!r}; there are {', '.join(SYSTEMS)}")
    longest = max(args.accumulation)
    reasons = {system: reason for system in asked if (reason := why_not(system, longest))}
    chosen = [system for system in asked if system not in reasons]
    if not chosen:
        raise SystemExit(f"benchmark.py: nothing to measure: {reasons}")
    return chosen, reasons


def run_rank(rank: int, args: argparse.Namespace, systems: list[str], folder: str) -> None:
    """One rank process: measure everything; rank 0 writes one line of JSON for each figure set."""
    import torch
    import torch.distributed as dist
    from benchmark_measure import measure, over_ranks
    from benchmark_systems import build_model

    torch.set_num_threads(args.threads)
    _join(rank, args, folder)
    base = build_model(args.size)
    with open(f"{folder}/records.jsonl", "a") as records:
        for round_, case in rounds(args, systems):
            record = over_ranks(measure(base, case, args.steps, with_memory=round_ == 0))
            if record is not None:
                records.write(json.dumps({"case": vars(case), "round": round_, **record}) + "\n")
    dist.destroy_process_group()


def rounds(args: argparse.Namespace, systems: list[str]) -> Iterator[tuple[int, Case]]:
    """Every kind of work, round after round, with all systems in each round."""
    from benchmark_systems import Case, why_not

    for precision, accumulation, round_ in itertools.product(args.precision, args.accumulation, range(args.rounds)):
        for system in systems:
            if not why_not(system, accumulation):
                yield (
                    round_,
                    Case(
                        system=system,
                        size=args.size,
                        precision=precision,
                        accumulation=accumulation,
                        rows=args.rows,
                        length=args.length,
                        device=args.device,
                    ),
                )


def _join(rank: int, args: argparse.Namespace, folder: str) -> None:
    import torch
    import torch.distributed as dist

    if args.fake_ranks:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.fake_ranks)
        return
    # For those systems that read it; the ranks meet in a file.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(args.ranks), LOCAL_SIZE=str(args.ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", GLOO_SOCKET_IFNAME="lo")
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if args.device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=args.ranks,
        timeout=datetime.timedelta(seconds=args.timeout),
    )


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    private = own_loopback()  # first of all: a process with threads may not change its namespace
    import torch.multiprocessing
    from benchmark_report import describe_machine, draw, summarise, tables
    from rich.console import Console

    systems, skipped = choose_systems(args)
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        raise SystemExit(f"benchmark.py: --ranks {args.ranks} needs as many GPUs; {torch.cuda.device_count()} found")
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        torch.multiprocessing.spawn(run_rank, (args, systems, folder), nprocs=args.ranks)
        records = [json.loads(line) for line in Path(folder, "records.jsonl").read_text().splitlines()]
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    results = {
        "machine": describe_machine(private_loopback=private),
        "command": " ".join(["python", *sys.argv]) if argv is None else "main(" + " ".join(argv) + ")",
        "settings": settings,
        "skipped": skipped,
        "summary": summarise(records, args.fake_ranks or args.ranks),
        "records": records,
    }
    (args.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    with open(args.output / "table.txt", "w") as file:
        for table in tables(results):
            for console in (Console(file=file, width=200), Console(width=200)):
                console.print(table)
    draw(results, args.output / "plot.png")
    print(f"wrote results.json, table.txt and plot.png to {args.output}")


if __name__ == "__main__":
    main()
