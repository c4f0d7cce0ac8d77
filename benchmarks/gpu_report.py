"""Runs everything that needs a GPU, in under nine minutes on one, and prints a report in Markdown.

    python benchmarks/gpu_report.py > docs/measurements/<gpu>.md

It holds the GPU tests (NCCL with one process, which issues its collectives; gloo ranks that share the GPU), and the
work of one rank of 8 and of 64, on a fake process group: collectives there only copy, so memory, launches and host
time are those of such a rank, while communication time is not measured. `--device cpu` runs the same code without a
GPU.
"""

import argparse
import datetime
import gc
import platform
import subprocess
import sys
import time

import torch
import torch.distributed as dist


FLOAT_FORMAT = "{:.2f}"
WARM_UP = 2  # steps that learn the order and make the optimizer state


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per rank and step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--skip-tests", action="store_true", help="only the measurements")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU is visible to torch: run this on a machine with one, or pass --device cpu", file=sys.stderr)
        return 2
    print(f"# Report of {datetime.date.today()}\n\n{describe(options.device)}\n")
    failed = 0 if options.skip_tests else run_tests()
    print("\n## One rank of many, on a fake process group\n")
    print("| ranks | stage | ms per step, median | peak GB of a step | bytes sent per parameter |")
    print("| --- | --- | --- | --- | --- |")
    for ranks in (8, 64):
        for stage in (1, 2, 3):
            print(row(ranks, stage, options), flush=True)
    return failed


def describe(device: str) -> str:
    name = torch.cuda.get_device_name(0) if device == "cuda" else platform.processor() or platform.machine()
    return f"{name}; torch {torch.__version__}; Python {platform.python_version()}"


def run_tests() -> int:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"], capture_output=True, text=True, timeout=420
    )
    print("## GPU tests\n\n```\n" + "\n".join(done.stdout.splitlines()[-15:]) + "\n```")
    return done.returncode


def row(ranks: int, stage: int, options: argparse.Namespace) -> str:
    """Train as rank 1 of `ranks`, and describe what it cost."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import LlamaConfig, LlamaForCausalLM

    import hf_zero

    device = torch.device(options.device)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=ranks)
    try:
        config = LlamaConfig(
            vocab_size=32000,
            hidden_size=options.hidden_size,
            intermediate_size=4 * options.hidden_size,
            num_hidden_layers=options.layers,
            num_attention_heads=max(1, options.hidden_size // 64),
        )
        model = LlamaForCausalLM(config).to(torch.bfloat16).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        engine = hf_zero.shard(
            model,
            optimizer,
            {"zero_stage": stage, "mixed_precision": "bf16", "check_grad_overflow": False},
            device=device,
        )
        numel = sum(p.numel() for p in model.parameters())
        ids = torch.randint(0, 32000, (1, options.tokens), device=device)
        for _ in range(WARM_UP):
            step(model, optimizer, engine, ids)
        if options.device == "cuda":  # the peak of training: building holds the whole model for a moment
            torch.cuda.reset_peak_memory_stats()
        times = [step(model, optimizer, engine, ids) for _ in range(options.steps)]
        engine.comm.traffic.clear()
        step(model, optimizer, engine, ids)
        sent = sum(engine.comm.traffic.bytes_sent.values()) / numel
        peak = torch.cuda.max_memory_allocated() / 1e9 if options.device == "cuda" else float("nan")
    finally:
        dist.destroy_process_group()
        model = optimizer = engine = None  # the next row begins on an empty device
        gc.collect()
        torch.cuda.empty_cache()
    cells = [
        str(ranks),
        str(stage),
        *(FLOAT_FORMAT.format(v) for v in (1e3 * sorted(times)[len(times) // 2], peak, sent)),
    ]
    return "| " + " | ".join(cells) + " |"


def step(model, optimizer, engine, ids) -> float:
    """Seconds of one optimizer step."""
    begin = time.perf_counter()
    engine.backward(model(input_ids=ids, labels=ids).loss)
    engine.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
