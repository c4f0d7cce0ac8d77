"""Times the operations of networks that train on CPU ranks: the rates that a step is predicted with.

[Note: in place] A network's operations find little of what they read in the nearest caches, or its pages in those of
the memory's addresses, and write to memory that something else had before. Python and the dispatcher, too, come back
to code that others have swept out meanwhile. Repeated by itself, any of them is several times faster than it is there.
Looking at each operation costs time in turn, so that only the shares of a pass come from there, and the whole from
passes that nobody looks at.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig

from hf_zero.tools.operations import Operation, describe, rate_name, short_name


_TOKENS, _VOCABULARY = 128, 16384
_LLAMA = LlamaConfig(
    hidden_size=640, intermediate_size=1728, num_hidden_layers=6, num_attention_heads=10, vocab_size=_VOCABULARY
)
_GPT2 = GPT2Config(n_embd=512, n_layer=4, n_head=8, vocab_size=_VOCABULARY, bos_token_id=0, eos_token_id=0)
# Nothing but what calling costs.
_TINY = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=8, num_attention_heads=1, vocab_size=8)
_PASSES = 3
_NOTABLE = 1 << 20  # bytes that operations of one name have in a pass, or else calling them is all that counts


def clock() -> float:
    """Seconds. One thread's CPU time does not grow with other work on the machine; that of several says nothing."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


class Timed(TorchDispatchMode):
    """Takes the seconds of each operation, apart from what calling any operation takes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Operation, float]] = []
        self._calling = 0.0
        with self:
            one = torch.zeros(1)
            for _ in range(200):
                one + one
        self._calling = statistics.median(seconds for _, seconds in self.found)
        self.found.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        began = clock()
        result = func(*args, **kwargs)
        seconds = clock() - began - self._calling
        if (operation := describe(func, args, kwargs, result)) is not None:
            self.found.append((operation, seconds))
        return result


def operation_rates() -> dict[str, dict[str, float]]:
    """What operations reach in networks that train in fp32 and in bf16. See [Note: in place].

    "products" and "attention" have FLOP/s by dtype, "rates" bytes/s by ATen's names, and "" the seconds that the host
    needs at least for an operation, views and autograd with it.
    """
    operations, seconds = _train([_TINY], torch.float32)
    launch = seconds / len(operations)
    work, spent = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for dtype in (torch.float32, torch.bfloat16):
        operations, seconds = _train([_LLAMA, _GPT2], dtype)
        share = (seconds - launch * len(operations)) / sum(taken for _, taken in operations)
        for operation, taken in operations:
            work[_kind(operation)] += operation.flops or operation.nbytes
            spent[_kind(operation)] += taken * share
    found: dict[str, dict[str, float]] = {"products": {}, "attention": {}, "rates": {}, "": {"launch": launch}}
    for (table, name), amount in work.items():
        if amount >= _NOTABLE * _PASSES and spent[table, name] > 0:
            found[table][name] = amount / spent[table, name]
    return found


def _kind(operation: Operation) -> tuple[str, str]:
    table = "rates" if not operation.flops else "products" if operation.narrowest else "attention"
    return table, rate_name(operation) if table == "rates" else short_name(operation.dtype)


def _train(configs: list[PreTrainedConfig], dtype: torch.dtype) -> tuple[list[tuple[Operation, float]], float]:
    """The operations of `_PASSES` passes with the seconds of each, and the seconds of as many that nobody looks at."""
    networks = [AutoModelForCausalLM.from_config(config).to(dtype) for config in configs]
    tokens = torch.randint(min(config.vocab_size for config in configs), (1, _TOKENS))

    def train() -> None:
        for network in networks:
            network.zero_grad(set_to_none=True)
            network(input_ids=tokens, labels=tokens).loss.backward()

    train()
    seconds = _PASSES * statistics.median(seconds_of(train) for _ in range(_PASSES))
    with Timed() as timed:
        for _ in range(_PASSES):
            train()
    return timed.found, seconds


def seconds_of(action: Callable[[], object]) -> float:
    """By `clock`."""
    began = clock()
    action()
    return clock() - began
