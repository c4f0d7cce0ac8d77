"""Measures what a machine with CPU ranks does in a second, for `hf-zero plan --time`: all ranks work at one time."""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import psutil
import torch
import yaml
from torch import multiprocessing, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zero.comm.communicator import Communicator
from hf_zero.comm.process_groups import join
from hf_zero.errors import ZeroRuntimeError


_LARGE, _TOKENS, _WIDTH = 1024, 128, 768  # of products of matrices: large ones, and those of a short batch
_CACHED, _UNCACHED = 1 << 16, 1 << 22  # elements
_SMALL, _BIG = 1 << 14, 1 << 22  # elements of each rank's message
_ATTENTION_PASSES = 3.5  # products of forward and backward over those of forward, as the planner counts them
_LAYERS = 8  # of the small network that shows what an operation costs the host
_TINY = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}


def calibrate(ranks: int) -> str:
    """A machine's description as YAML, measured by `ranks` processes that share its cores.

    Raises ZeroRuntimeError where a process fails, and on machines with GPUs.
    """
    if torch.cuda.is_available():
        raise ZeroRuntimeError(
            "calibrating measures CPU ranks only: for GPUs copy the nearest of hf_zero/planning/machines/*.yaml and "
            "put your own numbers in"
        )
    with tempfile.TemporaryDirectory() as folder:
        try:
            multiprocessing.spawn(_measure, (ranks, Path(folder)), ranks)
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            raise ZeroRuntimeError(f"rank {error.error_index}: {str(error).strip().splitlines()[-1]}") from error
        return _describe(ranks, [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)])


def _describe(ranks: int, measured: list[dict]) -> str:
    """The slowest rank's figures: a step waits for it."""
    source = (
        f"measured {date.today().isoformat()} by hf-zero doctor --calibrate, torch {torch.__version__}, {ranks} ranks"
    )
    slowest = {
        key: {name: min(one[key][name] for one in measured) for name in values}
        if isinstance(values, dict)
        else (max if key in _SECONDS else min)(one[key] for one in measured)
        for key, values in measured[0].items()
    }
    values = {
        "name": f"{platform.node()}: {ranks} ranks on {os.cpu_count()} cores",
        "ranks_per_node": ranks,
        "host_computes": True,
        "memory": psutil.virtual_memory().total // ranks,
        **{key: {"value": value, "source": source} for key, value in slowest.items()},
    }
    return yaml.safe_dump(values, sort_keys=False)


_SECONDS = {"launch", "node_latency", "net_latency", "read_latency", "contention"}


# -- one rank ---------------------------------------------------------------------------------------------------------


def _seconds(action: Callable[[], object], least: float = 0.05) -> float:
    """The median time of an action that is repeated for a while."""
    action()
    times, began = [], time.perf_counter()
    while len(times) < 5 or time.perf_counter() - began < least:
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _products() -> dict[str, dict[str, float]]:
    """FLOP/s of large products, and what share of that a short batch's products and attention reach, by dtype."""
    found: dict[str, dict[str, float]] = {"flops": {}, "small_share": {}, "attention_share": {}}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        large = torch.randn(_LARGE, _LARGE, dtype=dtype)
        found["flops"][name] = rate = 2 * _LARGE**3 / _seconds(lambda large=large: large @ large)
        found["small_share"][name] = _small_products(dtype) / rate
        found["attention_share"][name] = _attention(dtype) / rate
    return found


def _small_products(dtype: torch.dtype) -> float:
    """FLOP/s of a linear layer's three products: forward, and the gradients of input and weight."""
    x, weight = torch.randn(_TOKENS, _WIDTH, dtype=dtype), torch.randn(2 * _WIDTH, _WIDTH, dtype=dtype)
    gradient = torch.randn(_TOKENS, 2 * _WIDTH, dtype=dtype)
    products = (lambda: x @ weight.t(), lambda: gradient @ weight, lambda: gradient.t() @ x)
    return len(products) * 2 * _TOKENS * 2 * _WIDTH**2 / sum(map(_seconds, products))


