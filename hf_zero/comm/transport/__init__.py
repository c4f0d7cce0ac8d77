"""How the bytes of one group are moved: the interface, and one file for each way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_zero.comm.work import Handle, Landing, Tag


# Called in rank order with (source rank, first element, values); `values` may be overwritten and are only valid during
# the call. The chunks of one range come in order, each from all ranks before the next.
Take = Callable[[int, int, Tensor], None]


class Transport:
    """Moves the bytes of one group. Knows no placement, no codec and no counter; ranks are indices of the group.

    Attributes:
        rank, size: of this process in the group.
        name: the way of moving, for people.
        device: where tensors must lie for `broadcast`.
        overlaps: a move progresses while this thread computes. If not, waiting late gains nothing and holds memory.
        relays: its own collectives pass values on from rank to rank, so that each comes to a node once.
        takes_parts: `exchange` reads tensors where they lie; elsewhere it is given one flat tensor.
        deals: there is `deal`.
    """

    rank: int
    size: int
    name: str
    device = torch.device("cpu")
    overlaps = True
    relays = False
    takes_parts = False
    deals = False

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        """One that connects the ranks of that group which this rank is in; a collective of all ranks.

        Every rank of this transport is in one of the groups.
        """
        raise NotImplementedError

    def by_reads(self) -> Transport:
        """One for ranks of one machine that read each other's memory; this one where they cannot."""
        return self

    def gather(self, flat: Tensor, tag: Tag, shard: Sequence[Tensor]) -> Landing:
        """Fill `flat` (`size` equal slices) in place; this rank's own slice is already there.

        `shard` holds the values of the own slice, end to end, in memory that does not change before `fence`.
        """
        raise NotImplementedError

    def exchange(self, parts: Sequence[Tensor], numel: int, tag: Tag, take: Take) -> Landing:
        """Hand every rank its slice (`numel` elements) of everybody's `parts`.

        `parts` lie end to end and belong to the move from here on.
        """
        raise NotImplementedError

    def hand_over(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: Tag) -> Landing:
        """Send flat outgoing[r] to every other rank r, and fill incoming[r] with its message: of any lengths.

        A message of no elements is none. The outgoing tensors belong to the move from here on.
        """
        raise NotImplementedError

    def deal(self, given: Sequence[Tensor], wanted: Sequence[tuple[int, Tensor]], source: int, tag: Tag) -> Landing:
        """Fill each of `wanted` (first element, tensor) from `given`, flat tensors of rank `source`, end to end.

        Nobody reads them any more when the source has waited. On the source nothing is wanted, on others not given.
        """
        raise NotImplementedError

    def sums(self, dtype: torch.dtype) -> bool:
        """Whether `reduce_scatter` exists for messages of `dtype` and keeps the precision of a sum in fp32."""
        return False

    def reduce_scatter(self, flat: Tensor, out: Tensor, tag: Tag) -> Handle:
        """Sum over ranks with the transport's own collective, this rank's slice into `out`."""
        raise NotImplementedError

    def all_reduce(self, flat: Tensor, tag: Tag) -> Handle:
        """Sum over ranks, in place, on every rank."""
        raise NotImplementedError

    def fence(self, tag: Tag | None) -> Landing:
        """Wait until no peer reads this rank's shard of the gathers called `tag` (None: of any)."""
        return Landing()

    def prepare_reductions(self) -> None:
        """Make what reductions need, while all ranks are at the same point; a collective the first time."""

    def all_reduce_scalars(self, values: Tensor, largest: bool) -> None:
        """Sum (or maximum) of a few values, in place."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy `tensor` from rank `source` to all ranks, in place."""

    def all_gather_object(self, value: object) -> list:
        """One Python object from every rank, in rank order."""
        return [value] * self.size

    def barrier(self) -> None:
        """Wait for all ranks."""

    def close(self) -> None:
        """Give back what connects the ranks; not a collective."""
