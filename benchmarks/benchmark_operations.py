"""Compares the predicted seconds of each kind of operation with the CPU seconds of the real ones, phase by phase.

    python benchmarks/benchmark_operations.py --machine outputs/timeline/machine.yaml --ranks 1 --stage 0

Real steps of hf_zero are trained on CPU ranks with one thread each; CPU time of that thread is what counts, so other
work on the machine matters little. What the thread does outside of operations (Python, autograd, the engine) is the
host's. Last comes what a step waits for, beside the waits in a profile of a real step: these are no CPU
time, and need a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from benchmark_measure import PHASES, train_step
from benchmark_systems import Case, Zero, build_model, make_batches
from rich.console import Console
from torch import multiprocessing

from hf_zero.comm.process_groups import join
from hf_zero.config import ZeroConfig
from hf_zero.planning.costs import Machine, read_machine
from hf_zero.planning.enqueued import Enqueued, Event, Mark
from hf_zero.planning.model import BatchShape
from hf_zero.planning.optimizers import kept_by
from hf_zero.planning.timeline import replay
from hf_zero.planning.trace import Scenario, trace
from hf_zero.tools.memory import without_notes
from hf_zero.tools.operations import Operation
from hf_zero.tools.timed import Timed


# The planner's own step and norm stand for what torch calls otherwise.
_ALIASES = {"_fused_adamw_": "_foreach_add_", "_foreach_norm": "linalg_vector_norm"}
_WARM_UP = 2
_WAIT = "hf_zero::"  # what a profile calls a wait for a collective begins so

Cost = tuple[int, float]  # how many, and seconds of all


class PhaseClock:
    """CPU seconds of this thread by phase; also where the operations of a phase begin in a list."""

    def __init__(self, found: list[tuple[Operation, float]] | None = None) -> None:
        self.seconds: Counter[str] = Counter()
        self.operations: dict[str, list[tuple[Operation, float]]] = {phase: [] for phase in PHASES}
        self._found = found
        self._last = time.thread_time()

    def mark(self, phase: str) -> None:
        now = time.thread_time()
        self.seconds[phase] += now - self._last
        if self._found is not None:
            self.operations[phase] += self._found
            self._found.clear()
        self._last = time.thread_time()


def kind_of(operation: Operation) -> str:
    """Operations whose cost has one formula: by name, dtype and size, products by their smallest dimension too."""
    name = _ALIASES.get(operation.name, operation.name)
    name = name if name.startswith("_") else name.removesuffix("_")
    size = "" if not operation.narrowest else " wide" if operation.narrowest >= 1024 else " narrow"
    nbytes = 4 ** max(0, (operation.nbytes.bit_length() - 1) // 2)
    return f"{name}{size}, {str(operation.dtype).removeprefix('torch.')}, from {nbytes / 1e6:.3g} MB"


def by_kind(operations: list[tuple[Operation, float]]) -> dict[str, Cost]:
    found: dict[str, Cost] = {}
    for operation, seconds in operations:
        count, total = found.get(kind_of(operation), (0, 0.0))
        found[kind_of(operation)] = count + 1, total + seconds
    return found


# -- real steps -------------------------------------------------------------------------------------------------------


def run_rank(rank: int, args: argparse.Namespace, folder: Path) -> None:
    torch.set_num_threads(1)
    join("gloo", folder / "store", rank, args.ranks)
    case = Case(
        system="", size=args.size, precision=args.precision, accumulation=args.accumulation, rows=1, length=args.length
    )
    session = Zero(copy.deepcopy(build_model(args.size)), case, stage=args.stage, sent=args.sent)
    data = [make_batches(case, rank, step) for step in range(_WARM_UP + args.steps + 1)]
    for batches in data[:_WARM_UP]:
        train_step(session, batches, PhaseClock())
    clocks = []
    for batches in data[_WARM_UP:-1]:
        clocks.append(PhaseClock())
        train_step(session, batches, clocks[-1])
    timed = Timed()
    noted = PhaseClock(timed.found)
    with timed:
        train_step(session, data[-1], noted)
    with without_notes(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train_step(session, data[-1], PhaseClock())
    waits = {event.key: 1e-6 * event.cpu_time_total for event in profiler.key_averages()}
    figures = {
        "waits": {key.removeprefix(_WAIT): waits[key] for key in waits if key.startswith(_WAIT)},
        "seconds": {phase: statistics.median(clock.seconds[phase] for clock in clocks) for phase in PHASES},
        "kinds": {phase: by_kind(operations) for phase, operations in noted.operations.items()},
        "formula": {
            phase: by_kind([(one, args.machine.operation_seconds(one)) for one, _ in operations])
            for phase, operations in noted.operations.items()
        },
    }
    (folder / f"{rank}.json").write_text(json.dumps(figures))
    torch.distributed.barrier()
    session.close()


def real(args: argparse.Namespace) -> dict:
    """What rank 0 found."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        multiprocessing.spawn(run_rank, (args, folder), args.ranks)
        return json.loads((folder / "0.json").read_text())


# -- predicted --------------------------------------------------------------------------------------------------------


