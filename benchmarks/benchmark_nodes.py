"""Measures what leaves a node: four ranks as two nodes of two, each way of sharding over nodes, one table.

Ranks of one node read each other's memory, ranks of different nodes send messages, so the kernel's counter of the
loopback device counts what goes between nodes. Run: `python benchmarks/benchmark_nodes.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1]))  # a clone that is not installed will do

NODES = {"zero_hpz_partition_size": 2, "node_size": 2}
INT8 = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


@dataclasses.dataclass(frozen=True)
class Row:
    """One way of sharding; `formula(k)` are bytes between nodes per parameter and step, both nodes together."""

    name: str
    config: dict
    weights: float  # bytes per parameter and node, sent to the other one, for each use of the weights
    uses: int  # of weights in a micro-batch; 0: once per step
    gradients: float
    once: bool  # gradients leave the node once per step


# Two nodes: each sends half of what is shared out over both, so a factor of 1/2 stands before every term.
ROWS = [
    Row("stage 3 by messages", {"node_size": 2}, 4.0, 2, 8.0, False),
    Row("hybrid", NODES, 2.0, 0, 4.0, False),
    Row("hybrid, no_sync: node", {**NODES, "no_sync": "node"}, 2.0, 0, 4.0, True),
    Row("hybrid, int8", {**NODES, **INT8}, 1.0078, 0, 1.0078, False),
    Row("hybrid, int8, no_sync: node", {**NODES, **INT8, "no_sync": "node"}, 1.0078, 0, 1.0078, True),
    Row(
        "hybrid, int4 gradients, no_sync: node",
        {**NODES, **INT8, "no_sync": "node", "quantized_gradient_bits": 4},
        1.0078,
        0,
        0.5156,
        True,
    ),
]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512, help="width of the decoder (512: 33M parameters)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--accumulation", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--output", type=Path, help="also write the rows here, as JSON")
    return parser.parse_args(arguments)


def loopback_bytes() -> int:
    """Bytes that were sent through the loopback device so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    raise OSError("/proc/net/dev has no loopback device")


def run_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from hf_zero.comm.process_groups import join

    torch.set_num_threads(1)
    join("gloo", Path(folder) / "store", rank, 4)
    found = [measure(row, k, args, rank) for k in args.accumulation for row in ROWS]
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(row: Row, accumulation: int, args: argparse.Namespace, rank: int) -> dict:
    """One line of the table; the loopback counter belongs to all ranks, so everybody waits before it is read."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    import hf_zero

    torch.manual_seed(0)
    heads = args.hidden // 64
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=int(args.hidden * 2.75),
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=8192,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    settings = {"zero_stage": 3, "mixed_precision": "bf16", **row.config}
    engine = hf_zero.shard(model, optimizer, settings)
    generator = torch.Generator().manual_seed(rank)

    def step() -> None:
        for number in range(accumulation):
            ids = torch.randint(0, 8192, (1, args.length), generator=generator)
            with engine.no_sync() if number < accumulation - 1 else contextlib.nullcontext():
                engine.backward(model(input_ids=ids, labels=ids).loss / accumulation)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()  # the first one makes optimizer states and learns the order
    engine.comm.traffic.clear()
    dist.barrier()
    before, seconds = loopback_bytes(), []
    dist.barrier()
    for _ in range(args.steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    dist.barrier()
    kernel = loopback_bytes() - before
    counted = torch.tensor(float(engine.comm.traffic.bytes_between_nodes))
    dist.all_reduce(counted)
    numel = sum(buffer.layout.numel for buffer in engine.buffers)
    resident = sum(tensor.nbytes for buffer in engine.buffers for tensor in buffer.kept_weights)
    errors = {each.kind: each.error for each in engine.mesh.quantised}
    engine.undo()
    per_step = numel * args.steps
    return {
        "row": row.name,
        "k": accumulation,
        "formula": (row.weights * (row.uses * accumulation or 1) + row.gradients * (1 if row.once else accumulation)),
        "counted": counted.item() / per_step,
        "kernel": kernel / per_step,
        "kept weights": resident / numel,
        "seconds": statistics.median(seconds),
        "errors": errors,
    }


def table(rows: list[dict]) -> str:
    lines = [
        "| k | row | bytes between nodes per parameter and step: formula | counted | kernel | s/step | error |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        errors = ", ".join(f"{kind} {100 * error:.2f} %" for kind, error in row["errors"].items() if error is not None)
        lines.append(
            f"| {row['k']} | {row['row']} | {row['formula']:.2f} | {row['counted']:.2f} | {row['kernel']:.2f} | "
            f"{row['seconds']:.2f} | {errors} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    from benchmark import own_loopback

    private = own_loopback()  # first of all: a process with threads may not change its namespace
    import torch
    from torch import multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_rank, (args, folder), nprocs=4)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    if args.output is not None:
        args.output.write_text(json.dumps(rows, indent=1))
    counter = "of this run only" if private else "of all programs"
    print(f"torch {torch.__version__}, {platform.machine()}, 4 ranks as 2 x 2; kernel: loopback {counter}")
    print(table(rows))


if __name__ == "__main__":
    main()
