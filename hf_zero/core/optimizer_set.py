"""The optimizers of one engine, and the masters that they step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from hf_zero.core.binding import Binding, WholeStates
from hf_zero.core.direct_file import whole_pages
from hf_zero.core.elementwise import state_kinds
from hf_zero.core.flat_buffer import FlatBuffer
from hf_zero.core.gradients import GradientBuffer
from hf_zero.core.homes import Homes
from hf_zero.core.master import MasterShard
from hf_zero.core.optimizer import OptimizerOwner, adopt, named_state, take_named_state
from hf_zero.core.placement import Place
from hf_zero.core.rebuild import gather_states, rebuild_masters
from hf_zero.core.unit import Unit, one_pass


class OptimizerSet:
    """Keeps masters laid out as the groups of the attached optimizers ask for.

    Attributes:
        bindings: an entry for every attached optimizer, in order.
        masters: the flat weights of all shards, which have the gradients.
        read_early: what owed the last steps and is not in memory. As much of it as buffers hold is read again before
            the next steps, in backward: disks have less to do then.
    """

    def __init__(self, units: list[Unit], homes: Homes) -> None:
        self._units, self._homes = units, homes  # the engine's own list, in which units are replaced
        self.bindings: list[Binding] = []
        self.masters: list[Tensor] = [shard.weight for buffer in self._buffers for shard in buffer.resting.shards]
        self.read_early: list[MasterShard] = []

    @property
    def _buffers(self) -> Iterator[FlatBuffer]:
        return (buffer for unit in self._units for buffer in unit.buffers)

    def attach(self, optimizer: torch.optim.Optimizer, owner: OptimizerOwner) -> None:
        """Have `optimizer` step the masters. Raises ValueError as `optimizer.adopt` does."""
        binding, states = adopt(optimizer, owner, self._home(), self._bound(), self._homes.optimizer)
        self.bindings.append(binding)
        self.rebuild(states)
        for buffer in itertools.islice(self._buffers, 1):
            self._homes.choose_step_place(buffer.mesh.everyone)

    def begin_fetch(self) -> None:
        """Have what steps need that are owed read ahead, in the order of units: so it will be needed."""
        if not self._homes.optimizer.keeps_memory:
            self.read_early = [shard for buffer in self._buffers for shard in buffer.resting.masters if shard.owes]
            for shard in self.read_early:
                shard.begin_fetch()

    def settle(self) -> None:
        """Make all steps that are owed."""
        for buffer in self._buffers:
            buffer.resting.settle()

    def _bytes_to_come(self) -> int:
        """What states that the optimizers have not made yet will take on disk, in their first steps."""
        count = 0
        for binding in self.bindings:
            states = binding.optimizer.state
            for group, shards in zip(binding.optimizer.param_groups, binding.shards, strict=False):
                kinds = state_kinds(binding.optimizer, {key: v for key, v in group.items() if key != "params"})
                for shard in (shard for shard in shards if shard.place is Place.DISK):
                    missing = len(kinds - states.get(shard.weight, {}).keys())
                    count += missing * whole_pages(shard.numel * shard.weight.itemsize)
        return count

    def adopt_group(self, optimizer: torch.optim.Optimizer) -> None:
        """A group was added to an attached optimizer. Raises ValueError where it holds what it must not."""
        in_parts = self._homes.optimizer.place is not Place.DEVICE
        self.rebuild(self._binding_of(optimizer).take_new_groups(self._home(), self._bound(), in_parts=in_parts))

    def state_of(self, optimizer: torch.optim.Optimizer) -> dict:
        """Its whole state by parameter name; a collective."""
        with one_pass(self._units):
            return named_state(self._binding_of(optimizer), self._buffers, self.bindings)

    def load_state_of(self, optimizer: torch.optim.Optimizer, state_dict: dict) -> None:
        """Take what `state_of` gave. Raises ValueError where it does not fit."""
        self.rebuild(take_named_state(self._binding_of(optimizer), self._buffers, state_dict))

    def held_by(self, optimizer: torch.optim.Optimizer) -> set[nn.Parameter]:
        """The parameters of the model that an optimizer steps."""
        return {param for params in self._binding_of(optimizer).groups for param in params}

    def give_to_owners(self, optimizer: torch.optim.Optimizer, gradients: Iterable[GradientBuffer]) -> None:
        """Have the whole matrices that an optimizer steps get their gradients; a collective."""
        for gradient in gradients:
            if gradient.buffer.owned is not None:
                gradient.give_to_owners(self.held_by(optimizer))

    def shards_of(self, optimizer: torch.optim.Optimizer) -> list[list[MasterShard]]:
        """The masters that an optimizer steps, by group."""
        return self._binding_of(optimizer).shards

    def gather(self, units: Iterable[Unit]) -> WholeStates:
        """The whole masters and states of some units, on every rank; a collective."""
        return gather_states([buffer for unit in units for buffer in unit.buffers], self.bindings)

    def rebuild(self, whole: WholeStates) -> None:
        """Lay the masters out anew, with the values in `whole` where it names a parameter.

        Raises ZeroRuntimeError on all ranks where a disk has no room for the states that the optimizers will make.
        """
        self.read_early = []
        with one_pass(self._units):
            self.masters = rebuild_masters(self.bindings, self._buffers, whole, self._homes)
        masters = {
            buffer.params[index]: matrix.weight
            for buffer in self._buffers
            if buffer.owned is not None
            for index, matrix in buffer.owned.matrices.items()
        }
        for binding in self.bindings:
            binding.carry_overrides(masters)
        for buffer in itertools.islice(self._buffers, 1):
            self._homes.reserve(buffer.mesh.everyone, masters=self._bytes_to_come())

    def _binding_of(self, optimizer: torch.optim.Optimizer) -> Binding:
        return next(binding for binding in self.bindings if binding.optimizer is optimizer)

    def _home(self) -> dict[nn.Parameter, FlatBuffer]:
        return {param: buffer for buffer in self._buffers for param in buffer.params}

    def _bound(self) -> set[nn.Parameter]:
        return {param for binding in self.bindings for params in binding.groups for param in params}
