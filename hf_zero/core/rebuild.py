"""Lays the masters of all buffers out as the groups of optimizers ask for, and gathers them whole."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from hf_zero.comm import dtensors
from hf_zero.core.binding import Binding, WholeStates
from hf_zero.core.flat_buffer import FlatBuffer
from hf_zero.core.homes import Homes
from hf_zero.core.layout import Span
from hf_zero.core.master import MASTER, MasterShard, SliceShard, in_one_storage, map_tensors
from hf_zero.core.owned import OwnedMasters
from hf_zero.core.ownership import Ownership, Piece, balance


_States = Mapping[Tensor, dict]  # of optimizers, by weight


def rebuild_masters(
    bindings: list[Binding], buffers: Iterable[FlatBuffer], whole: WholeStates, homes: Homes
) -> list[Tensor]:
    """Lay the masters out anew; a collective.

    In every buffer, there is one flat tensor for each run of parameters of one optimizer group (where ranks have
    weights, in a range as long as this rank's weight says), or, where the group is stepped in whole matrices, one in
    the shape of each parameter that this rank owns. Weights and state come from the present shards, or from `whole`
    where it names the parameter. Trainable parameters that no optimizer holds have
    masters that nothing steps. Returns the weights of all shards, which have the gradients.
    """
    labels = {
        param: (b, g)
        for b, binding in enumerate(bindings)
        for g, params in enumerate(binding.groups)
        for param in params
    }
    owned = {(b, g) for b, binding in enumerate(bindings) for g in range(len(binding.groups)) if binding.owned[g]}
    old_states = _states_of(bindings)
    states: dict[Tensor, dict[str, object]] = {}
    scalars = _scalar_kinds({param: state for param, state in whole.items() if labels.get(param) not in owned})
    members: dict[tuple[int, int] | None, list[MasterShard]] = defaultdict(list)
    buffers = [buffer for buffer in buffers if buffer.trainable]
    owners = _owners(buffers, {param for param, label in labels.items() if label in owned})
    assignment = homes.masters(sum(buffer.end - buffer.begin for buffer in buffers))
    for buffer in buffers:
        own = [labels.get(param) for param in buffer.params]
        topology = buffer.mesh.topology
        matrices = {index: owners[param] for index, param in enumerate(buffer.params) if param in owners}
        runs = {i: label for i, label in enumerate(own) if topology.weights and label and label not in owned}
        ownership = Ownership.arrange(buffer.layout, topology, buffer.at_rest, matrices, runs)
        here, kept = _moving(buffer, ownership, old_states, whole)
        if here:
            buffer.mesh.fence(buffer.tag)  # new masters may have the memory of the old ones
        shards: list[MasterShard | SliceShard] = []
        away = {*owned, *runs.values()}
        for label, shard in buffer.resting.new_shards(own, away, buffer.master_dtype, assignment):
            state: dict[str, object] = {}
            with shard.open(write=True):
                _fill_from_shards(buffer.resting.shards, shard, state, old_states)
                _fill_from_whole(buffer, shard, state, here, scalars)
            shards.append(shard)
            if isinstance(shard, MasterShard):
                shard.rest(state)
                states[shard.weight] = state
                members[label].append(shard)
        masters = _owned_masters(buffer, ownership, here, kept, scalars, states)
        for number, master in masters.items():
            members[own[ownership.pieces[number].params[0]]].append(master)
            states[master.weight] = states.get(master.weight, old_states.get(master.weight, {}))
        slices = [shard for shard in shards if isinstance(shard, SliceShard)]
        buffer.owned = None
        if ownership.pieces:
            buffer.owned = OwnedMasters(ownership, masters, slices, buffer.mesh, buffer.tag, buffer.device)
        beside = ([], []) if buffer.owned is None else (buffer.owned.runs, buffer.owned.matrices.values())
        buffer.resting.replace(shards, *map(list, beside))
        buffer.share_masters()
    for buffer in buffers:  # a rank that owns nothing of a group has an empty tensor for it
        for label in {labels.get(param) for param in buffer.params} - members.keys():
            members[label].append(buffer.resting.empty_master(buffer.master_dtype))
    for b, binding in enumerate(bindings):
        binding.shards = [members[b, g] for g in range(len(binding.groups))]
        binding.optimizer.state = defaultdict(dict)
        for group, stepped in zip(binding.optimizer.param_groups, binding.shards, strict=False):
            group["params"] = [shard.weight for shard in stepped]
            binding.optimizer.state.update({w: states[w] for w in group["params"] if states.get(w)})
    return [shard.weight for buffer in buffers for shard in buffer.resting.shards]


def _states_of(bindings: list[Binding]) -> _States:
    return {weight: state for binding in bindings for weight, state in binding.optimizer.state.items()}


def _owners(buffers: list[FlatBuffer], owned: set[nn.Parameter]) -> dict[nn.Parameter, int]:
    """The owner of each parameter that is stepped whole, balanced over all of them."""
    chosen = [param for buffer in buffers for param in buffer.params if param in owned]
    if not chosen:
        return {}
    topology = buffers[0].mesh.topology
    numbers = balance([param.numel() for param in chosen], topology.shards, topology.weights)
    return dict(zip(chosen, numbers, strict=True))


def _moving(
    buffer: FlatBuffer, ownership: Ownership, states: _States, whole: WholeStates
) -> tuple[WholeStates, dict[Piece, MasterShard | None]]:
    """What new masters of a buffer are made of, and the pieces that stay as they are; a collective.

    That is `whole`, and the present values of parameters of which something gets another owner. Of pieces that stay,
    this rank's own come with their masters.
    """
    here = {param: dict(whole[param]) for param in buffer.params if param in whole}
    before: dict[Piece, MasterShard | None] = {}
    if buffer.owned is not None:
        before = {piece: buffer.owned.masters.get(i) for i, piece in enumerate(buffer.owned.ownership.pieces)}
    after = set(ownership.pieces)
    stays = {piece for piece in before.keys() & after if not any(buffer.params[i] in here for i in piece.params)}
    moving = {buffer.params[i] for piece in (before.keys() | after) - stays for i in piece.params}
    moving = {param for param in moving if MASTER not in here.get(param, {})}
    if moving:
        present = _gather(buffer, states)
        for param in moving:
            here[param] = {**present[param], **here.get(param, {})}
    return here, {piece: before[piece] for piece in stays}


def _owned_masters(
    buffer: FlatBuffer,
    ownership: Ownership,
    here: WholeStates,
    kept: Mapping[Piece, MasterShard | None],
    scalars: set[str],
    states: dict[Tensor, dict],
) -> dict[int, MasterShard]:
    """By piece, the masters that this rank owns; the states of new ones are put into `states`."""
    masters = {}
    for number in ownership.mine:
        piece = ownership.pieces[number]
        stays = kept.get(piece)
        if stays is not None:
            masters[number] = stays
            continue
        state: dict[str, object] = {}
        if piece.is_matrix:
            (index,) = piece.params
            master = buffer.resting.new_matrix(index, buffer.master_dtype)
            values = here[buffer.params[index]]
            master.values.copy_(values[MASTER])
            of_optimizer = {kind: value for kind, value in values.items() if kind != MASTER}
            state = map_tensors(of_optimizer, functools.partial(_copied, master.weight.device))
        else:
            master = buffer.resting.new_run(piece.start, piece.stop, buffer.master_dtype)
            of_runs = {buffer.params[i]: here[buffer.params[i]] for i in piece.params}
            of_masters = _scalar_kinds(of_runs) - {MASTER}
            _fill_from_whole(buffer, master, state, here, scalars | of_masters)
        states[master.weight] = state
        master.rest(state)
        masters[number] = master
    return masters


def _copied(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.detach().to(device, copy=True)


def _scalar_kinds(whole: WholeStates) -> set[str]:
    """The kinds of state that are one value per parameter: other shapes than the parameter's, at least once."""
    return {"step"} | {
        kind
        for param, state in whole.items()
        for kind, value in state.items()
        if not isinstance(value, Tensor) or value.shape != dtensors.local(param).shape
    }


def _fill_from_shards(
    olds: list[MasterShard | SliceShard], shard: MasterShard | SliceShard, state: dict, old_states: _States
) -> None:
    for old in olds:
        low, high = max(shard.start, old.start), min(shard.stop, old.stop)
        if low >= high:
            continue
        target = slice(low - shard.start, high - shard.start)
        source = slice(low - old.start, high - old.start)
        if old.grad is not None:
            shard.set_grad(target.start, old.grad[source])
        with old.open():
            if not in_one_storage(shard.values, old.values):  # then they are there
                shard.values[target] = old.values[source]
            if isinstance(old, SliceShard) or isinstance(shard, SliceShard):
                continue
            old_state = old_states.get(old.weight, {})
            flats = old.flats_in(old_state)
            for kind, value in flats.items():
                _flat(shard, state, kind, value.dtype)[target] = value[source]
        state.update({kind: _copy(value) for kind, value in old_state.items() if kind not in flats})


def _fill_from_whole(
    buffer: FlatBuffer, shard: MasterShard | SliceShard, state: dict, whole: WholeStates, scalars: set[str]
) -> None:
    spans = list(shard.spans())
    if not spans:  # padding only, which belongs to the last parameter's group
        spans = [Span(index=len(buffer.params) - 1, start=0, offset=0, numel=0)]
    for span in spans:
        target = slice(span.offset, span.offset + span.numel)
        for kind, value in whole.get(buffer.params[span.index], {}).items():
            if kind == MASTER:
                shard.values[target] = value.detach().reshape(-1)[span.start : span.start + span.numel]
            elif isinstance(shard, SliceShard):
                continue  # the owner's
            elif kind in scalars:
                state[kind] = _copy(value)
            else:
                part = value.detach().reshape(-1)[span.start : span.start + span.numel]
                _flat(shard, state, kind, value.dtype)[target] = part


def _copy(value: object) -> object:
    """A step count of its own for every shard: optimizers count in place."""
    return value.clone() if isinstance(value, Tensor) else value


def _flat(shard: MasterShard, state: dict, kind: str, dtype: torch.dtype) -> Tensor:
    if kind not in state:
        state[kind] = torch.zeros(shard.numel, dtype=dtype, device=shard.weight.device)
    return state[kind]


def gather_states(buffers: Iterable[FlatBuffer], bindings: list[Binding]) -> WholeStates:
    """The whole master and state tensors of trainable buffers, on every rank; a collective."""
    states, whole = _states_of(bindings), {}
    for buffer in buffers:
        if buffer.trainable:
            whole.update(_gather(buffer, states))
    return whole


def _gather(buffer: FlatBuffer, states: _States) -> WholeStates:
    matrices = {} if buffer.owned is None else buffer.owned.gather(states)
    whole: WholeStates = {param: matrices.get(index, {}) for index, param in enumerate(buffer.params)}
    flats = [param for index, param in enumerate(buffer.params) if index not in matrices]
    if not flats:
        return whole
    shards = buffer.resting.flats
    mine: dict[str, object] = {MASTER: buffer.master_dtype}
    for shard in shards:
        state = states.get(shard.weight, {})
        mine.update({**state, **{kind: flat.dtype for kind, flat in shard.flats_in(state).items()}})
    kinds: dict[str, object] = {}
    for theirs in buffer.comm.all_gather_object(mine):  # a rank may own padding only
        kinds.update(theirs)
    for kind, dtype in sorted(kinds.items()):
        if isinstance(dtype, torch.dtype):
            for index, value in enumerate(buffer.gather_flat(_values_of(kind, shards, states), dtype)):
                if index not in matrices:
                    whole[buffer.params[index]][kind] = value
        else:
            for param in flats:
                whole[param][kind] = dtype
    return whole


def _values_of(kind: str, shards: list[MasterShard], states: _States) -> Iterator[tuple[MasterShard, Tensor | None]]:
    for shard in shards:
        with shard.open(kinds=(kind,)):
            yield shard, shard.values if kind == MASTER else states.get(shard.weight, {}).get(kind)
