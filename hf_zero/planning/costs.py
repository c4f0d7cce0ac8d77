"""What a machine needs for one operation or one collective: formulas over measured or published rates."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path

import torch
import yaml

from hf_zero.errors import ZeroError
from hf_zero.planning.enqueued import Move
from hf_zero.tools.operations import Operation, rate_name, short_name


# Matrix products whose smallest dimension has so many elements reach the rate of large ones.
LARGE = 1024
# NCCL's two protocols for large messages: seconds before the first byte, per step of the ring inside a node and
# between nodes, and the share of the link's rate (NVIDIA/nccl, src/graph/tuning.cc: LL128 and Simple, algorithm ring).
_NCCL_RINGS = ((14.0e-6, 1.9e-6, 4.0e-6, 0.92), (8.4e-6, 3.4e-6, 14.0e-6, 1.0))
# Steps of a ring, and slices that pass each link of it, over those of an all-gather.
_PASSES = {"all-gather": 1, "reduce-scatter": 1, "exchange": 1, "all-reduce": 2}

COPIES = ("bus", "disk")  # moves that no other rank has part in


def _of(values: float | Mapping[str, float], dtype: torch.dtype) -> float:
    """The number for a dtype; what is not known of one is as in fp32."""
    if not isinstance(values, Mapping):
        return values
    return values.get(short_name(dtype), values["fp32"])


class MachineError(ZeroError, ValueError):
    """A description of a machine that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of one kind of machine: FLOP/s, bytes/s and seconds, of one rank while all ranks of a node work.

    Attributes:
        name: for people.
        ranks_per_node: GPUs of a node; on CPUs, ranks that the rates were measured with.
        host_computes: the process itself runs the operations (CPU ranks), instead of launching them.
        memory: bytes of one rank.
        flops: of matrix products, by dtype ("fp32", "bf16", "fp16").
        large_share, small_share: of `flops` that products reach, from `LARGE` on and below; by dtype, or one for all.
        attention_share: the same of fused attention.
        memory_rate: bytes read and written by operations that do not fit into a cache.
        cache_bytes, cache_rate: operations on fewer bytes run at this rate, or that of `rates`; 0: no cache counts.
        rates: bytes/s of operations, by ATen's names (with " bf16" behind for that dtype); never more than
            `memory_rate` on more than `cache_bytes`.
        launch: seconds of the host for each operation.
        node_rate, net_rate: bytes that a rank gets at one time from ranks of its node, and from other nodes.
        node_latency, net_latency: seconds of a message, where ranks exchange messages.
        read_rate, read_latency: the same for ranks that read each other's memory.
        contention: by what share operations slow down while a collective is under way.
        error: by what share predicted steps have missed measured ones at worst, or may do.
        bus_rate: bytes between device and host, each way.
        host_rate: bytes that a rank's share of the host's cores read and write in a step of the optimizer.
        disk_rate: bytes to and from the disk of a node, each way.
        sources: where each number is from.
    """

    name: str
    ranks_per_node: int
    memory: float
    flops: Mapping[str, float]
    memory_rate: float
    launch: float
    node_rate: float
    net_rate: float
    host_computes: bool = False
    large_share: float | Mapping[str, float] = 1.0
    small_share: float | Mapping[str, float] = 1.0
    attention_share: float | Mapping[str, float] = 1.0
    cache_bytes: float = 0.0
    cache_rate: float = 0.0
    rates: Mapping[str, float] = field(default_factory=dict)
    node_latency: float = 0.0
    net_latency: float = 0.0
    read_rate: float = 0.0
    read_latency: float = 0.0
    contention: float = 0.0
    error: float = 0.0
    bus_rate: float = 0.0
    host_rate: float = 0.0
    disk_rate: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)

    # -- operations ---------------------------------------------------------------------------------------------------

    def operation_seconds(self, operation: Operation) -> float:
        """The larger of what computing and what moving its bytes takes (S. Williams et al., Roofline, CACM 2009)."""
        if operation.on_host and not self.host_computes:
            return operation.nbytes / self.host_rate
        return max(self._computing(operation), self._moving(operation))

    def _computing(self, operation: Operation) -> float:
        if not operation.flops:
            return 0.0
        if operation.narrowest == 0:
            share = self.attention_share
        else:
            share = self.large_share if operation.narrowest >= LARGE else self.small_share
        return operation.flops / (self.peak(operation.dtype) * _of(share, operation.dtype))

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s of products of matrices of `dtype`."""
        return _of(self.flops, dtype)

    def _moving(self, operation: Operation) -> float:
        name = rate_name(operation)
        rate = self.rates.get(name) or self.rates.get(name.split()[0])
        if operation.nbytes < self.cache_bytes:
            return operation.nbytes / (rate or self.cache_rate)
        return operation.nbytes / min(self.memory_rate, rate or math.inf)

    def check_ranks(self, on_cpu: bool) -> None:
        """Raises MachineError where this describes GPUs and the ranks are on CPUs, or the other way round."""
        if on_cpu and not self.host_computes:
            raise MachineError(
                f"machine '{self.name}' has GPUs, and the ranks are on CPUs: measure this machine by `hf-zero doctor "
                "--calibrate here.yaml`, and name that file"
            )
        if self.host_computes and not on_cpu:
            raise MachineError(
                f"machine '{self.name}' has CPU ranks, and the ranks are on GPUs: name one with GPUs, or "
                "plan with --cpu"
            )

    def shared_by(self, ranks: int) -> Machine:
        """The same for one of `ranks` on each node, where more of them share the cores than it was measured with."""
        if not self.host_computes or ranks <= self.ranks_per_node:
            return self
        share = self.ranks_per_node / ranks
        slower = {"flops": self.flops, "rates": self.rates}
        rates = {key: {name: rate * share for name, rate in values.items()} for key, values in slower.items()}
        alone = ("memory_rate", "cache_rate", "node_rate", "net_rate", "read_rate")
        return replace(
            self,
            ranks_per_node=ranks,
            launch=self.launch / share,
            **rates,
            **{name: getattr(self, name) * share for name in alone},
        )

    # -- collectives --------------------------------------------------------------------------------------------------

    def move_seconds(self, move: Move) -> float:
        """Seconds of a collective when all ranks are there and nothing else uses the links."""
        if move.by in COPIES:
            return move.nbytes / (self.bus_rate if move.by == "bus" else self.disk_rate / self.ranks_per_node)
        ways = {"nccl": self._ring, "messages": self._messages, "reads": self._reads}
        return ways[move.by](move) if len(move.members) > 1 else 0.0

    def nodes_of(self, move: Move) -> int:
        """How many nodes the ranks of a collective are on."""
        return len({member // self.ranks_per_node for member in move.members})

    def _ring(self, move: Move) -> float:
        """NCCL's model of its rings, with the faster of two protocols.

        Every rank of a node has a network card of its own, and a ring for each of them.
        """
        size, nodes = len(move.members), self.nodes_of(move)
        passes = _PASSES[move.kind]
        rate = self.node_rate if nodes == 1 else min(self.node_rate or math.inf, self.net_rate * size / nodes)
        between = nodes - 1 if nodes > 1 else 0
        return min(
            base
            + passes * ((size - 1 - between) * inside_hop + between * (net_hop + self.net_latency))
            + passes * (size - 1) * move.nbytes / (rate * share)
            for base, inside_hop, net_hop, share in _NCCL_RINGS
        )

    def _messages(self, move: Move) -> float:
        """Point-to-point messages, one to every other rank; those between nodes go beside those inside."""
        passes = _PASSES[move.kind]
        near = sum(1 for member in move.members[1:] if member // self.ranks_per_node == 0)
        far = len(move.members) - 1 - near
        return passes * max(
            near * (self.node_latency + move.nbytes / self.node_rate),
            far * (self.net_latency + move.nbytes / self.net_rate) if far else 0.0,
        )

    def _reads(self, move: Move) -> float:
        """One read of every other rank's memory after another."""
        return _PASSES[move.kind] * (len(move.members) - 1) * (self.read_latency + move.nbytes / self.read_rate)


# -- descriptions -----------------------------------------------------------------------------------------------------


def machine_names() -> list[str]:
    """The machines that come with hf_zero."""
    folder = resources.files("hf_zero.planning") / "machines"
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def read_machine(name: str) -> Machine:
    """One of `machine_names`, or a YAML file. Raises MachineError for what is neither, and for files with mistakes."""
    path = Path(name)
    if not name.endswith((".yaml", ".yml")):
        if name not in machine_names():
            close = difflib.get_close_matches(name, machine_names(), n=1)
            hint = f"did you mean '{close[0]}'? " if close else ""
            raise MachineError(f"no machine is called '{name}': {hint}give a YAML file or one of {_listed()}")
        path = Path(str(resources.files("hf_zero.planning") / "machines" / f"{name}.yaml"))
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise MachineError(f"{path} is not a readable YAML file: {str(error).splitlines()[0]}") from error
    return _machine(str(path), values)


def _listed() -> str:
    return ", ".join(machine_names())


def _machine(path: str, values: object) -> Machine:
    """Each value is a number, a mapping of numbers, or {value: ..., source: ...}."""
    if not isinstance(values, dict):
        raise MachineError(f"{path} holds no mapping of a machine's numbers")
    known = {entry.name: entry for entry in fields(Machine)}
    if strange := sorted(set(values) - set(known) | {"sources"} & set(values)):
        raise MachineError(f"{path}: '{strange[0]}' is no number of a machine: take {', '.join(known)}")
    sources = {}
    for key, value in values.items():
        if isinstance(value, dict) and "value" in value:
            values[key], sources[key] = value["value"], str(value.get("source", ""))
        _check(path, key, values[key])
    required = [entry.name for entry in fields(Machine) if entry.default is entry.default_factory is MISSING]
    if missing := [name for name in required if name not in values]:
        raise MachineError(f"{path} lacks {', '.join(missing)}")
    for key in ("flops", "large_share", "small_share", "attention_share"):
        if isinstance(values.get(key), dict) and "fp32" not in values[key]:
            raise MachineError(f"{path}: {key} lacks fp32")
    return Machine(**values, sources=sources)


def _check(path: str, key: str, value: object) -> None:
    numbers = list(value.values()) if isinstance(value, dict) else [value]
    if key == "name" or (key == "host_computes" and isinstance(value, bool)):
        return
    if not all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers):
        raise MachineError(f"{path}: {key} is {value!r}, not a number (YAML reads 1e9 as text: write 1.0e+9)")
    if any(number < 0 or not math.isfinite(number) for number in numbers) or (key == "ranks_per_node" and value < 1):
        raise MachineError(f"{path}: {key} is {value!r}, out of range")
