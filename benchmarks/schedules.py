"""What changes of the schedule would do to a step of Llama-8B on 8 to 1,024 H100s: the table in docs/scaling.md.

Some are settings of the engine. The others are made to the log of what it enqueues, before that is run on the machine.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from transformers import LlamaConfig

from hf_zero.config import ZeroConfig
from hf_zero.planning.costs import read_machine
from hf_zero.planning.enqueued import Enqueued, Event, Mark, Move, Wait
from hf_zero.planning.model import BatchShape, build
from hf_zero.planning.optimizers import kept_by
from hf_zero.planning.timeline import replay
from hf_zero.planning.trace import Scenario, trace
from hf_zero.tools.operations import Operation


LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
GPUS = (8, 64, 1024)
LENGTH = 4096
_REDUCTIONS = ("reduce-scatter", "exchange")
_CASTS = ("copy_", "_to_copy", "_foreach_copy_")

Log = Sequence[Event]


def reductions_in_flight(log: Log, most: int) -> list[Event]:
    """The same log, where backward waits for a reduction as soon as there are `most` newer ones under way."""
    found: list[Event] = []
    under_way: deque[Move] = deque()
    for event in log:
        if isinstance(event, Wait) and event.move.kind in _REDUCTIONS:
            continue
        if event == Mark("optimizer"):
            found += map(Wait, under_way)
            under_way.clear()
        found.append(event)
        if isinstance(event, Move) and event.kind in _REDUCTIONS:
            under_way.append(event)
            if len(under_way) > most:
                found.append(Wait(under_way.popleft()))
    return found


def casts_aside(log: Log) -> list[Event]:
    """The same log without the copies and casts right before a collective: what their own stream gains at best."""
    found: list[Event] = []
    for event in log:
        if isinstance(event, Move):
            while found and isinstance(found[-1], Operation) and found[-1].name in _CASTS:
                found.pop()
        found.append(event)
    return found


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings of the engine, or what is done to its log."""

    settings: Mapping[str, object] = field(default_factory=dict)
    to_log: Callable[[Log], Log] = list


CHANGES = {
    "as it is": Change(),
    "nothing gathered ahead": Change(settings={"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0}),
    "weights kept from forward to backward": Change(
        settings={"stage3_max_live_parameters": 10**12, "stage3_max_reuse_distance": 10**12}
    ),
    "1 reduction under way": Change(to_log=functools.partial(reductions_in_flight, most=1)),
    "2 reductions under way": Change(to_log=functools.partial(reductions_in_flight, most=2)),
    "4 reductions under way": Change(to_log=functools.partial(reductions_in_flight, most=4)),
    "casts on a stream of their own, at best": Change(to_log=casts_aside),
    "reductions in 16 bit": Change(settings={"communication_data_type": "bf16"}),
}


def record(model: nn.Module, ranks: int, settings: Mapping[str, object]) -> list[Event]:
    """What one of `ranks` GPUs enqueues in steps at stage 3 in bf16."""
    log = Enqueued()
    scenario = Scenario(
        config=ZeroConfig(zero_stage=3, mixed_precision="bf16", **settings),
        world_size=ranks,
        batch=BatchShape(rows=1, length=LENGTH),
        kept=kept_by("adamw"),
    )
    trace(model, scenario, log=log)
    return log.events


def table() -> str:
    """Step times in Markdown."""
    machine = read_machine("h100")
    model = build(LlamaConfig(**LLAMA_8B, architectures=["LlamaForCausalLM"]))
    head = ("GPUs", "schedule", "step, s", "against the first", "waits for gathers, ms", "waits for reductions, ms")
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for ranks in GPUS:
        as_it_is, usual = record(model, ranks, {}), None
        for name, change in CHANGES.items():
            log = record(model, ranks, change.settings) if change.settings else as_it_is
            found = replay(list(change.to_log(log)), machine)
            usual = usual or found.seconds
            waits = [
                1e3 * sum(seconds for (kind, _), seconds in found.exposed.items() if kind in kinds)
                for kinds in (("all-gather",), _REDUCTIONS)
            ]
            cells = [str(ranks), name, f"{found.seconds:.4f}", f"{round(found.seconds / usual - 1, 3) + 0.0:+.1%}"]
            lines.append(f"| {' | '.join([*cells, *(f'{wait:.1f}' for wait in waits)])} |")
    return "\n".join(lines) + "\n"
