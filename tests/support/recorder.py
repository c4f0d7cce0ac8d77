"""Runs a program once per rank, each alone in this process, and records what it would enqueue.

The ranks meet in process groups of the backend "recorded", which takes the code path of NCCL: a collective returns at
once and a wait holds up the device, not the host. Engines can be told to move values as gloo's do instead, by messages
or by reading other ranks' memory. No values come from other ranks: a gather repeats this rank's slice, a reduction
counts it as everybody's. So a program must not decide by values where ranks have to agree, unless they decide alike on
their own values.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache

import hf_zero
from hf_zero.comm import work as comm_work
from hf_zero.comm.communicator import Communicator
from hf_zero.comm.transport import Take, Transport
from hf_zero.comm.transport.messages import Messages
from hf_zero.comm.transport.nccl import Nccl
from hf_zero.comm.transport.reads import Reads
from hf_zero.comm.work import Handle, Landing, Tag
from hf_zero.core.engine import ZeroEngine
from hf_zero.core.homes import Homes
from tests.support.device_log import DeviceLog, Work
from tests.support.happens_before import Log


def record(program: Callable[[Recording], None], world_size: int = 2, device: str = "cpu") -> list[Log]:
    """Run `program` as each of `world_size` ranks; what each has enqueued, in rank order.

    Collectives take tensors of `device` only, as NCCL's take no memory of the host: RuntimeError for others.
    """
    return [_record_rank(program, rank, world_size, device) for rank in range(world_size)]


def _record_rank(program: Callable[[Recording], None], rank: int, world_size: int, device: str) -> Log:
    assert Recording.current is None, "one recording at a time"
    recording = Recording.current = Recording(device)
    excepthook = sys.excepthook  # torch wraps it once more for every default group
    for clear in (_clear_python_sharding_prop_cache, _clear_fast_path_sharding_prop_cache):
        clear()  # where DTensors keep meshes of the rank before
    try:
        dist.init_process_group("recorded", store=dist.HashStore(), rank=rank, world_size=world_size)
        with recording.open():
            program(recording)
    finally:
        Recording.current, sys.excepthook = None, excepthook
        if dist.is_initialized():
            dist.destroy_process_group()
    return recording.log


class Recording(DeviceLog):
    """One rank, for the program that it runs."""

    current: Recording | None = None  # of this process: torch makes process groups without arguments of ours

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)

    def shard(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        transport: str = "nccl",
        homes: Homes | None = None,
        mixins: Sequence[type] = (),
        **config: object,
    ) -> ZeroEngine:
        """`hf_zero.shard`, with collectives whose log says what they carry.

        `transport` is how values move: "nccl" (collectives), "messages" (gloo's) or "reads" (of other ranks' memory);
        `homes` says where slices rest.
        """
        zero = hf_zero.ZeroConfig(**config)
        moves = Naming(self, _transport(self, transport, group or dist.group.WORLD))
        comm = Communicator(moves, deterministic=zero.deterministic_reduce)
        if homes is None and not mixins:
            return hf_zero.shard(model, optimizer, zero, group=comm, device=self.device)
        engine = ZeroEngine(model, zero, group=comm, device=self.device, homes=homes, mixins=mixins)
        if optimizer is not None:
            engine.attach_optimizer(optimizer)
        return engine


class RecordedLanes:
    """In the place of a device's streams for copies to and from its host."""

    def __init__(self) -> None:
        assert Recording.current is not None
        self._recording = Recording.current
        self._last_up: Work | None = None

    def memory(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def down(self, target: Tensor, source: Tensor) -> Work:
        return self._copy("down", target, source)

    def up(self, target: Tensor, source: Tensor) -> Work:
        self._last_up = self._copy("up", target, source)
        return self._last_up

    def _copy(self, lane: str, target: Tensor, source: Tensor) -> Work:
        with torch.no_grad(), torch.inference_mode(False), self._recording.paused():
            work = self._recording.launch(
                f"rank {dist.get_rank()}: {lane}", "copy", (dist.get_rank(),), [source], [target]
            )
            target.copy_(source)
        return work

    def send(self, begin: Callable[[], comm_work.Work]) -> comm_work.Work:
        before = self._last_up
        with self._recording.behind(None if before is None else before.call):
            work = begin()
        return comm_work.Work(comm_work.Landing([work] if before is None else [work, before]))

    def join(self) -> None:
        if self._last_up is not None:
            self._last_up.wait()

    def close(self) -> None:
        """There are no streams."""


# -- process groups --------------------------------------------------------------------------------------------------


class RecordedGroup(dist.ProcessGroup):
    """A process group of one process, which plays one of its ranks."""

    def __init__(self, recording: Recording, name: str, rank: int, ranks: tuple[int, ...]) -> None:
        super().__init__(rank, len(ranks))
        self.recording, self.name, self.ranks = recording, name, ranks

    @property
    def group_name(self) -> str:
        return self.name

    def getBackendName(self) -> str:
        return "recorded"

    def _run(
        self,
        kind: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        values: Callable[[], object],
        numel: int | None = None,
    ) -> Work:
        if strangers := {tensor.device for tensor in (*inputs, *outputs)} - {self.recording.device}:
            raise RuntimeError(f"{kind} of tensors on {strangers}: this group's are on {self.recording.device}")
        with torch.no_grad(), self.recording.paused():
            work = self.recording.launch(self.name, kind, self.ranks, inputs, outputs, numel=numel)
            values()
        return work

    def _message(self, source: int, target: int, tag: int, outgoing: list[Tensor], incoming: list[Tensor]) -> Work:
        # Messages of other tags, and those the other way, do not wait for each other.
        channel = f"{self.name}: {source} to {target}, tag {tag}"
        ends = (self.ranks[source], self.ranks[target])
        return self.recording.launch(channel, "message", ends, outgoing, incoming, tagged=True)

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Work:
        return self._message(self.rank(), target, tag, tensors, [])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        with torch.no_grad(), self.recording.paused():
            tensors[0].zero_()
        return self._message(source, self.rank(), tag, [], tensors)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: object = None) -> Work:
        slices = output.chunk(self.size())
        return self._run("all-gather", [input], [output], lambda: [slice_.copy_(input) for slice_ in slices])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: object = None) -> Work:
        own = input.chunk(self.size())[self.rank()]
        return self._run("reduce-scatter", [input], [output], lambda: torch.mul(own, self.size(), out=output))

    # What DTensors call.
    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None
    ) -> Work:
        ((output,), (input,)) = (outputs, inputs)
        return self.all_gather_single(output, input)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None
    ) -> Work:
        ((output,), (input,)) = (outputs, inputs)
        return self.reduce_scatter_single(output, input)

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None) -> Work:
        own = inputs[self.rank()]
        if own.numel():
            return self._run("all-to-all", inputs, outputs, lambda: [output.copy_(own) for output in outputs])
        # Messages of any lengths, none to itself: what others send is not known here.
        return self._run("all-to-all", inputs, outputs, lambda: [output.zero_() for output in outputs], numel=0)

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> Work:
        factor = self.size() if opts.reduceOp == dist.ReduceOp.SUM else 1
        return self._run("all-reduce", tensors, tensors, lambda: [tensor.mul_(factor) for tensor in tensors])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None) -> Work:
        # Only for objects, which torch copies to and from the device by itself.
        ((outputs,), (input,)) = (outputs, inputs)
        return self._run("gather of objects", [], [], lambda: [output.copy_(input) for output in outputs])

    def broadcast(self, tensors: list[Tensor], opts: object = None) -> Work:
        return self._run("broadcast", tensors, tensors, lambda: None)

    def barrier(self, opts: object = None) -> Work:
        return self._run("barrier", [], [], lambda: None)


