"""Measures steps over a slow link between nodes, beside FSDP2: four ranks as two nodes of two, in one table.

Each node is a network namespace, and the kernel's token bucket (tc-tbf) holds the device that connects them to a rate:
what ranks of one node send each other goes over that node's own loopback, at full speed, for every system alike.
Needs Linux, root and the programs ip, tc and nsenter. Run: `sudo python benchmarks/benchmark_link.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1]))  # a clone that is not installed will do

RANKS_OF_A_NODE = 2
NODES = {"zero_hpz_partition_size": RANKS_OF_A_NODE, "no_sync": "node"}
INT8 = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
# Settings of hf_zero, or None for FSDP2 with its hybrid sharding: weights gathered inside a node, one all-reduce of
# what a rank owns at the last micro-batch.
ROWS: dict[str, dict | None] = {
    "hf_zero, stage 3": {},
    "hf_zero, nodes keep weights": NODES,
    "hf_zero, the same in 8 bits": {**NODES, **INT8},
    "hf_zero, 8 bits and 4 for gradients": {**NODES, **INT8, "quantized_gradient_bits": 4},
    "FSDP2, HSDP": None,
}
_NEW_NETWORK = 0x40000000


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="33m", help="of benchmark_systems.SIZES")
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16"))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--rate", type=int, default=100, help="MB/s from each node to the other")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--output", type=Path, help="also write the rows here, as JSON")
    return parser.parse_args(arguments)


@contextlib.contextmanager
def two_networks(rate: int) -> Iterator[list[str]]:
    """Leave this process's network for a new one, linked to a second one; gives the files that name both."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        raise SystemExit(f"no network of its own: {os.strerror(ctypes.get_errno())} (run as root)")
    other = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    try:
        mine, theirs = (f"/proc/{pid}/ns/net" for pid in (os.getpid(), other.pid))
        while os.path.exists(theirs) and os.stat(mine).st_ino == os.stat(theirs).st_ino:
            time.sleep(0.01)
        run = [f"nsenter --net={theirs}", ""]
        for command in (
            f"ip link add node0 type veth peer name node1 netns {other.pid}",
            *(f"{run[1 - node]} ip addr add 10.77.0.{node + 1}/24 dev node{node}" for node in (0, 1)),
            *(f"{run[1 - node]} ip link set {device} up" for node in (0, 1) for device in ("lo", f"node{node}")),
            *(f"{run[1 - node]} tc qdisc add dev node{node} root tbf rate {rate}mbps burst 256kb latency 1s"
              for node in (0, 1)),
        ):  # fmt: skip
            subprocess.run(command.split(), check=True)
        yield [mine, theirs]
    finally:
        other.kill()
        other.wait()


def run_rank(rank: int, args: argparse.Namespace, networks: list[str], folder: str) -> None:
    node = rank // RANKS_OF_A_NODE
    with open(networks[node]) as network:  # before anything opens a socket or starts a thread
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "cannot enter the network of the node")
    os.environ["GLOO_SOCKET_IFNAME"] = f"node{node}"
    import torch
    import torch.distributed as dist
    from benchmark_systems import Case, build_model

    from hf_zero.comm.process_groups import join

    torch.set_num_threads(1)
    join("gloo", Path(folder) / "store", rank, 2 * RANKS_OF_A_NODE)
    case = Case(
        system="", size=args.size, precision=args.precision, accumulation=args.accumulation, rows=1, length=args.length
    )
    base = build_model(args.size)
    found = [measure(name, base, case, args.steps, f"node{node}") for name in args.rows]
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def prepare(name: str, model, case):
    """A session of `benchmark_systems` for one row."""
    import torch
    import torch.distributed as dist
    from benchmark_systems import Fsdp2, Zero

    import hf_zero

    class Nodes(Zero):
        def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
            dtype = "bf16" if self.case.precision == "bf16" else "no"
            settings = {"zero_stage": 3, "mixed_precision": dtype, "node_size": RANKS_OF_A_NODE, **ROWS[name]}
            self.engine = hf_zero.shard(model, self.optimizer, settings)
            return model

    class Hybrid(Fsdp2):
        def mesh(self):
            nodes = dist.get_world_size() // RANKS_OF_A_NODE
            names = ("replicate", "shard")
            return dist.init_device_mesh("cpu", (nodes, RANKS_OF_A_NODE), mesh_dim_names=names)

        def window(self, last: bool):
            self.model.set_requires_all_reduce(last)
            return contextlib.nullcontext()

    return Hybrid(model, case, keep=False, local=False) if ROWS[name] is None else Nodes(model, case, stage=3)


def measure(name: str, base, case, steps: int, device: str) -> dict:
    """One line of the table; a step is as long as that of the slowest rank."""
    import torch
    import torch.distributed as dist
    from benchmark_measure import Clock, live_bytes, train_step
    from benchmark_systems import make_batches

    before = live_bytes()
    session = prepare(name, copy.deepcopy(base), case)
    data = [make_batches(case, dist.get_rank(), step) for step in range(1 + steps)]
    losses = [float(train_step(session, data[0], Clock("cpu")))]
    dist.barrier()
    sent, seconds = sent_through(device), []
    for batches in data[1:]:
        began = time.perf_counter()
        losses.append(float(train_step(session, batches, Clock("cpu"))))
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    figures = torch.tensor([sent_through(device) - sent, live_bytes() - before, *losses], dtype=torch.float64)
    dist.all_reduce(figures)
    figures /= dist.get_world_size()
    numel = sum(param.numel() for param in base.parameters())
    session.close()
    dist.barrier()
    return {
        "row": name,
        "seconds": statistics.median(seconds),
        "sent": figures[0].item() / steps / numel,
        "resident": figures[1].item() / numel,
        "losses": figures[2:].tolist(),
    }


def sent_through(device: str) -> int:
    """Bytes that this node has sent to the other one, as the kernel counts them."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == device:
            return int(counts.split()[8])
    raise OSError(f"there is no device {device}")


def table(rows: list[dict]) -> str:
    lines = [
        "| row | s/step | bytes from node to node per parameter and step | resident bytes per parameter | last loss |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['row']} | {row['seconds']:.2f} | {row['sent']:.2f} | {row['resident']:.2f} | "
            f"{row['losses'][-1]:.4f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    with two_networks(args.rate) as networks, tempfile.TemporaryDirectory() as folder:
        import torch
        from torch import multiprocessing

        multiprocessing.spawn(run_rank, (args, networks, folder), nprocs=2 * RANKS_OF_A_NODE)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    if args.output is not None:
        args.output.write_text(json.dumps(rows, indent=1))
    print(
        f"torch {torch.__version__}, {args.size} in {args.precision}, {args.accumulation} micro-batches of "
        f"{args.length} tokens, 2 x {RANKS_OF_A_NODE} ranks, {args.rate} MB/s between nodes"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
