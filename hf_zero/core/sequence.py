"""Ranks that share sequences: each computes with its part of the tokens, and attends with its part of the heads.

Between the two ways of cutting lies one exchange of all with all, in both directions and in both passes. The gradient
of an exchange is the exchange back, so nothing is approximated (DeepSpeed-Ulysses, Jacobs et al. 2023,
arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.comm.communicator import Communicator
from hf_zero.comm.mesh import Mesh
from hf_zero.comm.work import Tag


Heads = tuple[int, int]  # from the first to before the last


def shares_of_heads(query_heads: int, key_heads: int, size: int) -> list[tuple[Heads, Heads]]:
    """The heads of queries, and of the keys and values that these need, for each of `size` ranks.

    Numbers that `size` does not divide give shares that differ by one; grouped keys that several ranks need are in the
    share of each.

    Raises ValueError where a rank would have no head.
    """
    if size > query_heads:
        raise ValueError(
            f"{size} ranks share each sequence, but the attention has {query_heads} head(s), and each rank needs one: "
            f"set sp_size to {query_heads} or less"
        )
    group = query_heads // key_heads
    bounds = [rank * query_heads // size for rank in range(size + 1)]
    return [
        ((first, last), (first // group, (last - 1) // group + 1))
        for first, last in zip(bounds, bounds[1:], strict=False)
    ]


class SequenceGroup:
    """The ranks that share each sequence. Rank r of `size` holds the r-th of equally long parts of every sequence.

    Args:
        mesh: all data-parallel ranks.
        size: how many neighbours share a sequence; a divisor of their number. A collective.
    """

    def __init__(self, mesh: Mesh, size: int) -> None:
        self._comm, self._far = mesh.of_sequences(size)
        self.rank, self.size = self._comm.rank, size

    @property
    def comm(self) -> Communicator:
        """Moves between the ranks of the group, counted with those of all ranks."""
        return self._comm

    def to_heads(self, tensors: Sequence[Tensor], shares: Sequence[Sequence[Heads]], tag: Tag) -> list[Tensor]:
        """From all heads of this part to some heads of whole sequences; differentiable.

        `tensors` are (batch, heads, tokens of the part, width each); `shares[i][r]` are the heads of tensors[i] for
        rank r. The results are (batch, heads of this rank, all tokens, width).
        """
        return list(_ToHeads.apply(self, tag, shares, *tensors))

    def to_parts(self, tensor: Tensor, shares: Sequence[Heads], tag: Tag) -> Tensor:
        """The way back for heads that have one rank each; differentiable.

        `tensor` is (batch, heads of this rank, all tokens, width), the result (batch, all heads, tokens of the part,
        width).
        """
        return _ToParts.apply(self, tag, shares, tensor)

    def whole(self, part: Tensor, tag: Tag, dim: int = 1) -> Tensor:
        """What lies on all ranks of the group, one part after another along `dim`; not differentiable."""
        part = part.contiguous()
        rooms = [part.flatten() if rank == self.rank else part.new_empty(part.numel()) for rank in range(self.size)]
        self._swap([part.flatten()] * self.size, rooms, tag)
        return torch.cat([room.view(part.shape) for room in rooms], dim)

    def add(self, values: Tensor) -> Tensor:
        """Sums over the group of a few numbers, in place."""
        return self._comm.all_reduce_scalars(values)

    def move_to_heads(self, tensors: Sequence[Tensor], shares: Sequence[Sequence[Heads]], tag: Tag) -> list[Tensor]:
        """As `to_heads`, without a gradient."""
        mine = [
            (tensor.shape[0], share[self.rank][1] - share[self.rank][0], *tensor.shape[2:])
            for tensor, share in zip(tensors, shares, strict=True)
        ]
        outgoing = [
            [tensor[:, slice(*share[rank])] for tensor, share in zip(tensors, shares, strict=True)]
            for rank in range(self.size)
        ]
        received = self._exchange(outgoing, [mine] * self.size, tag)
        return [torch.cat(parts, 2) for parts in zip(*received, strict=True)]

    def move_to_parts(self, tensors: Sequence[Tensor], shares: Sequence[Sequence[Heads]], tag: Tag) -> list[Tensor]:
        """As `to_parts`, without a gradient; what several ranks give for one head is added up, in rank order."""
        outgoing = [[tensor.chunk(self.size, 2)[rank] for tensor in tensors] for rank in range(self.size)]
        shapes = [
            [
                (tensor.shape[0], share[rank][1] - share[rank][0], tensor.shape[2] // self.size, tensor.shape[3])
                for tensor, share in zip(tensors, shares, strict=True)
            ]
            for rank in range(self.size)
        ]
        received = self._exchange(outgoing, shapes, tag)
        return [_put_together(parts, share) for parts, share in zip(zip(*received, strict=True), shares, strict=True)]

    def _exchange(
        self, outgoing: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Sequence[int]]], tag: Tag
    ) -> list[list[Tensor]]:
        """Hand rank r the tensors outgoing[r]; from it come such of shapes[r]. One message for each pair of ranks."""
        own = outgoing[self.rank]
        dtypes = [tensor.dtype for tensor in own]
        if len(set(dtypes)) > 1:  # a message has one dtype
            columns = [
                self._exchange([[row[at]] for row in outgoing], [[row[at]] for row in shapes], tag)
                for at in range(len(own))
            ]
            return [[column[rank][0] for column in columns] for rank in range(self.size)]
        nothing = own[0].new_empty(0)
        messages, rooms = [nothing] * self.size, [nothing] * self.size
        lengths = [[torch.Size(shape).numel() for shape in row] for row in shapes]
        for rank in range(self.size):
            if rank != self.rank:
                messages[rank] = torch.cat([tensor.flatten() for tensor in outgoing[rank]])
                rooms[rank] = nothing.new_empty(sum(lengths[rank]))
        self._swap(messages, rooms, tag)
        return [
            list(own)
            if rank == self.rank
            else [
                part.view(*shape) for part, shape in zip(rooms[rank].split(lengths[rank]), shapes[rank], strict=True)
            ]
            for rank in range(self.size)
        ]

    def _swap(self, messages: list[Tensor], rooms: list[Tensor], tag: Tag) -> None:
        """Fill rooms[r] with the message of rank r."""
        nothing = messages[0].new_empty(0)
        messages = [nothing if rank == self.rank else message for rank, message in enumerate(messages)]
        incoming = [nothing if rank == self.rank else room for rank, room in enumerate(rooms)]
        far = sum(message.nbytes for message, away in zip(messages, self._far, strict=True) if away)
        self._comm.hand_over(messages, incoming, tag, far=far).wait()


def _put_together(parts: Sequence[Tensor], shares: Sequence[Heads]) -> Tensor:
    """Heads of all ranks, (batch, all heads, tokens, width); sums where shares overlap."""
    first = parts[0]
    whole = first.new_zeros(first.shape[0], shares[-1][1], *first.shape[2:])
    for part, share in zip(parts, shares, strict=True):
        whole[:, slice(*share)] += part
    return whole


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: SequenceGroup, tag: Tag, shares: Sequence[Sequence[Heads]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.tag, ctx.shares = group, tag, shares
        return tuple(group.move_to_heads(tensors, shares, tag))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, None, None, *ctx.group.move_to_parts(gradients, ctx.shares, ctx.tag))


class _ToParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, tag: Tag, shares: Sequence[Heads], tensor: Tensor) -> Tensor:
        ctx.group, ctx.tag, ctx.shares = group, tag, shares
        return group.move_to_parts([tensor], [shares], tag)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, None, *ctx.group.move_to_heads([gradient], [ctx.shares], ctx.tag)
