"""Measures what a machine with CPU ranks does in a second, for `hf-zero plan --time`: all ranks work at one time."""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path

import psutil
import torch
import yaml
from torch import Tensor, multiprocessing, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zero.comm.communicator import Communicator
from hf_zero.comm.process_groups import join
from hf_zero.errors import ZeroRuntimeError


_LARGE, _TOKENS, _WIDTH = 512, 128, 768  # of products of matrices: large ones, and those of a short batch
_UNCACHED = 1 << 25  # elements of tensors that no cache holds
_ACTIVATIONS, _WEIGHTS = 128, 32  # pairs of tensors, and weights, that operations take in turn
_ACTIVATION_BYTES = 16 << 20  # operations on fewer bytes are those on activations
_SMALL, _BIG = 1 << 14, 1 << 22  # elements of each rank's message
_ATTENTION_PASSES = 3.5  # products of forward and backward over those of forward, as the planner counts them
_ROUNDS = 3
_LONG = 0.1  # seconds of an action that warming up makes no difference to
_LAYERS = 8  # of the small network that shows what an operation costs the host
_TINY = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}


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
    medians = [statistics.median(part) for part in parts]
    return max(
        max(max(part) / median, median / min(part)) - 1 for part, median in zip(parts, medians, strict=True) if median
    )


# -- one rank ---------------------------------------------------------------------------------------------------------


def _seconds(action: Callable[[], object], least: float = 0.05) -> float:
    """The median time of an action that is repeated for a while.

    One thread's CPU time does not grow with other work on the machine; that of several says nothing about how long
    they take.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    action()
    if (first := clock() - began) > _LONG:
        return first
    times, began = [], clock()
    while len(times) < 5 or clock() - began < least:
        start = clock()
        action()
        times.append(clock() - start)
    return statistics.median(times)


def _products() -> Figures:
    """FLOP/s of products, large ones and those of a short batch, and of its attention, by dtype."""
    found: Figures = {"flops": {}, "small_share": {}, "attention_share": {}}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        found["flops"][name] = _layer_products(_LARGE, _LARGE, dtype)
        found["small_share"][name] = _layer_products(_TOKENS, _WIDTH, dtype, _WEIGHTS)
        found["attention_share"][name] = _attention(dtype)
    return found


def _layer_products(tokens: int, width: int, dtype: torch.dtype, layers: int = 1) -> float:
    """FLOP/s of linear layers' three products: forward, and the gradients of input and weight. See [Note: warm]."""
    ring = [(torch.randn(tokens, width, dtype=dtype), torch.randn(width, width, dtype=dtype)) for _ in range(layers)]
    products = (lambda x, weight: x @ weight.t(), lambda x, weight: x @ weight, lambda x, weight: x.t() @ x)
    return layers * len(products) * 2 * tokens * width**2 / sum(_over(ring, product) for product in products)


def _attention(dtype: torch.dtype) -> float:
    """FLOP/s of causal attention, which makes half of two products, forward and backward."""
    ring = [torch.randn(1, 8, _TOKENS, 64, dtype=dtype, requires_grad=True) for _ in range(_WEIGHTS)]
    attend = nn.functional.scaled_dot_product_attention
    seconds = _seconds(lambda: torch.stack([attend(x, x, x, is_causal=True).sum() for x in ring]).sum().backward())
    return len(ring) * 2 * 8 * _TOKENS**2 * 64 * _ATTENTION_PASSES / seconds


def _memory() -> float:
    """Bytes/s of a sum in place that no cache holds, as the optimizer's are."""
    one, other = torch.zeros(_UNCACHED), torch.ones(_UNCACHED)
    return 3 * one.nbytes / _seconds(lambda: one.add_(other))


