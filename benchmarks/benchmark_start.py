"""Compares the time from the start of a process to the end of its first step: the stock Trainer, and ZeroTrainer.

    python benchmarks/benchmark_start.py --ranks 1 2 --rounds 5

Both train the same tiny model by torchrun, so that nearly all of the time is imports, the Trainer and joining ranks.
Rounds are interleaved; the figure of a round is that of its slowest rank.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import psutil
import torch


STAGE = {"plain": None, "zero2": 2, "zero3": 3}


def first_step(kind: str, folder: Path) -> None:
    """Train one step, and write down how long after the start of this process it was over."""
    import transformers

    plain = {"max_steps": 1, "per_device_train_batch_size": 1, "report_to": "none", "save_strategy": "no"}
    plain |= {"use_cpu": True, "disable_tqdm": True}
    if STAGE[kind] is None:
        trainer_class, args = transformers.Trainer, transformers.TrainingArguments(str(folder), **plain)
    else:
        import hf_zero

        trainer_class = hf_zero.ZeroTrainer
        args = hf_zero.ZeroTrainingArguments(str(folder), zero_stage=STAGE[kind], **plain)
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(64).repeat(8, 1)]
    trainer_class(transformers.LlamaForCausalLM(config), args, train_dataset=rows).train()
    seconds = time.time() - psutil.Process().create_time()
    (folder / f"{args.process_index}.seconds").write_text(str(seconds))


def seconds_of(kind: str, ranks: int) -> float:
    """Of the slowest of so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        # Its status does not matter: torch's own threads can abort a process that ends.
        done = subprocess.run([*launch, __file__, "--worker", kind, folder], capture_output=True, text=True)
        found = [float(file.read_text()) for file in Path(folder).glob("*.seconds")]
        if len(found) < ranks:
            raise SystemExit(f"{kind} on {ranks} ranks failed:\n{done.stderr[-2000:]}")
        return max(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        first_step(args.worker[0], Path(args.worker[1]))
        return
    print(f"{date.today()}, {platform.processor() or platform.machine()}, torch {torch.__version__}: seconds, medians")
    print("| ranks | plain | zero2 | zero3 | zero2 over plain | zero3 over plain |\n" + "| --- " * 6 + "|")
    for ranks in args.ranks:
        seconds_of("plain", ranks)  # files come into the page cache
        rounds = [{kind: seconds_of(kind, ranks) for kind in STAGE} for _ in range(args.rounds)]
        medians = [statistics.median(found[kind] for found in rounds) for kind in STAGE]
        ratios = [statistics.median(found[kind] / found["plain"] for found in rounds) for kind in ("zero2", "zero3")]
        print(f"| {ranks} | " + " | ".join(f"{value:.2f}" for value in (*medians, *ratios)) + " |")


if __name__ == "__main__":
    main()
