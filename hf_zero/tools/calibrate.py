"""Measures what a machine with CPU ranks does in a second, for `hf-zero plan --time`: all ranks work at one time."""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path

import psutil
import torch
import yaml
from torch import multiprocessing, nn

from hf_zero.comm.communicator import Communicator
from hf_zero.comm.process_groups import join
from hf_zero.errors import ZeroRuntimeError
from hf_zero.tools.timed import operation_rates, seconds_of


_LARGE = 1024  # of products of matrices
_UNCACHED = 1 << 25  # elements of tensors that no cache holds
_ACTIVATION_BYTES = 16 << 20  # operations on fewer bytes are those on activations
_SMALL, _BIG = 1 << 14, 1 << 22  # elements of each rank's message
_ROUNDS = 3
_WHILE = 0.05  # seconds
_DTYPES = (("", torch.float32), (" bf16", torch.bfloat16))  # behind the names of rates


def calibrate(ranks: int) -> str:
    """A machine's description as YAML, measured by `ranks` processes that share its cores.

    Raises ZeroRuntimeError where a process fails, for more ranks than cores, and on machines with GPUs.
    """
    if torch.cuda.is_available():
        raise ZeroRuntimeError(
            "calibrating measures CPU ranks only: for GPUs copy the nearest of hf_zero/planning/machines/*.yaml and "
            "put your own numbers in"
        )
    if ranks > (cores := os.cpu_count() or 1):
        raise ZeroRuntimeError(
            f"{ranks} ranks would wait for each other on {cores} cores: calibrate with --num-processes {cores}; a "
            "plan for more ranks shares the cores out itself"
        )
    with tempfile.TemporaryDirectory() as folder:
        try:
            multiprocessing.spawn(_measure, (ranks, Path(folder)), ranks)
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            raise ZeroRuntimeError(f"rank {error.error_index}: {str(error).strip().splitlines()[-1]}") from error
        return _describe(ranks, [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)])


def _describe(ranks: int, measured: list[list[Figures]]) -> str:
    """The median over rounds of the slowest rank's figures, for which a step waits."""
    rounds = [_slowest(of_ranks) for of_ranks in zip(*measured, strict=True)]
    found = {
        key: {name: statistics.median(one[key][name] for one in rounds) for name in values}
        for key, values in rounds[0].items()
    }
    single = found.pop("")
    for share in ("small_share", "attention_share"):
        found[share] = {dtype: rate / found["flops"][dtype] for dtype, rate in found[share].items()}
    source = (
        f"measured {date.today().isoformat()} by hf-zero doctor --calibrate, torch {torch.__version__}, {ranks} ranks,"
        f" median of {len(rounds)} rounds"
    )
    values = {
        "name": f"{platform.node()}: {ranks} ranks on {os.cpu_count()} cores",
        "ranks_per_node": ranks,
        "host_computes": True,
        "memory": psutil.virtual_memory().total // ranks,
        **{key: {"value": value, "source": source} for key, value in (found | single).items()},
        "error": {
            "value": spread(rounds),
            "source": f"{source}: how far the rounds are apart, not how good the model",
        },
    }
    return yaml.safe_dump(values, sort_keys=False)


# What one rank finds in one round: rates and seconds, those of one kind together; "" is for all that stand alone.
Figures = dict[str, dict[str, float]]
_SECONDS = {"launch", "node_latency", "net_latency", "read_latency", "contention"}
_SMALL_PARTS = {"node_latency", "net_latency", "read_latency", "contention", "cache_bytes"}  # of a step


def _slowest(of_ranks: Iterable[Figures]) -> Figures:
    first, *_ = of_ranks = list(of_ranks)
    return {
        key: {name: (max if name in _SECONDS else min)(one[key][name] for one in of_ranks) for name in values}
        for key, values in first.items()
    }


def spread(rounds: list[Figures]) -> float:
    """By what share a step's seconds may differ from those with median figures, in the worst round for each part.

    A step is a sum of parts, products, memory, operations and so on; where each is right within a share, so is it.
    Operations count as one part: the seconds that all of them take together.
    """
    parts: list[list[float]] = []  # rates or seconds of one part, by round
    for key, values in rounds[0].items():
        if key == "rates":
            parts.append([sum(1 / rate for rate in one[key].values()) for one in rounds])
        else:
            parts += [[one[key][name] for one in rounds] for name in values if name not in _SMALL_PARTS]
    return max(
        max(max(part) / median, median / min(part)) - 1 for part in parts if (median := statistics.median(part))
    )


# -- one rank ---------------------------------------------------------------------------------------------------------


