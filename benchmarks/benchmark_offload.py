"""Trains one model with its state on the device, in host memory and on disk, and beside DeepSpeed's ZeRO-Infinity.

    python benchmarks/benchmark_offload.py --disk /mnt/nvme --size 170m --ranks 2 --precision fp32 bf16

Every row runs in processes of its own, so that peaks of memory are its own, and rows take turns, round after round.
Figures are medians over rounds of the medians over steps; the first two steps of a run, which make the optimizer's
states, are left out. The DeepSpeed rows take part where it can be imported (docs/offload.md says how to build it for
CPU ranks).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import torch


SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256},
    "67m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 8000},
    "170m": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "vocab_size": 8192},
}
DEVICES = {"none": {}, "host": {"offload_optimizer_device": "cpu"}}
ROWS = ("none", "host", "disk", "disk+weights", "deepspeed none", "deepspeed disk")
DEEPSPEED = "deepspeed"  # only ever found by name: nothing here needs it
EMBEDDING = "model.embed_tokens.weight"
MAX_NORM = 1.0
WARM_UP = 2  # the first step makes the optimizer's states, where it is owed in the forward pass of the second
PHASES = ("forward", "backward", "step")
_IO = ("read_bytes", "write_bytes")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="the folder for state on disk")
    parser.add_argument("--size", default="170m", choices=tuple(SIZES), help="parameters of the model")
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="threads of every rank")
    parser.add_argument("--precision", nargs="+", default=["fp32"], choices=("fp32", "bf16"))
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence; a rank has one")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="measured steps per round")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark_offload"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # the row of this process, which is one rank
    args = parser.parse_args(argv)
    if not os.access(args.disk, os.W_OK):
        parser.error(f"--disk {args.disk} is no folder that you may write to")
    return args


# -- one rank ---------------------------------------------------------------------------------------------------------


def make_model(size: str) -> torch.nn.Module:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(1, SIZES[size]["hidden_size"] // 64)
    return LlamaForCausalLM(LlamaConfig(**SIZES[size], num_attention_heads=heads, use_cache=False))


class Ours:
    """hf_zero, configured by a row."""

    def __init__(self, args: argparse.Namespace, model: torch.nn.Module, precision: str) -> None:
        import torch

        import hf_zero

        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        on_disk = {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": args.disk}
        places = {**DEVICES, "disk": on_disk}
        places["disk+weights"] = {**on_disk, "offload_param_device": "nvme", "offload_param_nvme_path": args.disk}
        config = {"zero_stage": args.stage, "mixed_precision": "bf16" if precision == "bf16" else "no"}
        self.engine = hf_zero.shard(model, self.optimizer, {**config, **places[args.worker]})
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.clip_grad_norm_(MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def waited(self) -> float:
        """Seconds for which this rank has stood still for the disk so far."""
        return sum(file.waited for file in self.engine.homes.files)

    def promised(self) -> dict[str, float]:
        """Bytes of this rank by docs/offload.md: what a step moves, what memory is rid of, what has come into it."""
        masters = [shard for buffer in self.engine.buffers for shard in buffer.master_shards]
        weights = [shard for buffer in self.engine.buffers for shard in buffer.resting.weights]
        looked_up = sum(len(b.resting.weights) for b in self.engine.buffers if list(b.names) == [EMBEDDING])
        on_disk = sum(one.numel for one in masters if one.place.value == "disk")
        sizes = [one.numel * one.dtype.itemsize for one in weights if one.place.value == "disk"]
        # Weights are written once, and read in backward, but for those that are still in buffers then, and for what
        # comes first: the backward of an embedding needs no weights.
        read = sum(sizes[looked_up : max(looked_up, len(sizes) - self.engine.config.offload_buffer_count)])
        copies = sum(one.numel * one.dtype.itemsize for one in weights if one.place.value != "disk")
        return {
            "moves": 24 * on_disk + sum(sizes) + read,
            "gone": 12 * on_disk,
            "come": copies + self.engine.homes.buffer_bytes,
        }


class DeepSpeed:
    """DeepSpeed on CPU ranks, with its own Adam and buffers that its pipeline of reads and writes needs."""

    def __init__(self, args: argparse.Namespace, model: torch.nn.Module, precision: str) -> None:
        deepspeed = importlib.import_module(DEEPSPEED)
        optimizer = importlib.import_module(f"{DEEPSPEED}.ops.adam").DeepSpeedCPUAdam(
            model.parameters(), lr=1e-4, adamw_mode=True
        )
        zero: dict[str, Any] = {
            "stage": 3,
            "contiguous_gradients": True,
            "sub_group_size": 16_000_000,
            "stage3_param_persistence_threshold": 0,
        }
        if args.worker.endswith("disk"):
            zero["offload_optimizer"] = {
                "device": "nvme",
                "nvme_path": args.disk,
                "pipeline_read": True,
                "pipeline_write": True,
                "buffer_count": 12,
                "pin_memory": False,
            }
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": MAX_NORM,
            "bf16": {"enabled": precision == "bf16"},
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "aio": {"block_size": 1 << 20, "queue_depth": 16, "single_submit": False, "overlap_events": True},
        }
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, model_parameters=model.parameters()
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.engine(input_ids=ids, labels=ids).loss

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def waited(self) -> float:
        """It does not say."""
        return 0.0

    def promised(self) -> dict[str, float]:
        """32 bytes of each parameter are moved (docs/offload.md), and none of the rest is promised."""
        owned = sum(param.ds_numel for param in self.engine.module.parameters()) / self.engine.world_size
        return {"moves": 32 * owned, "gone": 12 * owned, "come": 0}


def work(args: argparse.Namespace) -> None:
    """Train as one rank, and print what it cost as a line of JSON."""
    import torch
    import torch.distributed as dist

    (precision,) = args.precision
    torch.set_num_threads(args.threads)
    rank, folder = int(os.environ["RANK"]), os.environ["BENCHMARK_FOLDER"]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks)
    model = make_model(args.size)
    numel = sum(param.numel() for param in model.parameters())
    system = (DeepSpeed if args.worker.startswith("deepspeed") else Ours)(args, model, precision)
    draw = torch.Generator().manual_seed(rank)
    steps: list[dict[str, float]] = []
    for number in range(WARM_UP + args.steps):
        if number == WARM_UP:
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far: building the model is not the step
        ids = torch.randint(0, SIZES[args.size]["vocab_size"], (1, args.length), generator=draw)
        dist.barrier()
        before, waited, clock = _io(), system.waited(), [time.perf_counter()]
        loss = system.forward(ids)
        clock.append(time.perf_counter())
        behind = sum(_io().values())
        system.backward(loss)
        behind = sum(_io().values()) - behind
        clock.append(time.perf_counter())
        system.step()
        clock.append(time.perf_counter())
        phases = zip(PHASES, clock, clock[1:], strict=False)
        moved = {name: _io()[name] - before[name] for name in _IO}
        spent = {name: end - begin for name, begin, end in phases} | {"waited": system.waited() - waited}
        steps.append({**spent, **moved, "behind": behind, "loss": loss.item()})
    found = {name: statistics.median(step[name] for step in steps[WARM_UP:]) for name in steps[0] if name != "loss"}
    found |= {"peak": _peak(), "numel": numel, "losses": [step["loss"] for step in steps], **system.promised()}
    everyone: list[Any] = [None] * args.ranks
    dist.all_gather_object(everyone, found)
    if rank == 0:
        slowest = {name: max(each[name] for each in everyone) for name in (*PHASES, "waited", "peak")}
        sums = {name: sum(each[name] for each in everyone) for name in (*_IO, "behind", "moves")}
        print(json.dumps({**found, **slowest, **sums}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _io() -> dict[str, int]:
    """Bytes that this process has had the disk read and write, past the page cache or not."""
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(count) for name, count in lines if name in _IO}


def _peak() -> int:
    """The most bytes that were resident since the peak was forgotten."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


