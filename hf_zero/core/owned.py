"""Masters of one buffer on their owners, and what goes between them and the slices of all ranks.

[Note: owned] An optimizer that looks at whole matrices (Muon, Shampoo, SOAP, Adafactor, LAMB) steps each of them on
one rank, and where ranks have weights, each of them steps runs as long as its weight says. Parameters and gradients
stay flat, equal slices, so forward, backward, accumulation, norms and clipping know nothing of it. Once per step the
reduced gradients go to the owners (`collect`, in fp32), and after it the new weights come back in the dtype of
computation (`hand_out`): 4 + 2 bytes per element in 16-bit runs, however many micro-batches there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.comm.mesh import Mesh
from hf_zero.comm.work import Tag
from hf_zero.core.gradient_shard import GradientShard
from hf_zero.core.layout import Span
from hf_zero.core.master import MASTER, MasterShard, SliceShard, map_tensors
from hf_zero.core.ownership import Ownership


class OwnedMasters:
    """The masters of pieces of one buffer; all methods are collectives of the ranks that share one copy.

    Args:
        masters: by the number of the piece, those that this rank owns.
        slices: what this rank has of all pieces in its slice, in order.
        device: of what is sent.
    """

    def __init__(
        self,
        ownership: Ownership,
        masters: Mapping[int, MasterShard],
        slices: Sequence[SliceShard],
        mesh: Mesh,
        tag: Tag,
        device: torch.device,
    ) -> None:
        self.ownership, self.masters = ownership, masters
        self._slices, self._mesh, self._tag, self._device = slices, mesh, tag, device

    @property
    def matrices(self) -> dict[int, MasterShard]:
        """By parameter, the masters of the whole ones that this rank owns."""
        pieces = self.ownership.pieces
        return {pieces[number].params[0]: each for number, each in self.masters.items() if pieces[number].is_matrix}

    @property
    def runs(self) -> dict[MasterShard, int]:
        """The other masters that this rank owns, with the numbers of their pieces."""
        pieces = self.ownership.pieces
        return {each: number for number, each in self.masters.items() if not pieces[number].is_matrix}

    def collect(self, among: Collection[int], dtype: torch.dtype, is_used: Callable[[int], bool]) -> None:
        """Give the masters with parameters `among` these their gradients of `dtype`, which the slices have.

        A matrix with a gradient of zero, of which this rank has sent nothing (not `is_used`), gets none: torch leaves
        out such parameters, too. Runs always get one, like flat shards (see `SkippedParams`).
        """
        grads: dict[int, Tensor] = {}

        def land(span: Span, values: Tensor) -> None:
            master = self.masters[span.index]
            if span.numel == master.numel:  # in one slice: no copy
                grads[span.index] = values
                return
            if span.index not in grads:
                grads[span.index] = torch.empty(master.numel, dtype=dtype, device=values.device)
            grads[span.index][span.start : span.start + span.numel] = values

        of = self.ownership
        ranks = range(len(of.slices))
        self._exchange(
            [[self._grad_of(span) for span in of.spans(of.own, owner, among)] for owner in ranks],
            [of.spans(holder, of.own, among) for holder in ranks],
            dtype,
            land,
        )
        for number, grad in grads.items():
            weight = self.masters[number].weight
            piece = of.pieces[number]
            gets_one = not piece.is_matrix or is_used(piece.params[0]) or bool(grad.any())
            weight.grad = grad.view(weight.shape).to(weight.device) if gets_one else None

    def hand_out(self, dtype: torch.dtype) -> None:
        """Have the slices of all ranks hold the masters as they are now, in `dtype`; gradients of these are spent."""
        casts: dict[int, Tensor] = {}
        for number, master in self.masters.items():
            with master.open(kinds=(MASTER,)):
                values = master.values.to(device=self._device, dtype=dtype, copy=not master.keeps_memory)
                casts[number] = values.view(-1)
            master.weight.grad = None
        arrived = self._to_slices(casts, self.ownership.params, dtype)
        with torch.no_grad():
            for shard in self._slices:
                with shard.open(write=True):
                    for span, values in arrived:
                        low, high = max(span.offset, shard.start), min(span.offset + span.numel, shard.stop)
                        if low < high:
                            target = shard.values[low - shard.start : high - shard.start]
                            target.copy_(values[low - span.offset : high - span.offset])

    def _to_slices(
        self, own: Mapping[int, Tensor], among: Collection[int], dtype: torch.dtype
    ) -> list[tuple[Span, Tensor]]:
        """What all ranks have of pieces with parameters `among` these, each for its `own`, as far as in this slice."""
        arrived: list[tuple[Span, Tensor]] = []
        of = self.ownership
        ranks = range(len(of.slices))

        def part(span: Span) -> Tensor:
            return own[span.index][span.start : span.start + span.numel]

        self._exchange(
            [[part(span) for span in of.spans(holder, of.own, among)] for holder in ranks],
            [of.spans(of.own, owner, among) for owner in ranks],
            dtype,
            lambda span, values: arrived.append((span, values)),
        )
        return arrived

    def put_runs(
        self, values: Iterable[tuple[GradientShard, Tensor | None]], own: Tensor
    ) -> Iterator[tuple[GradientShard, Tensor | None]]:
        """Put what is given for runs (None: zeros) into the slices of all ranks, `own` on this one; yield the others.

        A collective when the last was yielded.
        """
        pieces, runs = self.ownership.pieces, self.runs
        given: dict[int, Tensor] = {}
        for shard, value in values:
            if shard not in runs:
                yield shard, value
            elif value is not None:
                given[runs[shard]] = value.to(device=self._device, dtype=own.dtype, copy=True)
            else:
                given[runs[shard]] = torch.zeros(shard.numel, dtype=own.dtype, device=self._device)
        among = {index for piece in pieces if not piece.is_matrix for index in piece.params}
        if among:
            for span, part in self._to_slices(given, among, own.dtype):
                own[span.offset : span.offset + span.numel] = part

    def adopt_writes(self, seen: Tensor) -> None:
        """Carry over what differs in the whole buffer, as somebody has left it, from the casts of the masters.

        No communication: every owner looks at its own.
        """
        for number, master in self.masters.items():
            piece = self.ownership.pieces[number]
            with master.open(write=True, kinds=(MASTER,)):
                values, now = master.values, seen[piece.start : piece.stop].to(master.weight.device)
                now = now.view(values.shape)
                values.copy_(torch.where(now != values.to(now.dtype), now.to(values.dtype), values))

    def gather(self, states: Mapping[Tensor, dict]) -> dict[int, dict[str, Any]]:
        """By parameter the whole master (MASTER) and what the optimizer keeps for it, on all ranks of the world.

        `states` are this rank's, by weight. A collective of the world.
        """
        of, world = self.ownership, self._mesh.world
        mine: dict[int, dict[str, Any]] = {}
        for index, master in self.matrices.items():
            with master.open():
                kept = {MASTER: master.values, **states.get(master.weight, {})}
                mine[index] = map_tensors(kept, lambda tensor: tensor.detach().to(world.device, copy=True))
        if len(of.slices) == 1:
            return mine
        shapes = {index: map_tensors(kept, lambda tensor: tensor.to("meta")) for index, kept in mine.items()}
        theirs = world.all_gather_object(shapes)
        found = {}
        for piece in (piece for piece in of.pieces if piece.is_matrix):
            (index,), owner = piece.params, piece.owner  # in the first replica, its number is its rank
            kept = mine[index] if world.rank == owner else theirs[owner][index]
            found[index] = map_tensors(kept, functools.partial(self._broadcast, owner))
        return found

    def _broadcast(self, source: int, tensor: Tensor) -> Tensor:
        world = self._mesh.world
        whole = tensor if world.rank == source else torch.empty_like(tensor, device=world.device)
        return world.broadcast(whole, source)

    def _exchange(
        self,
        outgoing: list[list[Tensor]],
        coming: list[list[Span]],
        dtype: torch.dtype,
        land: Callable[[Span, Tensor], None],
    ) -> None:
        """Send outgoing[r] to rank r, and call `land` with everything that comes from r for the spans coming[r]."""
        own = self.ownership.own
        for span, values in zip(coming[own], outgoing[own], strict=True):
            land(span, values)
        outgoing[own], coming[own] = [], []
        rooms = [self._empty(sum(span.numel for span in spans), dtype) for spans in coming]
        messages = [parts[0] if len(parts) == 1 else torch.cat([self._empty(0, dtype), *parts]) for parts in outgoing]
        outgoing.clear()
        if len(rooms) > 1:
            self._mesh.hand_over(messages, rooms, self._tag).wait()
        for spans, room in zip(coming, rooms, strict=True):
            for span, values in zip(spans, room.split([span.numel for span in spans]), strict=True):
                land(span, values)

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    def _grad_of(self, span: Span) -> Tensor:
        """This rank's part of a gradient; zeros where there is none."""
        parts = []
        for shard in self._slices:
            low, high = max(span.offset, shard.start), min(span.offset + span.numel, shard.stop)
            if low < high:
                grad = shard.weight.grad
                if grad is None:
                    parts.append(torch.zeros(high - low, dtype=shard.weight.dtype, device=self._device))
                else:
                    parts.append(grad[low - shard.start : high - shard.start])
        return parts[0] if len(parts) == 1 else torch.cat(parts)
