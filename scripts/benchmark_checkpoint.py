"""Times saving and loading of a sharded model against gathering it, beside the disk's own rate; CPU ranks.

    torchrun --nproc_per_node 4 scripts/benchmark_checkpoint.py --size 125m --folder /path/on/the/disk

Every way of saving runs `--repeats` times, interleaved, and the median is printed with the peak of memory that rank 0
takes on top of the model. Ends with what was written being loaded by `from_pretrained` on one process.
"""

import argparse
import os
import shutil
import statistics
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero


SIZES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
    "125m": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 10, "num_attention_heads": 12},
    "500m": {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 18, "num_attention_heads": 20},
}
BUFFER = 16 * 2**20


class PeakMemory:
    """The most memory that this process has while the block runs, over what it had before; mapped files left out."""

    def __enter__(self):
        self._begin, self.peak, self._done = self._now(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()

    def _watch(self):
        while not self._done.wait(0.002):
            self.peak = max(self.peak, self._now() - self._begin)

    @staticmethod
    def _now():
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def raw_write(folder, nbytes):
    """One process writes zeros in large pieces and flushes: what the disk can do."""
    with open(folder / "raw", "wb", buffering=0) as file:
        block = bytes(BUFFER)
        for _ in range(-(-nbytes // BUFFER)):
            file.write(block)
        os.fsync(file.fileno())


def save_sliced(model, folder):
    model.save_pretrained(folder)


def save_gathered(model, folder):
    """What the peers do: collect the state dict on rank 0, which writes it."""
    from hf_zero.saving import consolidated_state_dict

    state_dict = consolidated_state_dict(model, keep=dist.get_rank() == 0)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state_dict)
        for path in Path(folder).glob("*.safetensors"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def measure(action, folder):
    dist.barrier()
    begin = time.perf_counter()
    with PeakMemory() as memory:
        action()
    dist.barrier()
    seconds = time.perf_counter() - begin
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    return seconds, memory.peak


def load_sliced(folder):
    with hf_zero.zero_init({"zero_stage": 3}):
        model = LlamaForCausalLM.from_pretrained(folder)
    hf_zero.shard(model, None, {"zero_stage": 3})


def load_whole(folder):
    hf_zero.shard(LlamaForCausalLM.from_pretrained(folder), None, {"zero_stage": 3})


def report(name, results, nbytes):
    seconds = statistics.median(seconds for seconds, _ in results)
    peak = statistics.median(peak for _, peak in results)
    if dist.get_rank() == 0:
        print(f"{name:34s} {seconds:8.2f} s {nbytes / seconds / 1e6:8.0f} MB/s   +{peak / 2**20:6.0f} MiB")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **SIZES[options.size]))
    nbytes = sum(param.numel() * param.itemsize for param in model.parameters())
    hf_zero.shard(model, None, {"zero_stage": 3})
    rank, target = dist.get_rank(), options.folder / "benchmark_checkpoint"
    if rank == 0:
        target.mkdir(parents=True, exist_ok=True)
        print(f"{nbytes / 2**20:.0f} MiB of fp32 weights, {dist.get_world_size()} ranks, {os.cpu_count()} cores")
    dist.barrier()
    savers = {
        "raw write, one process": lambda: raw_write(target, nbytes) if rank == 0 else None,
        "save, each rank its slices": lambda: save_sliced(model, target / "model"),
        "save, gathered on rank 0": lambda: save_gathered(model, target / "model"),
    }
    results = {name: [] for name in savers}
    for _ in range(options.repeats):
        for name, action in savers.items():
            results[name].append(measure(action, target / "model"))
    save_sliced(model, target / "model")
    loaders = {
        "load, each rank its slices": lambda: load_sliced(target / "model"),
        "load whole on each rank, then shard": lambda: load_whole(target / "model"),
    }
    results.update({name: [] for name in loaders})
    for _ in range(options.repeats):
        for name, action in loaders.items():
            results[name].append(measure(action, target / "nothing"))
    for name, found in results.items():
        report(name, found, nbytes)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