# -- all rows ---------------------------------------------------------------------------------------------------------


def why_not(row: str) -> str | None:
    """What keeps a row from being measured."""
    if row.startswith("deepspeed"):
        tried = subprocess.run(
            [sys.executable, "-c", f"import {DEEPSPEED}.ops.adam"],
            capture_output=True,
            text=True,
        )
        if tried.returncode:
            return f"deepspeed cannot be imported ({(tried.stderr.strip() or 'no reason').splitlines()[-1]})"
    return None


def run_row(args: argparse.Namespace, row: str, precision: str) -> dict[str, Any]:
    """Have all ranks of one row train; raises RuntimeError with what one that failed has said."""
    options = {
        "--disk": args.disk,
        "--size": args.size,
        "--stage": args.stage,
        "--ranks": args.ranks,
        "--threads": args.threads,
        "--precision": precision,
        "--length": args.length,
        "--steps": args.steps,
        "--worker": row,
    }
    words = [str(word) for option in options.items() for word in option]
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "BENCHMARK_FOLDER": folder,
            "OMP_NUM_THREADS": str(args.threads),
            "DS_ACCELERATOR": "cpu",
            "WORLD_SIZE": str(args.ranks),
            "LOCAL_WORLD_SIZE": str(args.ranks),
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
            "TRANSFORMERS_OFFLINE": "1",
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *words],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(args.ranks)
        ]
        said = [rank.communicate() for rank in ranks]
    failures = [err.strip()[-2000:] for rank, (_, err) in zip(ranks, said, strict=True) if rank.returncode]
    if failures:  # what a rank says that only lost its peer comes last
        first = min(failures, key=lambda text: "Connection closed by peer" in text)
        raise RuntimeError(f"row {row!r}: {first}")
    return json.loads(said[0][0].strip().splitlines()[-1])