def _seconds(action: Callable[[], object]) -> float:
    """The median time of an action that is repeated for a while."""
    action()
    times: list[float] = []
    while len(times) < 5 or sum(times) < _WHILE:
        times.append(seconds_of(action))
    return statistics.median(times)


def _large_products(dtype: torch.dtype) -> float:
    """FLOP/s of the three products of a wide linear layer: forward, and the gradients of input and weight."""
    x, weight = torch.randn(2, _LARGE, _LARGE).to(dtype)
    return 3 * 2 * _LARGE**3 / _seconds(lambda: (x @ weight.t(), x @ weight, x.t() @ x))


def _memory() -> float:
    """Bytes/s of a sum in place that no cache holds, as the optimizer's are."""
    one, other = torch.zeros(_UNCACHED), torch.ones(_UNCACHED)
    return 3 * one.nbytes / _seconds(lambda: one.add_(other))


def _adamw_rate() -> float:
    """Bytes/s of a fused AdamW, for which the planner's own step stands."""
    weight = nn.Parameter(torch.zeros(_BIG))
    weight.grad = torch.ones(_BIG)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return (2 * 3 + 1) * weight.nbytes / _seconds(optimizer.step)


def _links() -> Iterator[tuple[str, float]]:
    """Latency and rate of a message, and of a read, while all ranks gather from each other."""
    for key, reads in (("node", False), ("read", True)):
        comm = Communicator.connect(peer_memory=reads)
        small, big = (_gathering(comm, numel) / (comm.world_size - 1) for numel in (_SMALL, _BIG))
        rate = 4 * (_BIG - _SMALL) / max(big - small, 1e-9)
        yield f"{key}_rate", rate
        yield f"{key}_latency", max(0.0, small - 4 * _SMALL / rate)


def _gathering(comm: Communicator, numel: int) -> float:
    """Seconds of a gather of `numel` elements of each rank; buffers come in turn, as units do: none is warm."""
    flats = itertools.cycle([torch.zeros(comm.world_size * numel) for _ in range(min(64, _UNCACHED // numel))])

    def gather() -> None:
        flat = next(flats)
        comm.all_gather(flat, shard=[flat[comm.rank * numel : (comm.rank + 1) * numel]]).wait()
        comm.fence()

    comm.barrier()
    return _together(gather)


def _together(action: Callable[[], None], times: int = 15) -> float:
    """The median time of a collective, which all ranks make equally often."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


def _contention() -> float:
    """By what share products slow down while messages are under way."""
    comm = Communicator.connect(peer_memory=False)
    large = torch.randn(256, 256)
    flat = torch.zeros(comm.world_size * _BIG)

    def products(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            large @ large
        return time.perf_counter() - start

    alone = min(products(50) for _ in range(5)) / 50
    comm.barrier()
    moving = _together(lambda: comm.all_gather(flat).wait(), 7)
    count = max(10, int(2 * moving / alone))
    slowed = []
    for _ in range(5):
        comm.barrier()
        work = comm.all_gather(flat)
        slowed.append((products(count) - count * alone) / moving)
        work.wait()
    return max(0.0, statistics.median(slowed))


def _measure(rank: int, ranks: int, folder: Path) -> None:
    """Write this rank's figures to the file of its number."""
    torch.manual_seed(rank)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    if ranks > 1:
        join("gloo", folder / "store", rank, ranks)
    rounds = [_round(ranks) for _ in range(_ROUNDS)]
    (folder / str(rank)).write_text(json.dumps(rounds))


def _round(ranks: int) -> Figures:
    single = {"node_rate": 1.0, "net_rate": 1.0}  # of one rank, which has nobody to send to
    if ranks > 1:
        single |= dict(_links())
        single["net_rate"], single["net_latency"] = single["node_rate"], single["node_latency"]
        single["contention"] = _contention()
    training = operation_rates()
    rates = training["rates"]
    for suffix, dtype in _DTYPES:
        flat = torch.ones(_UNCACHED, dtype=dtype)
        seconds = _seconds(lambda flat=flat: torch.linalg.vector_norm(flat))
        rates[f"linalg_vector_norm{suffix}"] = flat.nbytes / seconds
    rates["_foreach_add"] = _adamw_rate()
    single["memory_rate"], single["launch"] = _memory(), training[""]["launch"]
    single["cache_rate"], single["cache_bytes"] = rates["add"], _ACTIVATION_BYTES
    return {
        "": single,
        "flops": {suffix.strip() or "fp32": _large_products(dtype) for suffix, dtype in _DTYPES},
        "small_share": training["products"],
        "attention_share": training["attention"],
        "rates": rates,
    }
