"""``hf-zero doctor``: what this machine has, what is missing, and whether ranks can talk to each other."""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from hf_zero.command_line import CommandParser
from hf_zero.core.direct_file import DirectFile
from hf_zero.errors import ZeroRuntimeError


_NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "lustre", "gpfs", "ceph", "cifs", "smb3", "beegfs", "9p", "fuse.sshfs"}
_TIMEOUT_S = 120  # most of it is what interpreters take to import torch where other programs run as well


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report; `level` is ok, note or fail."""

    what: str
    level: str
    text: str


def _ok(what: str, text: str) -> Finding:
    return Finding(what=what, level="ok", text=text)


def _note(what: str, text: str) -> Finding:
    return Finding(what=what, level="note", text=text)


def _fail(what: str, text: str) -> Finding:
    return Finding(what=what, level="fail", text=text)


def versions() -> Iterator[Finding]:
    yield _ok("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for line in metadata.requires("hf_zero") or []:
        wanted = Requirement(line)
        if wanted.marker is not None and "extra" in str(wanted.marker):
            continue
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            yield _fail(wanted.name, f"is not installed: pip install '{wanted.name}{wanted.specifier}'")
            continue
        good = wanted.specifier.contains(found, prereleases=True)
        yield (
            _ok(wanted.name, found)
            if good
            else _fail(wanted.name, f"{found} is outside {wanted.specifier}: pip install '{line.partition(';')[0]}'")
        )
    for name in ("trl", "peft", "matplotlib"):
        try:
            yield _ok(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield _note(name, "is not installed (optional)")


def devices() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    memory = psutil.virtual_memory()
    yield _ok(
        "host",
        f"{os.cpu_count()} cores, {memory.total / 1e9:.0f} GB memory ({memory.available / 1e9:.0f} GB available)",
    )
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    level = _ok if "gloo" in backends else _fail
    yield level("backends", ", ".join(backends) or "torch was built without any")
    count = torch.cuda.device_count()
    if not count:
        yield _note("GPUs", "none: ranks run on CPU with gloo")
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        yield _ok(f"GPU {index}", f"{found.name}, {found.total_memory / 1e9:.0f} GB")
    if count > 1:
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        linked = sum(torch.cuda.can_device_access_peer(i, j) for i, j in pairs)
        level = _ok if linked == len(pairs) else _note
        yield level("GPU links", f"{linked} of {len(pairs)} pairs reach each other's memory (nvidia-smi topo -m)")
    fabric = Path("/sys/class/infiniband")
    cards = sorted(entry.name for entry in fabric.iterdir()) if fabric.is_dir() else []
    yield (
        _ok("network", f"InfiniBand/RoCE: {', '.join(cards)}")
        if cards
        else _note("network", "no InfiniBand or RoCE card: between machines everything goes over TCP")
    )


def limits() -> Iterator[Finding]:
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked in (resource.RLIM_INFINITY, -1):
        yield _ok("ulimit -l", "unlimited")
    else:
        yield _note("ulimit -l", f"{locked / 1e6:.3g} MB of pinned memory: offload wants `ulimit -l unlimited`")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    level = _ok if files < 0 or files >= 1024 else _note
    yield level("ulimit -n", f"{files} open files")
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        level = _ok if free > 1e9 else _note
        yield level("/dev/shm", f"{free / 1e9:.1f} GB free" + ("" if free > 1e9 else ": data loader workers need it"))
    with socket.socket() as probe:
        try:
            probe.bind(("", 0))
            yield _ok("ports", "a port for the rendezvous can be opened")
        except OSError as error:
            yield _fail("ports", f"no port can be opened: {error.strerror}")


def disk(folder: Path) -> Iterator[Finding]:
    kind = _file_system(folder)
    free = shutil.disk_usage(folder).free
    shared = "shared between machines" if kind in _NETWORK_FILE_SYSTEMS else "of this machine only"
    yield _ok("disk", f"{folder}: {kind} ({shared}), {free / 1e9:.0f} GB free")
    yield _ok("O_DIRECT", "works") if _direct(folder) else _note("O_DIRECT", "refused: writes go through the cache")


def _file_system(folder: Path) -> str:
    inside = [p for p in psutil.disk_partitions(all=True) if folder.is_relative_to(p.mountpoint)]
    return max(inside, key=lambda p: len(p.mountpoint)).fstype if inside else "unknown"


def _direct(folder: Path) -> bool:
    """Whether files of a folder can be written past the cache."""
    file = DirectFile(folder)
    file.close()
    return file.direct


def disk_speed(folder: Path) -> Iterator[Finding]:
    """What training with state on the disk of `folder` may expect; writes, and takes seconds."""
    from hf_zero.tools.disk_speed import STEP_BYTES, measure

    kind, free = _file_system(folder), shutil.disk_usage(folder).free
    yield _ok("offload", f"{folder}: {kind}, {free / 1e9:.0f} GB free: state of {free / 12e9:.3g}e9 parameters")
    if kind in ("tmpfs", "ramfs"):
        yield _note("offload", f"{kind} is memory: state that is kept there saves none (device: cpu says so plainly)")
    elif kind in _NETWORK_FILE_SYSTEMS:
        yield _note("offload", f"{kind} goes over the network: name a folder on a disk of this machine")
    try:
        speed = measure(folder, min(1 << 30, free // 4))
    except ZeroRuntimeError as error:
        yield _fail("offload", str(error))
        return
    yield _ok("read", f"{speed.read / 1e9:.2f} GB/s")
    yield _ok("write", f"{speed.write / 1e9:.2f} GB/s")
    yield _ok("both at once", f"{speed.both / 1e9:.2f} GB/s, both ways together")
    yield _ok(
        "step",
        f"at least {speed.step_seconds(1e9):.3g} s for each 1e9 parameters whose AdamW state the ranks of this "
        f"machine keep there ({STEP_BYTES} bytes per parameter)",
    )
    if not speed.direct:
        yield _note("O_DIRECT", "refused: state goes through the page cache, and is dropped from it")


def collectives(num_processes: int, timeout_s: float) -> Iterator[Finding]:
    """Have ranks gather and reduce with each other, in processes of their own."""
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "hf_zero.tools.doctor",
                    "--rank",
                    str(rank),
                    "--num-processes",
                    str(num_processes),
                ],
                env={**os.environ, "HF_ZERO_DOCTOR_FOLDER": folder, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_processes)
        ]
        try:
            reports = [rank.communicate(timeout=max(0.0, deadline - time.monotonic())) for rank in ranks]
        except subprocess.TimeoutExpired:
            yield _fail("collectives", _too_late(sum(rank.poll() is None for rank in ranks), num_processes, timeout_s))
            return
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    for number, (rank, (out, err)) in enumerate(zip(ranks, reports, strict=True)):
        if rank.returncode:
            reason = (err.strip() or out.strip() or f"exit status {rank.returncode}").splitlines()[-1]
            yield _fail("collectives", f"rank {number} of {num_processes}: {reason}")
            return
    yield _ok("collectives", reports[0][0].strip().splitlines()[-1])


def _too_late(late: int, num_processes: int, timeout_s: float) -> str:
    """What ranks that have not finished may mean: a machine with other work, or ranks that do not find each other."""
    said = f"{late} of {num_processes} ranks did not finish within {timeout_s:g} s; "
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores:
        return f"{said}the machine is busy (load average {load:.1f} on {cores} cores): give more time with --timeout"
    return (
        f"{said}the machine is not busy (load average {load:.1f} on {cores} cores), so they may not reach each other: "
        "see GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; or give more time with --timeout"
    )


def _one_rank(rank: int, world_size: int) -> int:
    """One rank of the self-test: every move that the engine makes, checked."""
    import torch

    from hf_zero.comm.communicator import Communicator
    from hf_zero.comm.process_groups import join

    on_gpu = torch.cuda.device_count() >= world_size
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    join("nccl" if on_gpu else "gloo", Path(os.environ["HF_ZERO_DOCTOR_FOLDER"]) / "store", rank, world_size)
    comm = Communicator.connect()
    numel = 1 << 20
    began = time.perf_counter()
    flat = torch.full((world_size * numel,), float(rank), device=device)
    comm.all_gather(flat).wait()
    assert flat.view(world_size, numel)[:, 0].tolist() == list(range(world_size)), "all-gather gave wrong values"
    ones = torch.ones(world_size * numel, device=device)
    sums = {"reduce-scatter": 0.0, "all-reduce": 0.0}

    def add_up(move: str, _: int, part: torch.Tensor) -> None:
        sums[move] += float(part.double().sum())

    comm.reduce_scatter([ones], functools.partial(add_up, "reduce-scatter")).wait()
    comm.all_reduce([torch.ones(4, device=device)], functools.partial(add_up, "all-reduce")).wait()
    assert sums == {"reduce-scatter": world_size * numel, "all-reduce": 4 * world_size}, f"wrong sums: {sums}"
    comm.barrier()
    rate = sum(comm.traffic.bytes_sent.values()) / (time.perf_counter() - began) / 1e9
    how = f"moved by each, by {comm.transport_name}"
    print(f"{world_size} ranks: right values, {rate:.2f} GB/s {how}")
    return 0


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="hf-zero doctor", description="Check this machine; exit status 1 on faults.")
    parser.add_argument("--num-processes", type=int, default=2, help="ranks of the self-test; 0: none (default: 2)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=_TIMEOUT_S,
        metavar="SECONDS",
        help=f"how long the self-test may take (default: {_TIMEOUT_S})",
    )
    parser.add_argument("--folder", default=".", help="where checkpoints will be written (default: here)")
    parser.add_argument("--disk", metavar="PATH", help="measure the disk of this folder, for state that is kept there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank is not None:
        return _one_rank(options.rank, options.num_processes)
    for option, name in (("--folder", options.folder), ("--disk", options.disk)):
        if name is not None and not (Path(name).is_dir() and os.access(name, os.W_OK)):
            print(f"hf-zero doctor: {option} {name} is no folder that you may write to", file=sys.stderr)
            return 2
    folder = Path(options.folder).absolute()
    checks: list[Callable[[], Iterator[Finding]]] = [versions, devices, limits, lambda: disk(folder)]
    if options.disk is not None:
        checks.append(lambda: disk_speed(Path(options.disk).absolute()))
    if options.num_processes > 0:
        checks.append(lambda: collectives(options.num_processes, options.timeout))
    findings = [finding for check in checks for finding in check()]
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    return 1 if any(finding.level == "fail" for finding in findings) else 0


def _print(findings: list[Finding]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    styles = {"ok": "green", "note": "yellow", "fail": "bold red"}
    for finding in findings:
        table.add_row(f"[{styles[finding.level]}]{finding.level}[/]", finding.what, finding.text)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
