"""``hf-zero doctor``: what this machine has, what is missing, and whether ranks can talk to each other."""

from __future__ import annotations

import functools
import json
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import psutil
from rich.table import Table

from hf_zero.command_line import CommandParser, wide_console
from hf_zero.core.direct_file import DirectFile
from hf_zero.errors import ZeroRuntimeError
from hf_zero.tools.requirements import admits, requirements


_NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "lustre", "gpfs", "ceph", "cifs", "smb3", "beegfs", "9p", "fuse.sshfs"}
_REPORT = "report"  # the file with what the self-test has found
_TIMEOUT_S = 120  # most of it is what interpreters take to import torch where other programs run as well


class Finding(NamedTuple):
    """One line of the report; `level` is ok, note or fail."""

    level: str
    what: str
    text: str


_ok, _note, _fail = (functools.partial(Finding, level) for level in ("ok", "note", "fail"))


def versions() -> Iterator[Finding]:
    yield _ok("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for wanted in requirements():
        found = _version(wanted.name)
        fix = f"pip install '{wanted.name}{wanted.specifier}'"
        if found is None:
            yield _fail(wanted.name, f"is not installed: {fix}")
        elif admits(wanted, found):
            yield _ok(wanted.name, found)
        else:
            yield _fail(wanted.name, f"{found} is outside {wanted.specifier}: {fix}")
    for name in ("trl", "peft"):
        found = _version(name)
        yield _ok(name, found) if found else _note(name, "is not installed (optional)")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def devices() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    memory = psutil.virtual_memory()
    total, available = memory.total / 1e9, memory.available / 1e9
    yield _ok("host", f"{os.cpu_count()} cores, {total:.0f} GB memory ({available:.0f} GB available)")
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
    if cards:
        yield _ok("network", f"InfiniBand/RoCE: {', '.join(cards)}")
    else:
        yield _note("network", "no InfiniBand or RoCE card: between machines everything goes over TCP")


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
    from torch import multiprocessing

    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        ranks = multiprocessing.start_processes(_one_rank, (num_processes, Path(folder)), num_processes, join=False)
        try:
            while not ranks.join(max(0.0, deadline - time.monotonic())):  # as soon as one has ended, too
                if time.monotonic() > deadline:
                    late = sum(rank.is_alive() for rank in ranks.processes)
                    yield _fail("collectives", _too_late(late, num_processes, timeout_s))
                    return
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            reason = str(error).strip().splitlines()[-1]
            yield _fail("collectives", f"rank {error.error_index} of {num_processes}: {reason}")
            return
        finally:
            for rank in ranks.processes:
                rank.kill()
                rank.join()
        yield _ok("collectives", Path(folder, _REPORT).read_text())


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


def _one_rank(rank: int, world_size: int, folder: Path) -> None:
    """One rank of the self-test: every move that the engine makes, checked."""
    import torch

    from hf_zero.comm.communicator import Communicator
    from hf_zero.comm.process_groups import join

    on_gpu = torch.cuda.device_count() >= world_size
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    join("nccl" if on_gpu else "gloo", folder / "store", rank, world_size)
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
    if rank == 0:
        how = f"moved by each, by {comm.transport_name}"
        (folder / _REPORT).write_text(f"{world_size} ranks: right values, {rate:.2f} GB/s {how}")


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
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help="measure how fast --num-processes ranks compute and send here, for hf-zero plan --time --machine FILE",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    for option, name in (("--folder", options.folder), ("--disk", options.disk)):
        if name is not None and not (Path(name).is_dir() and os.access(name, os.W_OK)):
            print(f"hf-zero doctor: {option} {name} is no folder that you may write to", file=sys.stderr)
            return 2
    if options.calibrate is not None:
        return _calibrate(Path(options.calibrate), options.num_processes)
    folder = Path(options.folder).absolute()
    checks: list[Callable[[], Iterator[Finding]]] = [versions, devices, limits, lambda: disk(folder)]
    if options.disk is not None:
        checks.append(lambda: disk_speed(Path(options.disk).absolute()))
    if options.num_processes > 0:
        checks.append(lambda: collectives(options.num_processes, options.timeout))
    findings = [finding for check in checks for finding in check()]
    if options.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        _print(findings)
    return 1 if any(finding.level == "fail" for finding in findings) else 0


def _calibrate(path: Path, ranks: int) -> int:
    from hf_zero.tools.calibrate import calibrate

    try:
        path.write_text(calibrate(max(1, ranks)))
    except (OSError, ZeroRuntimeError) as error:
        print(f"hf-zero doctor: --calibrate {path}: {error}", file=sys.stderr)
        return 2
    print(f"wrote {path}: hf-zero plan MODEL --time --machine {path}")
    return 0


def _print(findings: list[Finding]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    styles = {"ok": "green", "note": "yellow", "fail": "bold red"}
    for finding in findings:
        table.add_row(f"[{styles[finding.level]}]{finding.level}[/]", finding.what, finding.text)
    wide_console(160).print(table)