def combine(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table: medians over rounds. Raises ValueError where rounds trained differently."""
    if any(record["losses"] != records[0]["losses"] for record in records):
        raise ValueError("rounds of one row have different losses")
    names = (*PHASES, "waited", "peak", "moves", "gone", "come", "behind", *_IO)
    found = {name: statistics.median(record[name] for record in records) for name in names}
    moved = found["read_bytes"] + found["write_bytes"]
    losses, numel = records[0]["losses"], records[0]["numel"]
    return {**found, "total": sum(found[name] for name in PHASES), "moved": moved, "numel": numel, "losses": losses}


def table(rows: dict[str, dict[str, Any]], raw: float) -> list[str]:
    """Lines of text: seconds of each phase, peak of resident memory of a rank, bytes per parameter and their rate."""
    head = f"{'row':<16}{'s/step':>8}{'forward':>9}{'backward':>9}{'step':>7}{'waits':>7}{'peak MB':>9}{'B/param':>9}"
    head += f"{'MB/s':>8}"
    lines = [f"{head}{'of raw':>8}"]
    for name, row in rows.items():
        moved = row["moved"]
        # Debts are paid in forward here, and in the step phase by systems that step at once. What the disk does
        # beside backward takes none of that time.
        rate = (moved - row["behind"]) / (row["forward"] + row["step"])
        text = f"{name:<16}{row['total']:>8.2f}{row['forward']:>9.2f}{row['backward']:>9.2f}{row['step']:>7.2f}"
        text += f"{row['waited']:>7.2f}{row['peak'] / 1e6:>9.0f}{moved / row['numel']:>9.1f}"
        lines.append(text + (f"{rate / 1e6:>8.0f}{rate / raw:>8.0%}" if moved else ""))
    return lines


def verdicts(rows: dict[str, dict[str, Any]]) -> list[str]:
    """What the rows say beside each other: equality, bytes and memory against the formulas, times against others."""
    lines = []
    none, ours = rows.get("none"), {name: row for name, row in rows.items() if "deepspeed" not in name}
    if none is not None and len(ours) > 1:
        same = all(row["losses"] == none["losses"] for row in ours.values())
        lines.append(f"losses of {', '.join(ours)}: {'the same bits' if same else 'NOT THE SAME'}")
    for name, row in rows.items():
        base = rows.get("deepspeed none" if "deepspeed" in name else "none")
        if base is None or row is base:
            continue
        text = f"{name}: {row['total'] / base['total']:.3f} x the step without offload"
        if row["moves"]:
            # Debts are paid in forward here: what that takes longer belongs to the step.
            update = row["forward"] - base["forward"] + row["step"]
            gone = base["peak"] - row["peak"] + row["come"]
            text += (
                f"; bytes {row['moved'] / row['moves'] - 1:+.1%} of formula; {gone / row['gone']:.2f} of the 12 "
                f"bytes gone, buffers and copies aside; step and what forward takes longer {update:.2f} s"
            )
        lines.append(text)
    pairs = [(rows.get("disk"), rows.get("deepspeed disk"))]
    for mine, theirs in (pair for pair in pairs if all(pair)):
        updates = [
            row["forward"] - base["forward"] + row["step"]
            for row, base in ((mine, rows.get("none", mine)), (theirs, rows.get("deepspeed none", theirs)))
        ]
        # DeepSpeed leaves small tensors in memory: of a small model it moves nothing.
        moved = (
            f"{mine['moved'] / theirs['moved']:.2f} x the bytes" if theirs["moved"] else "no bytes of it to compare"
        )
        lines.append(
            f"disk beside deepspeed disk: {mine['total'] / theirs['total']:.2f} x the step, "
            f"{updates[0] / updates[1]:.2f} x the step phase with waits, {moved}, "
            f"{mine['peak'] / theirs['peak']:.2f} x the peak"
        )
    return lines


def main() -> None:
    args = parse_arguments()
    if args.worker is not None:
        work(args)
        return
    from hf_zero.tools.disk_speed import measure

    reasons = {row: reason for row in args.rows if (reason := why_not(row))}
    report = [
        f"{' '.join(sys.argv)}: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    ]
    report += [f"{row}: left out: {reason}" for row, reason in reasons.items()]
    records: dict[str, Any] = {}
    for precision in args.precision:
        found: dict[str, list[dict[str, Any]]] = {}
        raw = []
        for _ in range(args.rounds):
            raw.append(measure(args.disk).both)
            for row in args.rows:
                if row not in reasons:
                    found.setdefault(row, []).append(run_row(args, row, precision))
        combined = {row: combine(each) for row, each in found.items()}
        rate = statistics.median(raw)
        records[precision] = {"raw": raw, "rows": found}
        report += ["", f"{precision}, {args.size}, stage {args.stage}, {args.ranks} ranks; raw, both ways at once: "]
        report[-1] += f"{rate / 1e6:.0f} MB/s; load average {os.getloadavg()[0]:.1f}"
        report += [*table(combined, rate), *verdicts(combined)]
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "results.json").write_text(json.dumps(records, indent=1))
    (args.output / "table.txt").write_text("\n".join(report) + "\n")
    print("\n".join(report))


if __name__ == "__main__":
    main()