def planned(args: argparse.Namespace) -> list[Event]:
    """What the planner's rank enqueues in its steps."""
    log = Enqueued()
    dtype = "bf16" if args.precision == "bf16" else "no"
    scenario = Scenario(
        config=ZeroConfig(zero_stage=args.stage, mixed_precision=dtype, peer_memory=not args.sent),
        world_size=args.ranks,
        batch=BatchShape(rows=1, length=args.length),
        accumulation=args.accumulation,
        kept=kept_by("adamw"),
        backend="gloo",
    )
    trace(build_model(args.size).to("meta"), scenario, log=log)
    return log.events


def by_part(events: list[Event], machine: Machine) -> dict[str, dict[str, Cost]]:
    """By phase and kind, of the last step; the norm is the optimizer's there."""
    marks = [number for number, event in enumerate(events) if event == Mark("step")]
    parts: dict[str, list[tuple[Operation, float]]] = {}
    part = "forward"
    for event in events[marks[-2] : marks[-1]]:
        if isinstance(event, Mark):
            part = event.name
        elif isinstance(event, Operation):
            parts.setdefault(part, []).append((event, machine.operation_seconds(event)))
    return {part: by_kind(operations) for part, operations in parts.items()}


# -- tables -----------------------------------------------------------------------------------------------------------


def merged(parts: dict[str, dict[str, Cost]], names: tuple[str, ...]) -> dict[str, Cost]:
    total: dict[str, Cost] = {}
    for name in names:
        for kind, (count, seconds) in parts.get(name, {}).items():
            before = total.get(kind, (0, 0.0))
            total[kind] = before[0] + count, before[1] + seconds
    return total


def tables(measured: dict, plan: dict[str, dict[str, Cost]], machine: Machine, most: int) -> str:
    """Milliseconds by phase, then by kind of operation, the largest differences first."""
    head = ("phase", "CPU", "predicted", "operations", "predicted", "the host", "predicted", "count", "predicted")
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    everything: tuple[str, ...] = ()
    for phase, names in (
        ("forward", ("forward",)),
        ("backward", ("backward",)),
        ("the step", ("clip", "optimizer", "zero_grad")),
        ("all", PHASES),
    ):
        everything = names
        cpu = 1e3 * sum(measured["seconds"][name] for name in names)
        found, planned = (summed(merged(parts, names)) for parts in (measured["kinds"], plan))
        launches = 1e3 * machine.launch * planned[0]
        cells = [cpu, planned[1] + launches, found[1], planned[1], cpu - found[1], launches]
        lines.append(f"| {phase} | {' | '.join(f'{cell:.1f}' for cell in cells)} | {found[0]} | {planned[0]} |")
    found, planned, formula = (merged(parts, everything) for parts in (measured["kinds"], plan, measured["formula"]))
    head = ("kind", "CPU", "predicted", "predicted for the real ones", "count", "predicted")
    lines += ["", f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    kinds = sorted(
        {*found, *planned}, key=lambda kind: -abs(found.get(kind, (0, 0.0))[1] - planned.get(kind, (0, 0.0))[1])
    )
    for kind in kinds[:most]:
        (count, spent), (planned_count, plan_spent) = found.get(kind, (0, 0.0)), planned.get(kind, (0, 0.0))
        cells = [1e3 * spent, 1e3 * plan_spent, 1e3 * formula.get(kind, (0, 0.0))[1]]
        lines.append(f"| {kind} | {' | '.join(f'{cell:.2f}' for cell in cells)} | {count} | {planned_count} |")
    return "\n".join(lines)


def waits(measured: dict[str, float], events: list[Event], machine: Machine, least: float = 0.02) -> str:
    """Milliseconds of waiting, of collectives that are at least so large a share of all waiting, by either."""
    found = replay(events, machine).exposed
    names = {"exchange": "reduce-scatter"}  # what messages are for whoever waits for them
    plan = {
        f"{names.get(kind, kind)} of {label}": seconds
        for (kind, label), seconds in found.items()
        if label != "scalars"  # nothing in a profile names these
    }
    sides = {"the profile": measured, "the prediction": plan}
    long = {
        side: {name for name, seconds in waited.items() if seconds >= least * sum(waited.values())}
        for side, waited in sides.items()
    }
    lines = ["| waits for | profile | predicted |", "| --- | --- | --- |"]
    for name in sorted(set().union(*long.values()), key=lambda name: -measured.get(name, 0.0)):
        lines.append(
            f"| {name} | " + " | ".join(f"{1e3 * waited.get(name, 0.0):.2f}" for waited in sides.values()) + " |"
        )
    lines += [f"Only in {side}: {', '.join(sorted(names - both)) or 'nothing'}." for side, names in long.items()
              for both in [set.intersection(*long.values())]]  # fmt: skip
    return "\n".join(lines)


def summed(kinds: dict[str, Cost]) -> Cost:
    """How many, and milliseconds."""
    return sum(count for count, _ in kinds.values()), 1e3 * sum(seconds for _, seconds in kinds.values())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", type=read_machine, required=True, help="what `hf-zero doctor --calibrate` wrote")
    parser.add_argument("--size", default="33m")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--sent", action="store_true", help="messages in place of reads of other ranks' memory")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--kinds", type=int, default=15, help="so many kinds of operations are shown")
    args = parser.parse_args(argv)
    measured, events = real(args), planned(args)
    machine = args.machine.shared_by(args.ranks)
    parts = [
        tables(measured, by_part(events, machine), machine, args.kinds),
        waits(measured["waits"], events, machine),
    ]
    Console(width=200).print("\n\n".join(parts), markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