def _make_group(options: object, _backend_options: object) -> RecordedGroup:
    recording = Recording.current
    assert recording is not None, "process groups of this backend exist inside `record` only"
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return RecordedGroup(recording, options.group_id, options.group_rank, ranks)


dist.Backend.register_backend("recorded", _make_group, extended_api=True, devices=["cpu"])


class RecordedPeers:
    """In the place of `PeerMemory`: the ranks meet twice for an offer, as all have made it and as all have read."""

    def __init__(self, recording: Recording, group: RecordedGroup) -> None:
        self._recording, self._name, self._members = recording, group.name, group.ranks
        self.ranks = [rank for rank in range(group.size()) if rank != group.rank()]
        # (kind, tag) -> offers, oldest first: when all have made it, own memory, whose memory this rank has to read
        self._offers: dict[tuple[int, int], deque[tuple[Work, list[Tensor], set[int]]]] = defaultdict(deque)
        self._returns: dict[tuple[int, int], list[Work]] = defaultdict(list)
        self._lent: list[object] = []  # memory lives until the others have read it, which is never known here

    def _meet(self, what: str, kind: int, tag: int, memory: list[Tensor]) -> Work:
        return self._recording.launch(
            f"{self._name}: {what} {kind}, tag {tag}", what, self._members, memory, tagged=True
        )

    def offer(self, kind: int, tag: int, memory: dict[int, Sequence[Tensor]]) -> None:
        tensors = [tensor for tensors in memory.values() for tensor in tensors]
        self._lent.append(memory)
        self._offers[kind, tag].append((self._meet("offer", kind, tag, tensors), tensors, set(self.ranks)))

    def expect(self, kind: int, tag: int, _peers: Iterable[int]) -> None:
        self._offers[kind, tag][0][0].wait()

    def read(self, peer: int, kind: int, tag: int, target: Tensor, start: int = 0) -> None:
        with torch.no_grad(), self._recording.paused():
            target.zero_()
        self._recording.touch("a read of a peer", target)

    def give_back(self, peer: int, kind: int, tag: int) -> None:
        _, tensors, unread = self._offers[kind, tag][0]
        unread.remove(peer)
        if not unread:
            self._offers[kind, tag].popleft()
            self._returns[kind, tag].append(self._meet("return", kind, tag, tensors))

    def leave(self) -> None:
        """There is nobody to be told."""

    def wait_for_readers(self, kind: int, tag: int | None = None) -> None:
        for key, works in self._returns.items():
            if key[0] == kind and tag in (None, key[1]):
                for work in works:
                    work.wait()
                works.clear()


