"""Write docs/scaling.md: the classic ZeRO tables, and what the engine allocates and sends, counted on meta.

python -m benchmarks.scaling_report docs/scaling.md
"""

import argparse
from pathlib import Path

import transformers

from benchmarks import schedules
from benchmarks.zero_formulas import (
    NO_MASTER,
    PAPER,
    engine_state_bytes,
    offloaded_bytes,
    sent_bytes,
    state_bytes,
)
from hf_zero.config import ZeroConfig
from hf_zero.core.placement import Place
from hf_zero.planning.model import BatchShape, build
from hf_zero.planning.places import Places
from hf_zero.planning.trace import Scenario, trace


HEAD = """# Scaling: the cost model and the counted bytes

<!-- Written by `python -m benchmarks.scaling_report docs/scaling.md`; tests/arithmetic/test_scaling.py checks it. -->

GB are 1e9 bytes of one rank. "Counted" is what the engine itself allocates and sends when it trains the model on
torch's meta device as one rank of so many (tensors with shapes and no values, every storage counted); the same
engine on real CPU ranks agrees with that count (tests/integration/test_plan_measured.py). No network was measured
here.

## The classic tables

Published tables differ because they count different things. Bytes per parameter, weights + gradients + optimizer:

* 2 + 2 + 12: 16-bit gradients; fp32 master, exp_avg and exp_avg_sq. The ZeRO paper's 16 bytes.
* 2 + 2 + 8: no fp32 master. Tables with it are too low for mixed-precision training.
* 2 + 4 + 12: this engine in bf16, as gradients are accumulated in fp32. What it holds is less than the formula gives
  for stages 1 and 3: at stage 1 the gradients are reduced unit by unit and never rest unreduced, and at stage 3 no
  16-bit copy rests.

| model | GPUs | stage | accounting | formula, GB | engine's formula, GB | engine, counted, GB |
| --- | --- | --- | --- | --- | --- | --- |
"""

WIRE = """
## Communication

With gradients as wide as weights, a step sends 2, 2, 2 and 3 times the model at stages 0 to 3 (times (N - 1) / N).
The engine sends gradients in fp32 unless `communication_data_type: bf16` is set, so in bytes per parameter it is 8, 6,
6 and 8; at stage 3 the embedding (its backward needs no weight) and the last unit (kept from forward to backward) are
gathered once only. One micro-batch per step.

## 1 to 64 ranks

A decoder of {numel:.0f}M parameters in bf16 with AdamW. "State" is weights, gradients, master and optimizer state
after the backward pass.

| ranks | stage | state, formula, MB | counted, MB | sent per step, formula, MB | counted, MB |
| --- | --- | --- | --- | --- | --- |
"""


OFFLOAD = """
## Offload, by the formulas only

[Offload](offload.md) has not been run on a GPU yet; `hf-zero plan --offload` counts what it needs for a model, by
running the engine without values. Per rank in bf16: 2 bytes per parameter of weights (divided by N at stage 3), 12 / N
of optimizer state, and gradients of 4 / N in host memory, where the optimizer runs. Buffers, the units in use and
activations come on top. The table shows the cases that offload is best known for. A node has 8 GPUs, or 1 in the first
row.

| parameters | GPUs | stage | optimizer in | weights in | GPU, GB | host of a node, GB | disk of a node, GB |
| --- | --- | --- | --- | --- | --- | --- | --- |
{rows}
So 13 billion parameters on one GPU of 32 GB, the well-known figure, leave 6 GB for activations, and 70 billion on
eight GPUs of 80 GB need more than a terabyte of host memory. A disk holds 12 to 14 bytes per parameter, 6 to 7 times
the 16-bit model: the often-read "2 to 3 times the model", like "2 TB for a trillion parameters", counts the weights
and leaves the optimizer state out.
"""

SCHEDULES = """
## What the schedule is worth

Predicted step times ([how](step_time.md)) of Llama-8B at stage 3 in bf16 on H100s, one row of 4,096 tokens and one
micro-batch, as it is and with one thing changed. Copies and casts on a stream of their own are counted as if they took
no time at all, so that is the most that such a stream can give.

"""
DEFAULTS = """
So the defaults stay: gathers begin ahead, which matters more the larger the ring is. One reduction under way is as
good as four, as a layer's backward takes longer than a layer's reduction. A stream for casts gives about 1 % at best,
weights that are kept 1 to 2 % for all the memory that stage 3 saves, and 16-bit reductions spend on casts more than
they save.
"""


