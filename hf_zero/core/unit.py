"""A unit: the parameters that are unsharded, resharded and reduced together."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hf_zero.comm.work import Work
from hf_zero.core import guard
from hf_zero.core.flat_buffer import FlatBuffer
from hf_zero.core.gradients import GradientBuffer
from hf_zero.core.packed import put_together
from hf_zero.core.whole_gradients import WholeGradients
from hf_zero.errors import ZeroAccessError


class UnitState(Enum):
    """Whether the parameters of a unit can be used."""

    RESTING = "resting"  # values released; each rank holds its slice
    GATHERING = "gathering"  # an all-gather is under way
    READY = "ready"  # values are there


@dataclass
class Tally:
    """How many elements of sharded units are unsharded, or on their way."""

    numel: int = 0


class UnitListener(Protocol):
    """Callbacks from a unit to its engine."""

    def before_access(self, unit: Unit, param: nn.Parameter, operation: str) -> None:
        """A parameter is read from outside its module; may raise."""

    def on_open(self, unit: Unit) -> None:
        """From here on the parameters can be read from outside their modules, and nobody is told."""

    def before_grad_read(self, unit: Unit, gradient: GradientBuffer, param: nn.Parameter, operation: str) -> None:
        """A gradient is used from outside; may raise."""

    def before_grad_write(self) -> None:
        """A gradient is assigned."""

    def replace_values(self, unit: Unit, param: nn.Parameter, value: Tensor) -> None:
        """A parameter is to have values of another shape."""


class Unit:
    """Parameters that travel in one collective per dtype and `requires_grad` (normally: one collective)."""

    def __init__(
        self,
        name: str,
        index: int,
        buffers: list[FlatBuffer],
        gradients: list[GradientBuffer],
        listener: UnitListener,
        unsharded: Tally,
    ) -> None:
        self.name, self.index = name, index
        self.buffers, self.gradients = buffers, gradients
        self.params: list[nn.Parameter] = [param for buffer in buffers for param in buffer.params]
        self.numel = sum(buffer.layout.numel for buffer in buffers)
        self.sharded = any(buffer.sharded for buffer in buffers)
        self.state = UnitState.READY
        self.pins = 0  # gathered_parameters() scopes that are open
        self.accessed = False  # read from outside its module: stays until the end of backward
        self._touched = False  # `.data` was handed out since the last look for writes
        self.works: list[Work] = []
        self._refreshing: list[Work] = []
        self.outdated = False  # a parameter that was frozen is to be trained
        self.listener, self._unsharded = listener, unsharded
        self._guarded = [each for param in self.params for each in guard.with_followers(param)]
        guard.attach(self._guarded, self)
        if self.sharded:
            self.state = UnitState.RESTING
            guard.lock(self._guarded)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for buffer in self.buffers:
            yield from zip(buffer.names, buffer.params, strict=True)

    # -- unshard and reshard ---------------------------------------------------------------------------------------

    @property
    def is_fetched(self) -> bool:
        """Whether gathers are made of what has to be brought into memory first."""
        return any(not shard.keeps_memory for buffer in self.buffers for shard in buffer.resting.weights)

    def begin_fetch(self) -> None:
        """Have this rank's slice read ahead, where it rests on disk."""
        for buffer in self.buffers:
            buffer.resting.begin_fetch()

    def begin_unshard(self) -> None:
        """Start the gather of a resting unit; the values may be used after `unshard`.

        Where memory runs out the unit rests, and no collective was begun: the next try is in step with other ranks.
        """
        if self.state is UnitState.RESTING:
            if self._refreshing:
                self.finish_refresh()
            try:
                for buffer in self.buffers:
                    buffer.allocate()
            except BaseException:
                for buffer in self.buffers:
                    buffer.release()
                raise
            self.works = [buffer.gather() for buffer in self.buffers]
            self._unsharded.numel += self.numel
            self.state = UnitState.GATHERING

    def unshard(self) -> None:
        """Make the values available; a collective, unless it was begun before."""
        if self.state is UnitState.RESTING:
            self.begin_unshard()
        if self.state is UnitState.GATHERING:
            for pending in self.works:
                pending.wait()
            self.works.clear()
            self.state = UnitState.READY
            guard.unlock(self._guarded)

    def reshard(self) -> None:
        """Release the values; what was written to them from outside a module is kept. No communication."""
        if not self.sharded or self.state is UnitState.RESTING:
            return
        self.unshard()  # bytes that a collective still writes to cannot be released
        self.adopt_writes()
        for buffer in self.buffers:
            if self.accessed:
                buffer.abandon()
            else:
                buffer.release()
        self.accessed = False
        self._unsharded.numel -= self.numel
        self.state = UnitState.RESTING
        guard.lock(self._guarded)

    def begin_refresh(self, *, exact: bool = False) -> None:
        """After an optimizer step: start bringing up to date what is kept of trained weights besides their masters."""
        if self.sharded:
            self.finish_refresh()
            self._refreshing = [b.refresh(exact=exact) for b in self.buffers if b.node_slice or b.owned]
            return
        self.unshard()
        buffers = [buffer for buffer in self.buffers if buffer.trainable]
        if buffers:
            self.works = [buffer.refresh() for buffer in buffers]
            self.state = UnitState.GATHERING
            guard.lock(self._guarded)

    def finish_refresh(self) -> None:
        """Wait for a refresh: values are there, of replicated weights and of what is kept of sharded ones."""
        if not self.sharded:
            self.unshard()
        for work in self._refreshing:
            work.wait()
        self._refreshing = []

    # -- access from outside the hooks ---------------------------------------------------------------------------

    def on_access(self, param: nn.Parameter, operation: str) -> None:
        """The guard's question (see [Note: parameter classes]): gather, or raise where the user asked for that."""
        self.listener.before_access(self, param, operation)
        self._open()
        self.unshard()

    def _open(self) -> None:
        self.listener.on_open(self)
        self.accessed = self.accessed or self.sharded

    def on_data(self) -> None:
        self._touched = True

    def on_requires_grad(self, param: nn.Parameter) -> None:
        trained = any(buffer.trainable and buffer.index_of(param) is not None for buffer in self.buffers)
        self.outdated = self.outdated or (param.requires_grad and not trained)

    def on_replace(self, param: nn.Parameter, value: Tensor) -> None:
        self.listener.replace_values(self, param, value)

    def read_grad(self, param: nn.Parameter) -> Tensor | None:
        for gradient in self.gradients:
            index = gradient.buffer.index_of(param)
            if index is not None:
                fetch = functools.partial(self._fetch_grad, gradient, param)
                return gradient.read(index, fetch)
        return None

    def _fetch_grad(
        self, gradient: GradientBuffer, param: nn.Parameter, whole: WholeGradients, operation: str
    ) -> None:
        if not whole.fetched:
            self.listener.before_grad_read(self, gradient, param, operation)
            gradient.fetch_whole(whole)

    def write_grad(self, param: nn.Parameter, value: Tensor | None) -> None:
        for gradient in self.gradients:
            index = gradient.buffer.index_of(param)
            if index is not None:
                shape = gradient.buffer.layout.shapes[index]
                if value is not None and tuple(value.shape) != shape:
                    raise ValueError(
                        f"a gradient of shape {tuple(value.shape)} cannot be that of '{self.name_of(param)}', whose "
                        f"shape is {shape}"
                    )
                self.listener.before_grad_write()
                gradient.put(index, value)
                return
        if value is not None:
            raise ValueError(f"'{self.name_of(param)}' is not trained, so no step would use the gradient given to it")

    def name_of(self, param: nn.Parameter) -> str:
        named = self.named_parameters()
        return next((name for name, own in named if any(each is param for each in guard.with_followers(own))), "?")

    def adopt_writes(self) -> None:
        """Carry over what the user wrote to the values, if anything could have been written."""
        if self.state is not UnitState.READY:
            return
        written = [buffer.written_in_place() for buffer in self.buffers]
        if self._touched or any(written):
            for buffer in self.buffers:
                buffer.adopt_writes()
        self._touched = False

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Inside, the values are there to be read; then the unit rests again if it did before. A collective."""
        resting = self.state is UnitState.RESTING
        self.unshard()
        try:
            yield
        finally:
            if resting:
                self.reshard()

    def cast(self, dtypes: Mapping[FlatBuffer, torch.dtype]) -> None:
        """Give each buffer's values the dtype named; what is kept at rest stays as it is. A collective."""
        if self.pins:
            raise ValueError("the model cannot be cast inside gathered_parameters()")
        if not self.sharded:
            self.unshard()
        self.adopt_writes()
        for buffer in self.buffers:
            if buffer.dtype != dtypes[buffer]:
                buffer.cast(dtypes[buffer])

    def dissolve(self) -> None:
        """Give every parameter whole values of its own again, as plain `nn.Parameter`."""
        self.unshard()
        self.adopt_writes()
        self._unsharded.numel -= self.numel if self.sharded else 0
        guard.detach(self._guarded)
        for buffer in self.buffers:
            buffer.detach_parameters()
        for param in self._guarded:
            put_together(param)

    # -- explicit scopes ----------------------------------------------------------------------------------------------

    def pin(self) -> None:
        """Keep the values available until `unpin`."""
        self.unshard()
        self.adopt_writes()
        self.pins += 1
        if self.pins == 1:
            self._keep_values(True)
        self._open()

    def unpin(self, write: bool) -> None:
        """End a hold: make rank 0's values everybody's, or drop what was written inside."""
        self.pins -= 1
        if write:
            for buffer in self.buffers:
                buffer.parts.agree(buffer.unsharded, buffer.views(buffer.unsharded))
                buffer.written_in_place()
                buffer.adopt_writes()
            self._touched = False
            self._keep_values(self.pins > 0)
        elif not self.pins:
            self._forget_writes()
            if not self.sharded:
                self.restore()
        if not self.pins:
            self._keep_values(False)
            self.reshard()

    def _keep_values(self, keep: bool) -> None:
        for buffer in self.buffers:
            buffer.resting.keep_values(keep)

    def _forget_writes(self) -> None:
        for buffer in self.buffers:
            buffer.written_in_place()
        self._touched = False

    def restore(self) -> None:
        """Bring back the values at rest, whatever was written in the meantime."""
        self._forget_writes()
        self.finish_refresh()
        for buffer in self.buffers:
            if buffer.resting:
                buffer.restore()


