"""Takes the figures of one system in one round: time, bytes on the wire, bytes in memory, losses."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from benchmark_systems import Case, Session, make_batches, open_session
from torch import Tensor, nn
from torch._subclasses import FakeTensor


WARM_UP = 2  # steps: the first makes optimizer state and learns the order of units, the second follows it
PHASES = ("forward", "backward", "clip", "optimizer", "zero_grad")


class Clock:
    """Adds up wall and CPU seconds by phase. CPU time is that of all threads of the process, gloo's included."""

    def __init__(self, device: str) -> None:
        self._wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
        self.wall: Counter[str] = Counter()
        self.cpu: Counter[str] = Counter()
        self.start()

    def start(self) -> None:
        self._wait()
        self._last = time.perf_counter(), time.process_time()

    def mark(self, phase: str) -> None:
        """What passed since the last mark belongs to `phase`."""
        self._wait()
        now = time.perf_counter(), time.process_time()
        self.wall[phase] += now[0] - self._last[0]
        self.cpu[phase] += now[1] - self._last[1]
        self._last = now


def live_bytes() -> int:
    """The bytes of all tensor storages that this process holds."""
    gc.collect()
    storages = {}
    for candidate in gc.get_objects():
        # Compilers leave fake tensors, which have a size and no memory.
        if issubclass(type(candidate), Tensor) and not issubclass(type(candidate), FakeTensor):
            with torch._C.DisableTorchFunctionSubclass():
                inner = getattr(candidate, "_local_tensor", candidate)
                if inner.device.type != "meta":
                    storages[inner.untyped_storage()._cdata] = inner.untyped_storage().nbytes()
    return sum(storages.values())


def peak_bytes(device: str, action: Callable[[], None]) -> int:
    """The most bytes above the present ones that are allocated at one time while `action` runs."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        action()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return max((event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]"), default=0)


def loopback_bytes() -> int | None:
    """Bytes that have left through the loopback of this network namespace; None where the kernel does not tell."""
    rows = Path("/proc/net/dev")
    if not rows.exists():
        return None
    for row in rows.read_text().splitlines():
        name, _, values = row.partition(":")
        if name.strip() == "lo":
            return int(values.split()[8])
    return None


def train_step(session: Session, batches: list[dict[str, Tensor]], clock: Clock) -> Tensor:
    """One optimizer step; returns the mean loss of its micro-batches on this rank."""
    total = torch.zeros((), device=session.case.device)
    for index, batch in enumerate(batches):
        with session.window(last=index == len(batches) - 1):
            loss = session.forward(batch)
            clock.mark("forward")
            total += loss.detach()
            session.backward(loss)
            clock.mark("backward")
    session.clip()
    clock.mark("clip")
    session.step()
    clock.mark("optimizer")
    session.zero_grad()
    clock.mark("zero_grad")
    return total / len(batches)


def measure(base: nn.Module, case: Case, steps: int, with_memory: bool) -> dict:
    """Figures of one round on this rank. A collective: every rank measures the same case."""
    before = live_bytes() if with_memory else 0
    data = [make_batches(case, dist.get_rank(), step) for step in range(WARM_UP + steps)]
    with open_session(base, case) as session:
        figures = _time(session, data, steps)
        figures["elements"] = sum(param.numel() for param in base.parameters())
        if with_memory:
            figures.update(_memory(session, data, before))
            figures["optimizer_floor"] = _adamw_floor(session.own_elements(), case.device)
        dist.barrier()
    return figures


def _time(session: Session, data: list[list[dict[str, Tensor]]], steps: int) -> dict:
    device = session.case.device
    losses = [train_step(session, batches, Clock(device)) for batches in data[:WARM_UP]]
    dist.barrier()
    sent, counted = loopback_bytes(), session.counters()
    clock = Clock(device)
    losses += [train_step(session, batches, clock) for batches in data[WARM_UP:]]
    dist.barrier()
    return {
        "wall": {phase: clock.wall[phase] / steps for phase in PHASES},
        "cpu": {phase: clock.cpu[phase] / steps for phase in PHASES},
        "losses": [float(loss) for loss in losses],
        "wire_loopback": _per_rank(sent, loopback_bytes(), steps),
        **_counted(counted, session.counters(), steps),
    }


def _memory(session: Session, data: list[list[dict[str, Tensor]]], before: int) -> dict:
    inputs = sum(batch["input_ids"].nbytes for batches in data for batch in batches)
    device, resident = session.case.device, live_bytes() - before - inputs  # the data are not the system's
    return {
        "resident": resident,
        "transient": peak_bytes(device, lambda: train_step(session, data[-1], Clock(device))),
    }


def _per_rank(start: int | None, stop: int | None, steps: int) -> float | None:
    return None if start is None or stop is None else (stop - start) / steps / dist.get_world_size()


def _counted(start: tuple | None, stop: tuple | None, steps: int) -> dict:
    if start is None or stop is None:
        return {"wire_counted": None, "calls": None}
    calls = {kind: (count - start[1].get(kind, 0)) / steps for kind, count in stop[1].items()}
    return {"wire_counted": (stop[0] - start[0]) / steps, "calls": {kind: n for kind, n in calls.items() if n}}


def _adamw_floor(elements: int, device: str, repeats: int = 3) -> float | None:
    """Seconds of one fused AdamW call on one flat tensor of this many elements: the least a step can take."""
    if not elements:
        return None
    weight = torch.zeros(elements, device=device, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    times = []
    for _ in range(repeats):
        clock = Clock(device)
        optimizer.step()
        clock.mark("step")
        times.append(clock.cpu["step"] if device == "cpu" else clock.wall["step"])
    return min(times)


def over_ranks(figures: dict) -> dict | None:
    """The figures of all ranks as one record, on rank 0: the slowest wall time, mean CPU time, the largest memory."""
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, figures)
    if dist.get_rank():
        return None

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    record = dict(figures)
    slowest = max(everyone, key=lambda one: sum(one["wall"].values()))
    record["wall"] = {**slowest["wall"], "step": sum(slowest["wall"].values())}
    record["cpu"] = {phase: mean([one["cpu"][phase] for one in everyone]) for phase in PHASES}
    record["cpu"]["step"] = sum(record["cpu"].values())
    record["losses"] = [mean(list(losses)) for losses in zip(*(one["losses"] for one in everyone), strict=True)]
    for name in ("resident", "transient"):
        if name in figures:
            record[name] = max(one[name] for one in everyone)
    if figures["wire_counted"] is not None:
        record["wire_counted"] = mean([one["wire_counted"] for one in everyone])
    return record
