"""The only caller of torch.distributed collectives: the moves between placements, on flat tensors."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm.peer_memory import PeerMemory
from hf_zero.comm.transport.reads import PeerTransport
from hf_zero.comm.watchdog import Watchdog
from hf_zero.comm.work import UNTAGGED, OnChunk, Tag, Work, deliver_parts, wide
from hf_zero.errors import ZeroRuntimeError


class Communicator:
    """The collectives of one data-parallel group, with a count of calls and of bytes that this rank sends.

    On gloo the moves are point-to-point messages straight into their final place: gloo's own reduce-scatter is an
    all-reduce (twice the bytes), and the sum over ranks is made here in rank order, in fp32, so that it is the same
    on every run. Where all ranks are on one machine they read each other's memory instead, with the same result. NCCL
    uses its own collectives.

    Gathers and reductions have separate process groups: with NCCL the collectives of one group run one after another,
    and the next unit's gather must not wait for a reduction. The second group is made when it is needed, and
    communicators of one group share it: with NCCL each costs device memory.
    """

    _meetings: Counter[str] = Counter()  # by ranks: communicators of the same ranks share the count
    _made: Counter[str] = Counter()  # by ranks: the monitored communicators; all of them make the same ones
    _reduce_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        deterministic: bool = False,
        hang_timeout_s: float = 0.0,
        peer_memory: bool = True,
    ) -> None:
        self.deterministic = deterministic
        self.monitor: Watchdog | None = None
        self._peers: PeerTransport | None = None
        self.calls: Counter[str] = Counter()
        self.bytes_sent: Counter[str] = Counter()
        self.waited: Counter[str] = Counter()  # seconds that this process stood still, by kind of collective
        if not dist.is_initialized():
            self.rank, self.world_size, self.backend = 0, 1, "none"
            return
        self._group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)
        self.backend = dist.get_backend(self._group)
        self._ranks = dist.get_process_group_ranks(self._group)
        if self.world_size > 1:
            self.monitor = self._make_monitor(hang_timeout_s)
            self._peers = self._connect() if peer_memory and self._point_to_point else None

    def _connect(self) -> PeerTransport | None:
        memory = PeerMemory.connect(self.rank, self.all_gather_object)
        if memory is None:
            return None
        weakref.finalize(self, memory.leave)
        return PeerTransport(self.rank, memory)

    def _make_monitor(self, timeout_s: float) -> Watchdog | None:
        """None where waiting does not block this process (NCCL waits on the device and has its own watchdog)."""
        if not self._point_to_point or not timeout_s:
            return None
        ranks = str(self._ranks)
        self._made[ranks] += 1
        return Watchdog(
            dist.distributed_c10d._get_default_store(),
            name=f"{ranks}/{self._made[ranks]}",
            rank=self.rank,
            world_size=self.world_size,
            timeout_s=timeout_s,
        )

    def of_a_thread(self) -> Communicator:
        """The same ranks on gloo groups of their own, whose collectives may fall between any others; a collective."""
        if self.world_size == 1:
            return self
        return Communicator(self._new_group(backend="gloo"), peer_memory=False)

    def _new_group(self, backend: str) -> dist.ProcessGroup:
        """Another group of the same ranks; a collective. Raises ZeroRuntimeError where they cannot make one.

        Ranks outside do not take part. Then torch names the group by how many groups a process is in, and ranks that
        disagree about the name would wait for each other.
        """
        of_all = self.world_size == dist.get_world_size()
        if not of_all:
            joined = self.all_gather_object(len(dist.distributed_c10d._world.pg_names))
            if len(set(joined)) > 1:
                raise ZeroRuntimeError(
                    f"ranks {self._ranks} are in {joined} process groups, and torch can make another group of some "
                    "ranks only where these numbers are equal. Have each of them join equally many before hf_zero"
                )
        return dist.new_group(self._ranks, backend=backend, use_local_synchronization=not of_all)

    def prepare_reductions(self) -> None:
        """Make the process group of reductions, while all ranks are at the same point; a collective the first time."""
        if self.world_size > 1 and self._group not in self._reduce_groups:
            self._reduce_groups[self._group] = self._new_group(self.backend)

    @property
    def _reduce_group(self) -> dist.ProcessGroup:
        self.prepare_reductions()
        return self._reduce_groups[self._group]

    @property
    def _point_to_point(self) -> bool:
        return self.backend == "gloo"

    def _count(self, kind: str, sent: int) -> None:
        self.calls[kind] += 1
        self.bytes_sent[kind] += sent

    def _pending(
        self, works: Sequence[Work], finish: Callable[[], None], kind: str, what: Tag, beside: bool = True
    ) -> Work:
        label = f"{kind} of {what.name}"
        return Work(works, finish, label, monitor=self.monitor, waited=self.waited, beside=beside)

    def reads_peers(self, device: torch.device) -> bool:
        """Whether ranks read each other's memory."""
        return self._peers is not None and device.type == "cpu"

    def takes_parts(self, device: torch.device) -> bool:
        """Whether reductions read gradients where they are; otherwise they are given one flat tensor."""
        return self.world_size == 1 or self.reads_peers(device)

    def all_gather(self, flat: Tensor, what: Tag = UNTAGGED, rest: Sequence[Tensor] = ()) -> Work:
        """Fill `flat` (world_size equal slices) in place; this rank's own slice is already there.

        `rest` holds the same values as the own slice, end to end, in memory that does not change before `settle`.
        """
        if self.world_size == 1:
            return Work()
        numel = flat.numel() // self.world_size
        own = flat[self.rank * numel : (self.rank + 1) * numel]
        self._count("all_gather", own.nbytes * (self.world_size - 1))
        if self.reads_peers(flat.device):
            read = self._peers.all_gather(flat, what.tag, rest)
            return self._pending([read], read.finish, "all-gather", what, beside=False)
        if self._point_to_point:
            slices = flat.chunk(self.world_size)
            works, land = self._exchange([own] * self.world_size, list(slices), self._group, what.tag)
        else:
            works, land = [_all_gather_single(flat, own, group=self._group, async_op=True)], _nothing
        return self._pending(works, land, "all-gather", what)

    def settle(self, what: Tag | None = None) -> None:
        """Wait until every peer has read our `rest` of the gathers called `what` (None: of all); it may change then.

        Only for gathers that this rank has waited for.
        """
        if self._peers is not None:
            reads = self._peers.settle(None if what is None else what.tag)
            self._pending([reads], _nothing, "reads", what or UNTAGGED).wait()

    def reduce_scatter(self, parts: Sequence[Tensor], deliver: OnChunk, what: Tag = UNTAGGED) -> Work:
        """Sum over ranks; this rank's slice of the result is delivered, in fp32 at least.

        `parts` are flat tensors that make up world_size equal slices, end to end: a single one, where not
        `takes_parts`. They belong to the collective from here on.
        """
        if self.world_size == 1:
            return Work((), lambda: deliver_parts(parts, deliver))
        numel = sum(map(Tensor.numel, parts)) // self.world_size
        self._count("reduce_scatter", numel * parts[0].itemsize * (self.world_size - 1))
        if self.reads_peers(parts[0].device):
            read = self._peers.reduce_scatter(parts, numel, what.tag, deliver)
            return self._pending([read], read.finish, "reduce-scatter", what, beside=False)
        (flat,) = parts
        if not self._point_to_point and not self.deterministic and flat.dtype == torch.float32:
            out = flat.new_empty(numel)
            work = _reduce_scatter_single(out, flat, group=self._reduce_group, async_op=True)
            # `flat` stays referenced until the collective on its own stream is over.
            return self._pending([work], lambda flat=flat: deliver(0, out), "reduce-scatter", what)
        slices = flat.chunk(self.world_size)
        # All-to-all, then a local sum: also how 16-bit gradients travel at half width and are still summed in fp32.
        received = [torch.empty_like(slices[0]) if rank != self.rank else slice_ for rank, slice_ in enumerate(slices)]
        if self._point_to_point:
            works, land = self._exchange(list(slices), received, self._reduce_group, what.tag)
        else:
            works = [dist.all_to_all(received, list(slices), group=self._reduce_group, async_op=True)]
            land = _nothing

        def finish(flat: Tensor = flat) -> None:
            land()
            deliver(0, _sum_in_order(received))

        return self._pending(works, finish, "reduce-scatter", what)

    def all_reduce(self, parts: Sequence[Tensor], deliver: OnChunk, what: Tag = UNTAGGED) -> Work:
        """As `reduce_scatter`, but every rank is delivered the whole result."""
        if self.world_size == 1:
            return self.reduce_scatter(parts, deliver, what)
        (flat,) = parts
        self._count("all_reduce", 2 * flat.nbytes * (self.world_size - 1) // self.world_size)
        work = dist.all_reduce(flat, group=self._reduce_group, async_op=True)
        return self._pending([work], lambda: deliver(0, flat), "all-reduce", what)

    def on_all_ranks(self, values: Tensor, largest: bool = False) -> Tensor:
        """Sum (or maximum) of a few scalars over ranks, in place: norms, overflow flags."""
        if self.world_size > 1:
            self._count("scalars", values.nbytes * (self.world_size - 1))
            dist.all_reduce(values, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self._group)
        return values

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copy `tensor` from rank `source` of the group to all ranks, in place."""
        if self.world_size > 1:
            self._count("broadcast", tensor.nbytes if self.rank == source else 0)
            dist.broadcast(tensor, src=self._ranks[source], group=self._group)
        return tensor

    def broadcast_all(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Copy `tensors` from rank `source` to all ranks, in place, in one message per dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors if self.world_size > 1 else ():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for group in by_dtype.values():
            flat = self.broadcast(torch.cat([tensor.reshape(-1) for tensor in group]), source)
            for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def all_gather_object(self, value: object) -> list:
        """One Python object from every rank, in rank order; for metadata and agreement on errors."""
        if self.world_size == 1:
            return [value]
        gathered: list = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier(group=self._group)

    def meet(self, purpose: str, timeout_s: float) -> None:
        """Wait until all ranks of the group are here. Raises ZeroRuntimeError naming those that do not come in time.

        Unlike a barrier it says who is missing, on any backend: for calls that scripts make on one rank by mistake.
        """
        if self.world_size == 1:
            return
        store = dist.distributed_c10d._get_default_store()
        group = str(self._ranks)
        self._meetings[group] += 1
        keys = [f"hf_zero/meet/{group}/{self._meetings[group]}/{rank}" for rank in range(self.world_size)]
        store.set(keys[self.rank], purpose)
        try:
            store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise ZeroRuntimeError(
                f"rank {self.rank} waited {timeout_s:g} s in {purpose}, but rank(s) {missing} of {self.world_size} "
                f"did not call it: weights are sharded, so call it on all ranks (not under `if is_main_process`)"
            ) from error

    def _exchange(
        self, outgoing: list[Tensor], incoming: list[Tensor], group: dist.ProcessGroup, tag: int
    ) -> tuple[list[dist.Work], Callable[[], None]]:
        """Send outgoing[r] to every other rank r and receive its message into incoming[r].

        Messages of different tags do not meet: ranks that diverge wait for each other instead of mixing up values.
        Tensors on a device pass through the host, as gloo sends host memory only; the second result, called when the
        messages are there, brings them to the device.
        """
        device_incoming = incoming
        if incoming[0].device.type != "cpu":
            incoming = [torch.empty_like(tensor, device="cpu") for tensor in incoming]
            outgoing = [tensor.cpu() for tensor in outgoing]
        works: list[dist.Work] = []
        for step in range(1, self.world_size):
            # Each step pairs the ranks differently, so that no rank is everybody's first target.
            source = (self.rank - step) % self.world_size
            target = (self.rank + step) % self.world_size
            works.append(dist.irecv(incoming[source], src=self._ranks[source], group=group, tag=tag))
            works.append(dist.isend(outgoing[target], dst=self._ranks[target], group=group, tag=tag))

        def land() -> None:
            for rank, (target, source) in enumerate(zip(device_incoming, incoming, strict=True)):
                if target is not source and rank != self.rank:
                    target.copy_(source)

        return works, land


def _nothing() -> None:
    """Nothing is left to be done."""


def _sum_in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].to(wide(parts[0].dtype))
    for part in parts[1:]:
        total.add_(part)
    return total


# torch 2.13 renamed both calls and warns at the old names; 2.11 and 2.12 know only the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def join(backend: str, store: Path, rank: int, world_size: int) -> None:
    """Make this process a rank of a new default group, whose ranks meet in a file."""
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)


def store_of_ranks(timeout: timedelta) -> dist.Store:
    """A key-value store that all ranks reach: torchrun's own, which outlives ranks, else the process group's.

    Raises ValueError where there is neither, and RuntimeError where it cannot be reached within `timeout`.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return dist.distributed_c10d._get_default_store()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
