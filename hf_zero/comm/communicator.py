"""One data-parallel group: its moves on flat tensors, counted and watched, over whichever transport fits."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm.codec import Codec
from hf_zero.comm.feedback import ErrorFeedback
from hf_zero.comm.meter import Quantised
from hf_zero.comm.sums import DecodedSum, RankOrderSum
from hf_zero.comm.traffic import Traffic
from hf_zero.comm.transport import Transport
from hf_zero.comm.transport.alone import Alone
from hf_zero.comm.transport.counting import Counting
from hf_zero.comm.transport.group import GroupTransport
from hf_zero.comm.transport.messages import Messages
from hf_zero.comm.transport.nccl import Nccl
from hf_zero.comm.transport.reads import connect_memory
from hf_zero.comm.watchdog import Watchdog
from hf_zero.comm.work import UNTAGGED, Landing, OnChunk, Tag, Work
from hf_zero.errors import ZeroRuntimeError


MEETING_SECONDS = 60.0  # for all ranks to make a call that gathers the model


class Communicator:
    """The moves of one group, with a count of calls and of bytes that this rank sends.

    The sum over ranks is made here, in rank order and in fp32, so that it is the same on every run and transport;
    NCCL's own reduce-scatter is used where nothing asks for that order.

    Args:
        transport: moves the bytes (see `connect`, which chooses one).
        deterministic: sum in rank order on every transport.
        watchdog: told while this process waits.
        near: how many of the other ranks are on this rank's machine (default: all).
        where: which ranks these are, for labels ("between nodes"); nothing for all.
        traffic: where moves are counted (default: counters of its own).
        reads: whether ranks of a part of the group may read each other's memory (see `split`).
    """

    _meetings: Counter[str] = Counter()  # by ranks: communicators of the same ranks share the count
    _watched: Counter[str] = Counter()  # by ranks: the watched communicators; all of them make the same ones

    def __init__(
        self,
        transport: Transport,
        *,
        deterministic: bool = False,
        watchdog: Watchdog | None = None,
        near: int | None = None,
        where: str = "",
        traffic: Traffic | None = None,
        reads: bool = False,
    ) -> None:
        self._transport = transport
        self.rank, self.world_size, self.deals = transport.rank, transport.size, transport.deals
        self.deterministic, self.watchdog = deterministic, watchdog
        self.near = self.world_size - 1 if near is None else near
        self.traffic = Traffic() if traffic is None else traffic
        self._where, self._reads = where, reads
        weakref.finalize(self, transport.close)

    @classmethod
    def connect(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | None = None,
        deterministic: bool = False,
        hang_timeout_s: float = 0.0,
        peer_memory: bool = True,
        together: bool = True,
    ) -> Communicator:
        """Choose a transport for the ranks of `group` (default: all) and tensors on `device`; a collective.

        This is the only place that asks how ranks can exchange memory. `together` is False where the ranks are to be
        taken as ranks of several machines, whatever they are.
        """
        if not dist.is_initialized():
            return cls(Alone())
        group = group or dist.group.WORLD
        assert group is not None, "torch.distributed is initialized"
        if dist.get_world_size(group) == 1:
            return cls(Alone())
        if dist.get_backend(group) != "gloo":
            return cls(Nccl(group), deterministic=deterministic)
        transport = Messages(group)
        reads = peer_memory and (device is None or device.type == "cpu")
        return cls(
            connect_memory(transport) if reads and together else transport,
            deterministic=deterministic,
            watchdog=cls._watch(transport, hang_timeout_s),
            reads=reads,
        )

    def split(self, groups: Sequence[Sequence[int]], *, near: int, where: str, joins: bool = False) -> Communicator:
        """The communicator of the one of `groups` that this rank is in, counted together with this; a collective.

        `near` and `where` are as above. Ranks that are all near may read each other's memory. `joins`: one watchdog.
        """
        transport = self._transport.split(groups)
        if near == transport.size - 1 and self._reads:
            transport = connect_memory(transport)
        watchdog = self.watchdog if joins else None
        if not joins and self.watchdog is not None and isinstance(transport, GroupTransport):
            watchdog = self._watch(transport, self.watchdog.timeout_s)
        return Communicator(
            transport,
            deterministic=self.deterministic,
            watchdog=watchdog,
            near=near,
            where=where and f" {where}",
            traffic=self.traffic,
            reads=joins and self._reads,
        )

    @classmethod
    def imagine(
        cls,
        world_size: int,
        backend: str,
        *,
        deterministic: bool = False,
        peer_memory: bool = True,
        together: bool = True,
        on_buffer: Callable[[list[Tensor]], None],
        around: Callable[[Transport], Transport] | None = None,
    ) -> Communicator:
        """Rank 0 of `world_size` ranks that do not exist, for the planner: it counts, and moves nothing.

        `backend` ("gloo" or "nccl") and the options choose as in `connect`; `on_buffer` is called with tensors that
        exist only for a move, and `around` puts a transport in front of the one that moves nothing.
        """
        if world_size == 1:
            return cls(Alone())
        transport: Transport = Counting(world_size, "nccl" if backend == "nccl" else "messages", on_buffer=on_buffer)
        transport = transport if around is None else around(transport)
        reads = peer_memory and backend != "nccl"
        return cls(
            connect_memory(transport) if reads and together else transport, deterministic=deterministic, reads=reads
        )

    @classmethod
    def _watch(cls, transport: GroupTransport, timeout_s: float) -> Watchdog | None:
        """For transports whose waits block this process; NCCL waits on the device and has its own watchdog."""
        if not timeout_s:
            return None
        ranks = str(transport.ranks)
        cls._watched[ranks] += 1
        return Watchdog(
            dist.distributed_c10d._get_default_store(),
            name=f"{ranks}/{cls._watched[ranks]}",
            rank=transport.rank,
            world_size=transport.size,
            timeout_s=timeout_s,
        )

    def of_a_thread(self) -> Communicator:
        """The same ranks on gloo groups of their own, whose collectives may fall between any others; a collective."""
        if not isinstance(self._transport, GroupTransport):
            return self
        return Communicator(Messages(self._transport.new_group("gloo")))

    @property
    def shares(self) -> bool:
        """Whether there is anybody to share with; a transport that was handed in says so for one rank, too."""
        return not isinstance(self._transport, Alone)

    @property
    def device(self) -> torch.device:
        """Where tensors must lie for `broadcast`."""
        return self._transport.device

    @property
    def transport_name(self) -> str:
        """How values are moved, for people."""
        return self._transport.name

    @property
    def takes_parts(self) -> bool:
        """Whether `reduce_scatter` reads tensors where they lie; otherwise it is given one flat tensor."""
        return self._transport.takes_parts

    def prepare_reductions(self) -> None:
        """Make what reductions need, while all ranks are at the same point; a collective the first time."""
        self._transport.prepare_reductions()

    # -- moves ------------------------------------------------------------------------------------------------------

    def all_gather(self, flat: Tensor, tag: Tag = UNTAGGED, shard: Sequence[Tensor] = ()) -> Work:
        """Fill `flat` (world_size equal slices) in place; this rank's own slice is already there.

        `shard` holds the same values as the own slice, end to end, in memory that does not change before `fence`.
        """
        self._count("all_gather", flat.nbytes // self.world_size, relayed=self._transport.relays)
        return self._work(self._transport.gather(flat, tag, shard), "all-gather", tag)

    def gather_quantised(
        self, values: Tensor, flat: Tensor, tag: Tag, quantised: Quantised, *, add: bool = False
    ) -> Work:
        """Fill `flat` with everybody's `values` (whole blocks) as they are sent, or add them to it.

        This rank's own come back quantised too, so that all ranks have the same.
        """
        assert quantised.codec is not None
        payload = quantised.codec.pack(values)
        quantised.watch(values, payload)
        return self.gather_payloads(payload, flat, tag, quantised.codec, add=add)

    def gather_payloads(self, payload: Tensor, flat: Tensor, tag: Tag, codec: Codec, *, add: bool = False) -> Work:
        """Fill `flat` with what everybody's payloads hold, or add it; `payload` does not change before `fence`."""
        nbytes = payload.numel()
        payloads = torch.empty(nbytes * self.world_size, dtype=torch.uint8, device=payload.device)
        payloads[self.rank * nbytes : (self.rank + 1) * nbytes] = payload
        self._count("all_gather", nbytes, relayed=self._transport.relays)
        landing = self._transport.gather(payloads, tag, [payload])

        def finish(land: Callable[[], None] = landing.finish) -> None:
            land()
            for payload, slice_ in zip(payloads.split(nbytes), flat.chunk(self.world_size), strict=True):
                codec.decode(payload, slice_, add=add)

        landing.finish = finish
        return self._work(landing, "all-gather", tag)

    def reduce_scatter_quantised(
        self, flat: Tensor, on_chunk: OnChunk, tag: Tag, quantised: Quantised, feedback: ErrorFeedback | None = None
    ) -> Work:
        """As `reduce_scatter` with one flat tensor of whole blocks, whose slices are sent by the codec."""
        codec = quantised.codec
        assert codec is not None
        if feedback is not None:
            feedback.correct((self._where, tag), flat)
        slices = flat.chunk(self.world_size)
        nbytes = codec.nbytes(slices[0].numel())
        payloads = torch.empty(nbytes * self.world_size, dtype=torch.uint8, device=flat.device)
        for values, payload in zip(slices, payloads.split(nbytes), strict=True):
            codec.encode(values, payload)
        quantised.watch(slices[0], payloads[:nbytes])
        if feedback is not None:
            sent = torch.empty_like(flat)
            for values, payload in zip(sent.chunk(self.world_size), payloads.split(nbytes), strict=True):
                codec.decode(payload, values)
            feedback.keep((self._where, tag), flat, sent)
        self._count("reduce_scatter", nbytes)
        total = DecodedSum(codec, slices[0].numel(), self.world_size, on_chunk)
        return self._work(self._transport.exchange([payloads], nbytes, tag, total), "reduce-scatter", tag)

    def reduce_scatter(self, parts: Sequence[Tensor], on_chunk: OnChunk, tag: Tag = UNTAGGED) -> Work:
        """Sum over ranks; chunks of this rank's slice of the result go to `on_chunk`, in fp32 at least if it is a sum.

        `parts` are flat tensors that make up world_size equal slices, end to end: a single one, where not
        `takes_parts`. They belong to the collective from here on.
        """
        numel = sum(map(Tensor.numel, parts)) // self.world_size
        transport = self._transport
        sums = not self.deterministic and transport.sums(parts[0].dtype)
        self._count("reduce_scatter", numel * parts[0].itemsize, relayed=sums)
        if sums:
            landing = self._own_reduce_scatter(parts[0], numel, on_chunk, tag)
        else:
            landing = transport.exchange(parts, numel, tag, RankOrderSum(self.world_size, on_chunk))
        work = self._work(landing, "reduce-scatter", tag)
        if not transport.overlaps:
            work.wait()
        return work

    def hand_over(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: Tag, *, far: int = 0) -> Work:
        """Send flat outgoing[r] to every other rank r, and fill incoming[r] with its message: of any lengths.

        Nobody sends to itself. `far` of the bytes go to other machines.
        """
        nbytes = sum(tensor.nbytes for tensor in outgoing)
        if self.shares:
            self.traffic.count("hand_over", nbytes - far, far)
        return self._work(self._transport.hand_over(outgoing, incoming, tag), "exchange", tag)

    def _own_reduce_scatter(self, flat: Tensor, numel: int, on_chunk: OnChunk, tag: Tag) -> Landing:
        out = flat.new_empty(numel)
        handle = self._transport.reduce_scatter(flat, out, tag)

        # `flat` stays referenced until the collective on its own stream is over.
        def finish(flat: Tensor = flat) -> None:
            on_chunk(0, out)

        return Landing([handle], finish)

    def all_reduce(self, parts: Sequence[Tensor], on_chunk: OnChunk, tag: Tag = UNTAGGED) -> Work:
        """As `reduce_scatter` with one flat tensor, but every rank is given the whole result."""
        if not self.shares:
            return self.reduce_scatter(parts, on_chunk, tag)
        (flat,) = parts
        self._count("all_reduce", 2 * flat.nbytes // self.world_size, relayed=self._transport.relays)
        landing = Landing([self._transport.all_reduce(flat, tag)], lambda: on_chunk(0, flat))
        return self._work(landing, "all-reduce", tag)

    def drain(self, works: Iterable[Work]) -> None:
        """Wait now for what makes no progress by itself, while all ranks are at the same point; else do nothing."""
        if not self._transport.overlaps:
            for work in works:
                work.wait()

    def fence(self, tag: Tag | None = None) -> None:
        """Block until every peer has finished reading our shard for the gathers called `tag` (None: for all).

        The shard may change afterwards. Only for gathers that this rank has waited for.
        """
        self._work(self._transport.fence(tag), "reads", tag or UNTAGGED).wait()

    # -- scalars, objects, meeting ----------------------------------------------------------------------------------

    def all_reduce_scalars(self, values: Tensor, largest: bool = False) -> Tensor:
        """Sum (or maximum) of a few scalars over ranks, in place: norms, overflow flags."""
        self._count("scalars", values.nbytes)
        self._transport.all_reduce_scalars(values, largest)
        return values

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copy `tensor` from rank `source` of the group to all ranks, in place."""
        if self.shares:
            self.traffic.count("broadcast", tensor.nbytes if self.rank == source else 0)
        self._transport.broadcast(tensor, source)
        return tensor

    def deal(self, given: Sequence[Tensor], wanted: Sequence[tuple[int, Tensor]], tag: Tag, source: int = 0) -> None:
        """Fill each of `wanted` (first element, tensor) from `given`, flat tensors of rank `source`, end to end.

        On the source nothing is wanted, on others nothing is given.
        """
        self.traffic.count("deal", sum(tensor.nbytes for _, tensor in wanted))
        self._work(self._transport.deal(given, wanted, source, tag), "first values", tag).wait()

    def broadcast_all(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Copy `tensors` from rank `source` to all ranks, in place, in one message per dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors if self.shares else ():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for group in by_dtype.values():
            flat = self.broadcast(torch.cat([tensor.reshape(-1) for tensor in group]), source)
            for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def all_gather_object(self, value: object) -> list:
        """One Python object from every rank, in rank order; for metadata and agreement on errors."""
        return self._transport.all_gather_object(value)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._transport.barrier()

    def meet(self, purpose: str, timeout_s: float) -> None:
        """Wait until all ranks of the group are here, for the same purpose.

        Unlike a barrier it says who is missing, on any backend: for calls that scripts make on one rank by mistake.
        Raises ZeroRuntimeError naming the ranks that do not come in time, or come for another purpose.
        """
        if not isinstance(self._transport, GroupTransport):
            return
        store = dist.distributed_c10d._get_default_store()
        group = str(self._transport.ranks)
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
        purposes = [store.get(key).decode() for key in keys]
        if len(set(purposes)) > 1:
            places = ", ".join(f"rank {rank} in {place}" for rank, place in enumerate(purposes))
            raise ZeroRuntimeError(f"the ranks do different things: {places}. All must take the same branches")

    def close(self) -> None:
        """End the watching and give back what connects the ranks."""
        if self.watchdog is not None:
            self.watchdog.stop()

    def _count(self, kind: str, nbytes: int, *, relayed: bool = False) -> None:
        """Note a collective in which `nbytes` of this rank come to every other one; relayed, once to every node."""
        if self.world_size > 1 or self.shares:
            others = self.world_size - 1
            far = (others - self.near) // (self.near + 1 if relayed else 1)
            self.traffic.count(kind, nbytes * (others - far), nbytes * far)

    def _work(self, landing: Landing, kind: str, tag: Tag) -> Work:
        what = tag.name + self._where
        return Work(landing, kind, what, watchdog=self.watchdog, waited=self.traffic.waited)