class Naming:
    """In front of a transport: tells the recording what its moves carry."""

    def __init__(self, recording: Recording, transport: Transport) -> None:
        self._recording, self._inner = recording, transport

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def split(self, groups: Sequence[Sequence[int]]) -> Naming:
        return Naming(self._recording, self._inner.split(groups))

    def gather(self, flat: Tensor, tag: Tag, shard: Sequence[Tensor]) -> Landing:
        with self._recording.carrying(tag.name):
            return self._inner.gather(flat, tag, shard)

    def exchange(self, parts: Sequence[Tensor], numel: int, tag: Tag, take: Take) -> Landing:
        with self._recording.carrying(tag.name):
            return self._inner.exchange(parts, numel, tag, take)

    def reduce_scatter(self, flat: Tensor, out: Tensor, tag: Tag) -> Handle:
        with self._recording.carrying(tag.name):
            return self._inner.reduce_scatter(flat, out, tag)

    def hand_over(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: Tag) -> Landing:
        with self._recording.carrying(tag.name):
            return self._inner.hand_over(outgoing, incoming, tag)

    def all_reduce(self, flat: Tensor, tag: Tag) -> Handle:
        with self._recording.carrying(tag.name):
            return self._inner.all_reduce(flat, tag)


def _transport(recording: Recording, name: str, group: dist.ProcessGroup) -> Transport:
    if name == "nccl":
        return Nccl(group)
    messages = Messages(group)
    if name == "messages":
        return messages
    reads = Reads(messages, RecordedPeers(recording, group))
    reads.deals = False  # before the first pass, and waited for at once: one rank alone offers
    return reads