# What is done to two equal tensors of a row per token, and how many of such tensors are read and written by that.
_aten = torch.ops.aten
_CALLS: dict[str, tuple[Callable[[Tensor, Tensor], object], float]] = {
    "add": (torch.add, 3),
    "mul": (torch.mul, 3),
    "div": (lambda x, other: x.div(2.0), 2),
    "neg": (lambda x, other: x.neg(), 2),
    "pow": (lambda x, other: x.pow(2), 2),
    "rsqrt": (lambda x, other: x.rsqrt(), 2),
    "silu": (lambda x, other: _aten.silu(x), 2),
    "silu_backward": (_aten.silu_backward, 3),
    "gelu": (lambda x, other: _aten.gelu(x), 2),
    "gelu_backward": (_aten.gelu_backward, 3),
    "tanh": (lambda x, other: x.tanh(), 2),
    "mean": (lambda x, other: x.mean(-1, keepdim=True), 1),
    "sum": (lambda x, other: x.sum(-1, keepdim=True), 1),
    "cat": (lambda x, other: torch.cat((x, other), -1), 4),
    "slice_backward": (lambda x, other: _aten.slice_backward(x[:, ::2], x.shape, 1, 0, x.shape[1] // 2, 1), 1.5),
    "clone": (lambda x, other: x.view(_TOKENS, 8, -1).transpose(0, 1).contiguous(), 2),
    "_softmax": (lambda x, other: x.softmax(-1), 2),
    "_log_softmax": (lambda x, other: x.log_softmax(-1), 2),
    "_log_softmax_backward_data": (lambda x, other: _aten._log_softmax_backward_data(other, x, -1, x.dtype), 3),
}


def _operations() -> dict[str, float]:
    """Bytes/s of operations by ATen's name: what is read and written over the time.

    [Note: warm] A network's operations find little of what they read in the nearest caches, or its pages in those of
    the memory's addresses, and write to memory that something else had before. One tensor that is read again and again
    is several times faster, and products of one weight are by a third.
    """
    found = {}
    for suffix, dtype in (("", torch.float32), (" bf16", torch.bfloat16)):
        ring = [
            (torch.rand(_TOKENS, 512, dtype=dtype) + 0.5, torch.rand(_TOKENS, 512, dtype=dtype))
            for _ in range(_ACTIVATIONS)
        ]
        nbytes = _ACTIVATIONS * ring[0][0].nbytes
        for name, (call, tensors) in _CALLS.items():
            found[name + suffix] = tensors * nbytes / _over(ring, call)
        wide = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
        elements = nbytes // dtype.itemsize
        found["_to_copy" + suffix] = (2 + 4) * elements / _over(ring, lambda x, other, wide=wide: x.to(wide))
        labels = torch.zeros(_TOKENS, dtype=torch.long)
        one = torch.ones((), dtype=dtype)
        found["nll_loss_backward" + suffix] = (
            2 * nbytes / _over(ring, lambda x, other, labels=labels, one=one: _nll_backward(x, labels, one))
        )
        flat = torch.ones(_UNCACHED, dtype=dtype)
        found["linalg_vector_norm" + suffix] = flat.nbytes / _seconds(lambda flat=flat: torch.linalg.vector_norm(flat))
    found["_foreach_add"] = _adamw_rate()
    return found


def _over(ring: list[tuple[Tensor, Tensor]], call: Callable[[Tensor, Tensor], object]) -> float:
    """Seconds of a call for every pair. Each result stays for one round, so that no memory goes back to the system."""
    kept: deque[object] = deque(maxlen=len(ring))
    return _seconds(lambda: kept.extend(call(x, other) for x, other in ring), least=0.02)


def _nll_backward(x: Tensor, labels: Tensor, one: Tensor) -> Tensor:
    return _aten.nll_loss_backward(one, x, labels, None, 1, -100, one)


def _adamw_rate() -> float:
    """Bytes/s of a fused AdamW, for which the planner's own step stands."""
    weight = nn.Parameter(torch.zeros(_BIG))
    weight.grad = torch.ones(_BIG)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return (2 * 3 + 1) * weight.nbytes / _seconds(optimizer.step)


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += not func.is_view
        return func(*args, **(kwargs or {}))


def _launch() -> float:
    """Seconds that Python, autograd and the dispatcher take for an operation of a network, views with it."""
    network = LlamaForCausalLM(LlamaConfig(**_TINY, num_hidden_layers=_LAYERS, use_cache=False))
    tokens = torch.zeros(1, 2, dtype=torch.long)

    def train() -> None:
        network(input_ids=tokens, labels=tokens).loss.backward()

    train()
    with _Count() as count:
        train()
    return _seconds(train) / count.operations


def _links() -> Iterator[tuple[str, float]]:
    """Latency and rate of a message, and of a read, while all ranks gather from each other."""
    for key, reads in (("node", False), ("read", True)):
        comm = Communicator.connect(peer_memory=reads)
        small, big = (_gathering(comm, numel) / (comm.world_size - 1) for numel in (_SMALL, _BIG))
        rate = 4 * (_BIG - _SMALL) / max(big - small, 1e-9)
        yield f"{key}_rate", rate
        yield f"{key}_latency", max(0.0, small - 4 * _SMALL / rate)


def _gathering(comm: Communicator, numel: int) -> float:
    """Seconds of a gather of `numel` elements of each rank."""
    flat = torch.zeros(comm.world_size * numel)
    own = flat[comm.rank * numel : (comm.rank + 1) * numel]

    def gather() -> None:
        comm.all_gather(flat, shard=[own]).wait()
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
        single.update(_links())
        single["net_rate"], single["net_latency"] = single["node_rate"], single["node_latency"]
        single["contention"] = _contention()
    single["memory_rate"], single["launch"] = _memory(), _launch()
    rates = _operations()
    single["cache_rate"], single["cache_bytes"] = rates["add"], _ACTIVATION_BYTES
    figures = {"": single, **_products(), "rates": rates}
    if ranks > 1:
        Communicator.connect().barrier()
    return figures