def _attention(dtype: torch.dtype) -> float:
    """FLOP/s of causal attention, which makes half of two products, forward and backward."""
    heads = torch.randn(1, 8, _TOKENS, 64, dtype=dtype, requires_grad=True)

    def attend() -> None:
        nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()

    return 2 * 8 * _TOKENS**2 * 64 * _ATTENTION_PASSES / _seconds(attend)


def _memory() -> dict[str, object]:
    """Bytes/s of a sum into new memory, out of caches and inside one."""
    rates = {}
    for key, numel in (("memory_rate", _UNCACHED), ("cache_rate", _CACHED)):
        one, other = torch.zeros(numel), torch.ones(numel)
        rates[key] = 3 * 4 * numel / _seconds(lambda one=one, other=other: one + other)
    return {**rates, "cache_bytes": 12 * _CACHED}


def _operations() -> dict[str, float]:
    """Bytes/s of operations on values in a cache, by ATen's name: what is read and written over the time."""
    aten = torch.ops.aten
    found = {}
    for suffix, dtype in (("", torch.float32), (" bf16", torch.bfloat16)):
        x = torch.rand(_TOKENS, 512, dtype=dtype) + 0.5
        flat, other = x.reshape(-1), torch.rand_like(x)
        labels = torch.zeros(_TOKENS, dtype=torch.long)
        weight = torch.tensor(float(_TOKENS), dtype=dtype)
        wide = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
        calls: dict[str, tuple[Callable[[], object], int]] = {  # what is done, and how many tensors pass by
            "add": (lambda x=x, other=other: x.add(other), 3),
            "mul": (lambda x=x, other=other: x.mul(other), 3),
            "neg": (lambda x=x: x.neg(), 2),
            "pow": (lambda x=x: x.pow(2), 2),
            "rsqrt": (lambda x=x: x.rsqrt(), 2),
            "silu": (lambda x=x: aten.silu(x), 2),
            "silu_backward": (lambda x=x, other=other: aten.silu_backward(other, x), 3),
            "gelu": (lambda x=x: aten.gelu(x), 2),
            "gelu_backward": (lambda x=x, other=other: aten.gelu_backward(other, x), 3),
            "tanh": (lambda x=x: x.tanh(), 2),
            "mean": (lambda x=x: x.mean(-1, keepdim=True), 1),
            "sum": (lambda x=x: x.sum(-1, keepdim=True), 1),
            "cat": (lambda x=x, other=other: torch.cat((x, other), -1), 4),
            "_softmax": (lambda x=x: x.softmax(-1), 2),
            "_log_softmax": (lambda x=x: x.log_softmax(-1), 2),
            "_log_softmax_backward_data": (
                lambda x=x, other=other, dtype=dtype: aten._log_softmax_backward_data(other, x, -1, dtype),
                3,
            ),
            "nll_loss_backward": (
                lambda x=x, labels=labels, weight=weight: aten.nll_loss_backward(
                    weight / _TOKENS, x, labels, None, 1, -100, weight
                ),
                2,
            ),
            "linalg_vector_norm": (lambda flat=flat: torch.linalg.vector_norm(flat), 1),
        }
        for name, (call, tensors) in calls.items():
            found[name + suffix] = tensors * x.nbytes / _seconds(call, least=0.02)
        found["_to_copy" + suffix] = (2 + 4) * x.numel() / _seconds(lambda x=x, wide=wide: x.to(wide), least=0.02)
    found["_foreach_add"] = _adamw_rate()
    return found


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
    figures: dict[str, object] = {"node_rate": 1.0, "net_rate": 1.0}  # of one rank, which has nobody to send to
    if ranks > 1:
        join("gloo", folder / "store", rank, ranks)
        figures.update(_links())
        figures["net_rate"], figures["net_latency"] = figures["node_rate"], figures["node_latency"]
        figures["contention"] = _contention()
    figures.update(_products())
    figures.update(_memory())
    figures["rates"] = _operations()
    figures["launch"] = _launch()
    if ranks > 1:
        Communicator.connect().barrier()
    (folder / str(rank)).write_text(json.dumps(figures))
