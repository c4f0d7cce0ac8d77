"""Gradients of one flat buffer: unreduced sums as they arrive, and their reduction into the masters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Set

import torch
from torch import Tensor, nn

from hf_zero.comm import dtensors
from hf_zero.comm.work import Work
from hf_zero.core import guard
from hf_zero.core.flat_buffer import FlatBuffer
from hf_zero.core.gradient_shard import GradientShard
from hf_zero.core.gradient_sums import GradientSums
from hf_zero.core.loss_scale import LossScaler
from hf_zero.core.master import SliceShard
from hf_zero.core.whole_gradients import WholeGradients
from hf_zero.errors import ZeroAccessError, ZeroRuntimeError


class GradientBuffer:
    """Collects the gradients of a trainable buffer's parameters and reduces them over ranks.

    Sums outlive a backward pass where micro-batches accumulate locally.
    """

    def __init__(
        self,
        buffer: FlatBuffer,
        reduce_dtype: torch.dtype,
        scaler: LossScaler | None = None,
        in_parts: Container[nn.Parameter] = (),
    ) -> None:
        self.buffer, self.scaler = buffer, scaler
        # An fp64 model keeps its precision; everything else is reduced as configured.
        self.reduce_dtype = torch.float64 if buffer.dtype == torch.float64 else reduce_dtype
        # Where nothing is added to a gradient on its way, it goes as it is. A second one makes a sum of it.
        fits = torch.promote_types(buffer.dtype, self.reduce_dtype) == self.reduce_dtype
        first = buffer.dtype if fits and not buffer.mesh.world.shares else self.reduce_dtype
        self._route = buffer.gradient_route
        self._sums = GradientSums(
            buffer.layout, self.reduce_dtype, buffer.device, first=first, in_place=self._route.takes_parts
        )
        self._shared = frozenset(i for i, param in enumerate(buffer.params) if dtensors.is_dtensor(param))
        self._arrived: set[int] = set()  # parameters whose gradient came in this backward pass
        # Parameters of which backward passes may have left unreduced sums, here or elsewhere: the same on every rank.
        self.unreduced: frozenset[int] = frozenset()
        self._all = frozenset(range(len(buffer.params)))
        self.numel = buffer.layout.padded_numel  # that a reduction moves
        self.used: set[int] = set()  # parameters whose gradient came since the last optimizer step
        self.present: set[int] = set()  # parameters with a gradient in the masters; the same on every rank
        self._whole: WholeGradients | None = None  # see [Note: whole gradients]
        self._outdated: list[WholeGradients] = []
        self._work: Work | None = None
        # Parameters of which each tensor-parallel rank computes a part of the gradient.
        self.in_parts = {index for index, param in enumerate(buffer.params) if param in in_parts}

    @property
    def held(self) -> list[Tensor]:
        """The tensors that hold what is collected."""
        node_sum = self._route.node_sum
        on_node = [] if node_sum is None or node_sum.values is None else [node_sum.values]
        return [*self._sums.held, *on_node]

    @property
    def fetched(self) -> list[Tensor]:
        """The tensors that hold what was fetched for readers."""
        return [self._whole.flat] if self._whole is not None and self._whole.fetched else []

    def add(self, index: int, grad: Tensor) -> None:
        """Take the gradient of parameter `index` over; a second one in the same window is added.

        Raises ZeroRuntimeError where it comes after its reduction, which the other ranks may not repeat.
        """
        if not self.unreduced:
            raise ZeroRuntimeError(
                f"a gradient of '{self.buffer.names[index]}' came after all calls of its module were over: a "
                "checkpointed function reads the parameter outside of its module. Use checkpointing with "
                "use_reentrant=False"
            )
        if self._whole is not None:  # a hook has read it in this backward pass
            self.outdate_whole()
        if grad.is_sparse:
            grad = grad.to_dense()
        if index in self.in_parts:
            assert self.buffer.mesh.tensor is not None
            grad = self.buffer.mesh.tensor.all_reduce_scalars(grad.contiguous())
        self._arrived.add(index)
        self.used.add(index)
        self._sums.add(index, grad, shared=index in self._shared)
        if not self._route.takes_parts and len(self._arrived) == len(self._all):
            self._sums.bring()

    def begin_reduce(self, *, to_owner: bool = True) -> None:
        """Start the reduction of everything collected; parameters without a gradient contribute zeros.

        Without `to_owner` it goes as far as the node, if there are several.
        """
        self.finish_reduce()
        self.outdate_whole()
        if self.unreduced:
            self.present |= self._all
            self._work = self._route.reduce(self._sums.parts(), self._unscale, to_owner=to_owner)
            self.drop()
        elif to_owner and self.is_on_node:
            self._work = self._route.go_on(self._unscale)

    @property
    def is_on_node(self) -> bool:
        """Whether sums have come as far as the node and go no further by themselves; the same on every rank."""
        node_sum = self._route.node_sum
        return node_sum is not None and node_sum.values is not None and not self.is_reducing

    def _bring_in(self) -> None:
        """Bring what was kept on the node to the masters; a collective."""
        self.finish_reduce()
        if self.is_on_node:
            self._route.go_on(self._unscale).wait()

    @property
    def is_awaited(self) -> bool:
        """Whether this rank's backward pass still has to compute a gradient of one of the parameters."""
        if len(self._arrived) == len(self._all):
            return False
        return any(guard.gets_gradient(self.buffer.params[index]) for index in self._all - self._arrived)

    @property
    def is_reducing(self) -> bool:
        """Whether a reduction is under way."""
        return self._work is not None

    def advance_reduce(self) -> None:
        """Begin the next hop of a reduction under way, if there is one."""
        if self._work is not None:
            self._work.advance()

    def finish_reduce(self) -> None:
        """Wait for a reduction under way, whose result is added to the gradients of the masters."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    # -- whole gradients, for people (see [Note: whole gradients]) -------------------------------------------------

    @property
    def _unscale(self) -> float:
        return 1.0 if self.scaler is None else 1.0 / self.scaler.scale

    def _unscaled(self, index: int) -> Tensor:
        return self._sums[index].to(self.buffer.master_dtype) * self._unscale

    def read(self, index: int, fetch: Callable[[WholeGradients, str], None]) -> Tensor | None:
        """The gradient of a parameter: this rank's sum, or the mean over ranks once it is reduced; None without one.

        `fetch(whole, operation)` is to call `fetch_whole`.
        """
        if index not in (self._sums.indices if self.unreduced else self.present):
            return None
        if self._whole is None or index in self._whole.replaced:
            self.outdate_whole()
            self._whole = WholeGradients(self.buffer)
        return self._whole.hand_out(index, functools.partial(fetch, self._whole))

    @property
    def fetching_gathers(self) -> bool:
        """Whether `fetch_whole` is a collective."""
        return self.buffer.owns_slice and not self.unreduced

    def fetch_whole(self, whole: WholeGradients) -> None:
        """Give whole gradients their values. Raises ZeroAccessError where they are gone."""
        if whole is not self._whole:
            raise ZeroAccessError(
                "a gradient was replaced or dropped (zero_grad) before it was first used: read `.grad` again"
            )
        whole.allocate()
        whole.local = bool(self.unreduced)
        if not whole.local:
            self._bring_in()
            shards = self.buffer.resting.shards
            self.buffer.gather_into(whole.flat, ((shard, shard.grad) for shard in shards))
            return
        for index in self._sums.indices:
            whole.values_of(index).copy_(self._unscaled(index))

    def _write_back(self, whole: WholeGradients) -> None:
        """Make what readers have left in whole gradients the gradients; only what differs changes a local sum."""
        valid = (self._sums.indices if whole.local else self.present) - whole.replaced
        if not whole.local:
            self.buffer.resting.write_grads({index: whole.values_of(index) for index in valid})
            return
        for index in valid:
            values, sums = whole.values_of(index), self._sums.widened(index)
            sums.copy_(torch.where(values == self._unscaled(index), sums, values / self._unscale))

    @property
    def whole_in_use(self) -> bool:
        """Whether a reader on this rank still has some of what was fetched."""
        return self._whole is not None and self._whole.in_use

    def outdate_whole(self) -> None:
        """Take back what readers have changed; the gradients are about to be used or to change."""
        if self._whole is not None and self._whole.fetched:
            self._write_back(self._whole)
            self._whole.outdate()
            self._outdated.append(self._whole)
            self._whole = None
        if self._outdated:
            self._outdated = [whole for whole in self._outdated if whole.in_use]

    def settle(self) -> None:
        """The gradients are about to be used: take back what readers have changed.

        Raises ZeroAccessError where a reader has written to gradients that had been replaced by others.
        """
        self.outdate_whole()
        if self._outdated and any(whole.changed_since for whole in self._outdated):
            self._outdated.clear()
            raise ZeroAccessError(
                f"a gradient of unit '{self.buffer.tag.name}' was read, then a backward pass, clipping or a step "
                "used the gradients, and then the tensor that was read before was changed, which has no effect: read "
                "`.grad` again before changing it"
            )

    def put(self, index: int, value: Tensor | None) -> None:
        """Replace the gradient of one parameter; every rank gives the same value."""
        self._bring_in()
        flat = None if value is None else value.detach().reshape(-1)
        if self._whole is not None and self._whole.fetched:
            self._whole.replaced.add(index)  # who has read the old one keeps it
        else:
            self._whole = None
        self._sums.discard([index])
        if index in self.present:
            self.buffer.resting.write_grads({index: self._zeros(index)})
        if flat is None:
            self.present.discard(index)
            self.used.discard(index)
            return
        self.used.add(index)
        if self.unreduced:
            self.unreduced |= {index}
            self._sums.add(index, flat / self._unscale)
        else:
            self.buffer.resting.write_grads({index: flat})
            self.present.add(index)

    def _zeros(self, index: int) -> Tensor:
        return torch.zeros(self.buffer.layout.numels[index], device=self.buffer.unsharded.device)

    def unused_spans(self) -> Iterator[tuple[GradientShard, int, int]]:
        """The parameters that got no gradient on this rank, as (shard, start, stop in it)."""
        if len(self.used) == len(self.buffer.params):
            return
        for shard in (*self.buffer.resting.shards, *self.buffer.resting.runs):
            for span in shard.spans():
                if span.index not in self.used:
                    yield shard, span.offset, span.offset + span.numel

    def give_to_owners(self, held: Set[nn.Parameter]) -> None:
        """Have owners of masters of the parameters `held` get their gradients; a collective."""
        owned = self.buffer.owned
        assert owned is not None, "nothing here has an owner"
        among = {index for index in self.present if self.buffer.params[index] in held}
        if among & owned.ownership.params:
            owned.collect(among, self.buffer.master_dtype, self.used.__contains__)

    def mark_stepped(self, held: Set[nn.Parameter]) -> None:
        """An optimizer has stepped the parameters `held`: whether they get a gradient is noted afresh."""
        self.used = {index for index in self.used if self.buffer.params[index] not in held}

    def begin_backward(self) -> None:
        self.outdate_whole()
        self._arrived.clear()
        self.unreduced = self._all

    def expect(self) -> None:
        """Gradients may come, on this rank or another."""
        self.unreduced = self._all

    def drop(self) -> None:
        """Forget what was collected and not reduced."""
        if self.unreduced:
            self._sums.clear()
        self.unreduced = frozenset()

    def drop_sums(self, held: Set[nn.Parameter]) -> None:
        """Forget what was collected for the parameters `held`, whose gradients in the masters have been dropped."""
        dropped = {index for index, param in enumerate(self.buffer.params) if param in held}
        if self.unreduced:
            self._sums.discard(dropped)
        if self._route.node_sum is not None:
            self._route.drop(dropped)
        self.used -= dropped
        self.present -= dropped
        self.unreduced -= dropped
        for shard in () if self.buffer.owned is None else self.buffer.resting.shards:
            # Of these, the optimizer has masters of owners, and does not see the gradients.
            if isinstance(shard, SliceShard) and any(span.index in dropped for span in shard.spans()):
                shard.weight.grad = None
        if self.unreduced or self.present:
            self.outdate_whole()
        else:
            self.forget()

    def forget(self) -> None:
        """Leave the parameters as if they had got no gradient since the last step."""
        self.drop()
        if self._route.node_sum is not None:
            self._route.drop(self._all)
        self.used.clear()
        self.present.clear()
        self._outdated.clear()
        self._whole = None
        for shard in self.buffer.resting.shards:
            shard.weight.grad = None


def release_unused(gradients: Iterable[GradientBuffer], reading: GradientBuffer) -> None:
    """Free whole gradients, other than those of `reading`, that no reader has any more.

    Where fetching them again is a collective they are freed on all ranks or on none, which takes a small one.
    """
    gathers = reading.fetching_gathers
    others = [g for g in gradients if g is not reading and g.fetched and g.fetching_gathers == gathers]
    in_use = torch.tensor([float(other.whole_in_use) for other in others], device=reading.buffer.unsharded.device)
    if gathers and others:
        reading.buffer.comm.all_reduce_scalars(in_use, largest=True)
    for other, used in zip(others, in_use.tolist(), strict=True):
        if not used:
            other.outdate_whole()