def raise_on_access(unit: Unit, param: nn.Parameter, operation: str) -> None:
    """The `param_access: raise` answer."""
    raise ZeroAccessError(
        f"{operation} reads parameter '{unit.name_of(param)}', which is sharded over the ranks. Wrap the code, on all "
        "ranks, in `with hf_zero.gathered_parameters([param]):` (write=True to change it), or set param_access: gather"
    )


def raise_on_grad_read(unit: Unit, param: nn.Parameter, operation: str) -> None:
    """The same for a gradient."""
    raise ZeroAccessError(
        f"{operation} reads the gradient of '{unit.name_of(param)}', which is sharded over the ranks. Clip by the "
        "engine's (or accelerator's) clip_grad_norm_, which gathers nothing, or set param_access: gather"
    )


def _saved_for_backward(units: list[Unit]) -> contextlib.AbstractContextManager:
    """Inside, autograd saves aliases of parameters: the parameters themselves are empty when backward needs them."""

    def alias(tensor: Tensor) -> Tensor:
        is_ours = guard.is_prepared(tensor) and guard.owner_of(tensor) in units
        return tensor.detach() if is_ours else tensor

    return saved_tensors_hooks(alias, lambda tensor: tensor)


def unit_of(param: nn.Parameter) -> Unit:
    """The unit of a prepared parameter."""
    owner = guard.owner_of(param)
    assert isinstance(owner, Unit)
    return owner