def decoder(hidden: int, layers: int, heads: int, inner: int, vocabulary: int):
    return build(
        transformers.LlamaConfig(
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            vocab_size=vocabulary,
            architectures=["LlamaForCausalLM"],
        )
    )


def count(model, ranks: int, stage: int):
    config = ZeroConfig(zero_stage=stage, mixed_precision="bf16", stage3_prefetch_bucket_size=1)
    return trace(model, Scenario(config=config, world_size=ranks, batch=BatchShape(rows=1, length=8)))


def held(footprint) -> int:
    return footprint.resident_bytes + footprint.gradients


def classic() -> str:
    """Each published row beside what the engine does with a model of about that size."""
    seven = decoder(4096, 34, 32, 11008, 32000)
    large = decoder(12288, 96, 96, 32768, 50304)
    rows = [(7, 4, stage, PAPER, seven) for stage in range(4)]
    rows += [(175, 4, stage, NO_MASTER, large) for stage in range(4)] + [(175, 8, 3, NO_MASTER, large)]
    lines = []
    for billions, ranks, stage, accounting, model in rows:
        numel = sum(param.numel() for param in model.parameters())
        table = state_bytes(billions * 1e9, ranks, stage, accounting) / 1e9
        ours = engine_state_bytes(billions * 1e9, ranks, stage) / 1e9
        # The stand-in has not exactly so many parameters.
        counted = held(count(model, ranks, stage)) * billions * 1e9 / numel / 1e9
        parts = f"{accounting.weight} + {accounting.gradient} + {accounting.optimizer}"
        lines.append(f"| {billions}B | {ranks} | {stage} | {parts} | {table:,g} | {ours:,g} | {counted:,.1f} |")
    return "\n".join(lines) + "\n"


def scaling() -> str:
    model = decoder(768, 12, 12, 2048, 32000)
    numel = sum(param.numel() for param in model.parameters())
    lines = []
    for ranks in (1, 2, 4, 8, 16, 32, 64):
        for stage in (1, 2, 3):
            effective = stage if ranks > 1 else 0
            found = count(model, ranks, stage)
            once = 2 * model.lm_head.weight.numel()
            cells = [
                engine_state_bytes(numel, ranks, effective),
                held(found),
                sent_bytes(numel, ranks, effective, gathered_once=once),
                sum(size for kind, size in found.sent.items() if kind != "scalars"),
            ]
            lines.append(f"| {ranks} | {stage} | " + " | ".join(f"{cell / 1e6:,.1f}" for cell in cells) + " |")
    return WIRE.format(numel=numel / 1e6) + "\n".join(lines) + "\n"


def offloaded() -> str:
    host = Places(optimizer=Place.HOST)
    all_host = Places(optimizer=Place.HOST, parameters=Place.HOST)
    all_disk = Places(optimizer=Place.DISK, parameters=Place.DISK)
    cases = [(13, 1, 2, host), (70, 8, 3, host), (70, 8, 3, all_host), (1000, 16, 3, all_disk)]
    names = {Place.DEVICE: "GPU", Place.HOST: "host", Place.DISK: "disk"}
    lines = []
    for billions, ranks, stage, places in cases:
        held = offloaded_bytes(billions * 1e9, ranks, stage, places)
        cells = [held[Place.DEVICE], *(min(ranks, 8) * held[home] for home in (Place.HOST, Place.DISK))]
        lines.append(
            f"| {billions:,}B | {ranks} | {stage} | {names[places.optimizer]} | {names[places.parameters]} | "
            + " | ".join(f"{cell / 1e9:,g}" for cell in cells)
            + " |\n"
        )
    return OFFLOAD.format(rows="".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    page = parser.parse_args().page
    page.write_text(HEAD + classic() + scaling() + offloaded() + SCHEDULES + schedules.table() + DEFAULTS)
