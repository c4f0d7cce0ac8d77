"""What a prepared model holds in memory, counted: bytes of every kind of state, by unit, next to the process's own."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from hf_zero.core.engine import ZeroEngine, engine_of
from hf_zero.core.flat_buffer import FlatBuffer
from hf_zero.core.master import MasterShard, SliceShard, WeightShard, map_tensors
from hf_zero.core.placement import Place
from hf_zero.core.unit import Unit


# The kinds of state, in the order in which they are shown.
CATEGORIES = (
    "parameters",
    "unsharded parameters",
    "gradients",
    "unreduced gradients",
    "master weights",
    "optimizer states",
)


# The variable that says where a Trainer writes its memory report, whatever its arguments say.
MEMORY_FOLDER = "HF_ZERO_MEMORY_FOLDER"
FORWARD = "hf_zero::forward"  # the range of a trace in which the whole model runs forward
_ERROR = 2  # of torch's levels for what its C++ side says


def tensors_by_category(engine: ZeroEngine) -> dict[str, list[Tensor]]:
    """The tensors that an engine holds in the device's memory. Those that share a storage share its bytes."""
    whole = "unsharded parameters" if any(unit.sharded for unit in engine.units) else "parameters"
    found: dict[str, list[Tensor]] = {category: [] for category in CATEGORIES}
    states = _states(engine)
    for unit in engine.units:
        for buffer in unit.buffers:
            found[whole if buffer.sharded else "parameters"].append(buffer.unsharded)
            found["parameters"] += [shard.kept for shard in buffer.resting.weights if not _is_apart(engine, shard)]
            found["parameters"] += [] if buffer.node_slice is None else [buffer.node_slice.values]
    for shard in (shard for buffer in engine.buffers for shard in buffer.master_shards):
        if not _is_apart(engine, shard):
            found["master weights"] += [] if shard.is_part else [shard.weight]
            found["optimizer states"] += _tensors(states.get(shard.weight, {}))
    return found | gradients_by_category(engine)


def gradients_by_category(engine: ZeroEngine) -> dict[str, list[Tensor]]:
    """Those of them that come and go in a backward pass."""
    unreduced = [tensor for unit in engine.units for g in unit.gradients for tensor in g.held]
    reduced = [tensor for unit in engine.units for g in unit.gradients for tensor in g.fetched]
    for buffer in engine.buffers:
        for shard in buffer.master_shards:
            if not _is_apart(engine, shard):
                reduced += [grad for grad in (shard.weight.grad, shard.owed_grad) if grad is not None]
        reduced += _of_slices(buffer)
    return {"gradients": reduced, "unreduced gradients": [*unreduced, *engine.mesh.errors]}


def _of_slices(buffer: FlatBuffer) -> list[Tensor]:
    """The gradients of elements whose masters have owners (see [Note: owned])."""
    slices = [shard for shard in buffer.resting.shards if isinstance(shard, SliceShard)]
    return [shard.weight.grad for shard in slices if shard.weight.grad is not None]


def _tensors(state: dict) -> list[Tensor]:
    """All that an optimizer keeps for one weight, in whatever nest."""
    found: list[Tensor] = []
    map_tensors(state, found.append)
    return found


def tensors_apart(engine: ZeroEngine) -> list[Tensor]:
    """Those that it holds in the host's memory, where the device has one of its own."""
    states, found = _states(engine), []
    for buffer in engine.buffers:
        found += [shard.kept for shard in buffer.resting.weights if _is_apart(engine, shard)]
        for shard in buffer.master_shards:
            if _is_apart(engine, shard):
                values = states.get(shard.weight, {}).values()
                held = [shard.weight, shard.weight.grad, shard.owed_grad, *values]
                found += [tensor for tensor in held if isinstance(tensor, Tensor)]
    return found


def _states(engine: ZeroEngine) -> dict[Tensor, dict]:
    return {weight: state for optimizer in engine.optimizers for weight, state in optimizer.state.items()}