def units_of(params: Iterable[nn.Parameter]) -> list[Unit]:
    """The units of parameters, in their order; those that are not prepared have none."""
    return list(dict.fromkeys(unit_of(param) for param in params if guard.is_prepared(param)))


@contextlib.contextmanager
def one_pass(units: Iterable[Unit]) -> Iterator[None]:
    """Inside, what a disk fails at on one rank is kept; then all raise ZeroRuntimeError (see `DiskFailures`)."""
    with contextlib.ExitStack() as passes:
        for homes, comm in {(buffer.homes, buffer.comm): None for unit in units for buffer in unit.buffers}:
            passes.enter_context(homes.one_pass(comm))
        yield


@contextlib.contextmanager
def gathered_parameters(
    params: nn.Module | nn.Parameter | Iterable[nn.Parameter], write: bool = False
) -> Iterator[None]:
    """Inside, the given sharded parameters can be read (and with `write`, changed) as ordinary ones.

    Call it on all ranks. With `write=True` the values that rank 0 leaves behind are kept; otherwise, and when the
    block raises, changes are dropped (but frozen parameters below stage 3 are ordinary tensors, and keep them).
    Parameters that are not prepared are left alone. Scopes nest.
    """
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, Tensor):
        params = [cast(nn.Parameter, params)]
    units = units_of(params)
    with one_pass(units):
        for unit in units:
            unit.begin_unshard()
        for unit in units:
            unit.pin()
    try:
        with _saved_for_backward(units):
            yield
    except BaseException:
        write = False
        raise
    finally:
        with one_pass(units):
            for unit in units:
                unit.unpin(write)