def _is_apart(engine: ZeroEngine, shard: MasterShard | WeightShard) -> bool:
    """Whether the tensors of a shard are in the host's memory, and the device has one of its own."""
    return shard.place is not Place.DEVICE and engine.homes.host.courier.crosses


def bytes_elsewhere(engine: ZeroEngine) -> dict[str, dict[str, int]]:
    """The bytes that rest away from the device, by place and category, and the host's buffers for what moves.

    On CPU ranks the host's memory is the device's: what rests there is in the report's categories, too.
    """
    states = _states(engine)
    found: dict[Place, Counter[str]] = {place: Counter() for place in Place}
    for buffer in engine.buffers:
        for shard in buffer.master_shards:
            found[shard.place]["master weights"] += shard.numel * shard.weight.itemsize
            if _is_apart(engine, shard):
                held = [grad for grad in (shard.weight.grad, shard.owed_grad) if grad is not None]
                found[Place.HOST]["gradients"] += count_bytes(held)
            for flat in shard.flats_in(states.get(shard.weight, {})).values():
                found[shard.place]["optimizer states"] += shard.numel * flat.itemsize
        for weights in buffer.resting.weights:
            found[weights.place]["parameters"] += weights.kept.nbytes
    found[Place.HOST]["buffers"] += engine.homes.buffer_bytes
    del found[Place.DEVICE]
    return {place.value: dict(+counts) for place, counts in found.items() if counts.total()}


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the storages of these tensors, each counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@dataclass(frozen=True, kw_only=True)
class UnitMemory:
    """The bytes of one unit on this rank."""

    name: str
    parameters: int  # whole, or this rank's slice of frozen ones
    unsharded: int  # whole, of a unit that is sharded at rest
    gradients: int
    optimizer: int  # master weights and optimizer states


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """What one rank holds. `allocated`, `reserved` and `peak` are the accelerator's, None on CPU ranks.

    `categories` count tensors in memory; `elsewhere` what rests on the host or on disk (see `bytes_elsewhere`).
    """

    categories: dict[str, int]
    units: list[UnitMemory] = field(default_factory=list)
    elsewhere: dict[str, dict[str, int]] = field(default_factory=dict)
    host_rss: int = 0
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None

    @property
    def state_bytes(self) -> int:
        """All model state: everything but activations."""
        return sum(self.categories.values())

    def to_dict(self) -> dict:
        return {"state_bytes": self.state_bytes, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{name:<22}{count / 1e6:>12.2f} MB" for name, count in self.categories.items() if count]
        lines.append(f"{'model state':<22}{self.state_bytes / 1e6:>12.2f} MB")
        for place, counts in self.elsewhere.items():
            for name, count in counts.items():
                lines.append(f"{f'{name}, {place}':<22}{count / 1e6:>12.2f} MB")
        for name, count in (("allocated", self.allocated), ("peak", self.peak), ("reserved", self.reserved)):
            if count is not None:
                lines.append(f"{name:<22}{count / 1e6:>12.2f} MB")
        return "\n".join([*lines, f"{'host (RSS)':<22}{self.host_rss / 1e6:>12.2f} MB"])


def memory_report(model: nn.Module) -> MemoryReport:
    """The bytes that this rank holds for `model`, by kind of state and by unit. No communication.

    Raises ValueError for a model that is not prepared.
    """
    engine = engine_of(model)
    if engine is None:
        raise ValueError(
            f"{type(model).__name__} is not prepared by hf_zero: pass the model after prepare() or shard()"
        )
    categories = {name: count_bytes(tensors) for name, tensors in tensors_by_category(engine).items()}
    device: dict[str, int] = {}
    if engine.device.type == "cuda":
        device = {
            "allocated": torch.cuda.memory_allocated(engine.device),
            "reserved": torch.cuda.memory_reserved(engine.device),
            "peak": torch.cuda.max_memory_allocated(engine.device),
        }
    return MemoryReport(
        categories=categories,
        units=[_unit_memory(unit, engine) for unit in engine.units],
        elsewhere=bytes_elsewhere(engine),
        host_rss=psutil.Process().memory_info().rss,
        **device,
    )


def _unit_memory(unit: Unit, engine: ZeroEngine) -> UnitMemory:
    states = _states(engine)
    count: Counter[str] = Counter()
    for buffer in unit.buffers:
        count["unsharded" if buffer.sharded else "parameters"] += buffer.unsharded.untyped_storage().nbytes()
        count["parameters"] += sum(tensor.nbytes for tensor in buffer.kept_weights)
        for shard in buffer.master_shards:
            numel, weight = shard.numel, shard.weight
            kept = [tensor for tensor in _tensors(states.get(weight, {})) if tensor.dim() or not weight.dim()]
            count["optimizer"] += (0 if shard.is_part else weight.nbytes) + sum(tensor.nbytes for tensor in kept)
            grad = shard.owed_grad if weight.grad is None else weight.grad
            if grad is not None:
                count["gradients"] += numel * grad.itemsize
        count["gradients"] += sum(grad.nbytes for grad in _of_slices(buffer))
    for gradient in unit.gradients:
        count["gradients"] += sum(tensor.nbytes for tensor in gradient.held)
    names = ("parameters", "unsharded", "gradients", "optimizer")
    return UnitMemory(name=unit.name, **{name: count[name] for name in names})


def _finish_gathers(engine: ZeroEngine | None) -> None:
    """Wait for the gathers of updated weights: messages under way when a profiler stops crash the process later."""
    for unit in engine.units if engine is not None else ():
        if not unit.sharded:
            unit.unshard()


class PeakBytes:
    """The most bytes that were allocated at one time inside `measure_peak`, and what a step was at then."""

    value: int | None = None
    moment: str = ""


@contextlib.contextmanager
def without_notes() -> Iterator[None]:
    """Keep torch from noting on stderr that a profile begins, ends, and has not seen older tensors made."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reads it once, at its first use
    level = _log_level()
    if level is None:
        yield
        return
    before, level.value = level.value, _ERROR
    try:
        yield
    finally:
        level.value = before


def _log_level() -> ctypes.c_int | None:
    """The level below which torch's C++ side says nothing; None where this build of torch has it elsewhere."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def measure_peak(model: nn.Module) -> Iterator[PeakBytes]:
    """Inside, find out the most bytes that tensors take at one time; on CPU ranks too, where it slows a step down.

    On CPU the allocator is asked, through torch's profiler; what was live before counts as the model's state.
    """
    engine = engine_of(model)
    result = PeakBytes()
    if engine is not None and engine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(engine.device)
        yield result
        result.value = torch.cuda.max_memory_allocated(engine.device)
        return
    _finish_gathers(engine)
    before = 0 if engine is None else sum(count_bytes(t) for t in tensors_by_category(engine).values())
    cpu = [torch.profiler.ProfilerActivity.CPU]
    # torch 2.10 warns without `acc_events` that it forgets earlier cycles; there is one only.
    with without_notes(), torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:
        yield result
        _finish_gathers(engine)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    found = [event for event in events if event.get("name") == "[memory]"]
    if found:
        peak = max(found, key=lambda event: event["args"]["Total Allocated"])
        result.value = before + peak["args"]["Total Allocated"]
        result.moment = _moment(events, peak["ts"])


def _moment(events: list[dict], at: float) -> str:
    """What a step was at, by the ranges that torch and `ZeroMemoryCallback` write into its trace."""

    def runs(name: str) -> bool:
        ranges = (event for event in events if event.get("ph") == "X" and event["name"].startswith(name))
        return any(event["ts"] <= at <= event["ts"] + event["dur"] for event in ranges)

    if not any(event.get("name") == FORWARD for event in events):
        return ""
    return "forward" if runs(FORWARD) else "the optimizer step" if runs("Optimizer.step") else "backward"
