"""Puts flat master groups in the place of an optimizer's parameters; the optimizer object stays the user's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_zero.elementwise import check_elementwise
from hf_zero.flat_buffer import FlatBuffer
from hf_zero.layout import Span
from hf_zero.masters import MasterGroup, Piece


# Whole tensors by parameter and kind ("weight", "exp_avg", ...), for parameters whose masters are not in a piece yet.
WholeStates = dict[nn.Parameter, dict[str, object]]
_WEIGHT = "weight"


class ZeroOptimizerMixin:
    """Added to the class of an adopted optimizer: it steps masters, and the engine holds gradients it does not see."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._zero_owner.drop_local_gradients()

    def state_dict(self) -> dict:
        """As torch's, with whole tensors on the CPU, keyed by parameter name; a collective, the same on every rank."""
        return self._zero_owner.optimizer_state(self)

    def load_state_dict(self, state_dict: dict) -> None:
        """Take what `state_dict` gave, at any world size and stage. Raises ValueError where it does not fit."""
        self._zero_owner.load_optimizer_state(self, state_dict)

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        if "_zero_owner" in self.__dict__:  # not while the optimizer builds itself
            self._zero_owner.adopt_group(self)


@dataclass(eq=False)
class Binding:
    """An adopted optimizer and the model's parameters that each of its groups stands for."""

    optimizer: torch.optim.Optimizer
    groups: list[list[nn.Parameter]] = field(default_factory=list)

    def take_new_groups(self, home: dict[nn.Parameter, FlatBuffer], bound: set[nn.Parameter]) -> WholeStates:
        """Note the parameters of groups that still hold the model's own, and return the state they had.

        Raises ValueError for a tensor that is not the model's, or that another optimizer or group holds.
        """
        optimizer = self.optimizer
        for i, group in enumerate(optimizer.param_groups[len(self.groups) :], start=len(self.groups)):
            for j, param in enumerate(group["params"]):
                if param not in home:
                    raise ValueError(
                        f"{type(optimizer).__name__} group {i} holds a tensor (number {j}, shape "
                        f"{tuple(param.shape)}) that is not a parameter of the prepared model. Create the optimizer "
                        "from model.parameters() of the model that you prepare, after any change to its modules "
                        "(LoRA, resized embeddings)"
                    )
                if param in bound:
                    raise ValueError(f"parameter '{home[param].name_of(param)}' is in two optimizers or groups")
            self.groups.append(list(group["params"]))
        taken = [param for params in self.groups for param in params if param in optimizer.state]
        return {param: dict(optimizer.state.pop(param)) for param in taken}


def adopt(
    optimizer: torch.optim.Optimizer, owner: object, home: dict[nn.Parameter, FlatBuffer], bound: set[nn.Parameter]
) -> tuple[Binding, WholeStates]:
    """Make `optimizer` one that steps masters; `repack` gives them to it. Raises ValueError where it cannot be one."""
    check_elementwise(optimizer)
    binding = Binding(optimizer)
    states = binding.take_new_groups(home, bound)
    base = type(optimizer)
    optimizer.__class__ = type(base.__name__, (ZeroOptimizerMixin, base), {"__module__": base.__module__})
    optimizer._zero_owner = owner
    return binding, states


def named_state(binding: Binding, buffers: Iterable[FlatBuffer], bindings: list[Binding]) -> dict:
    """The state of one optimizer by parameter name; a collective."""
    buffers = list(buffers)
    names = {param: name for buffer in buffers for name, param in zip(buffer.names, buffer.params, strict=True)}
    bound = {param for params in binding.groups for param in params}
    state = {}
    for param, values in gather_states(buffers, bindings).items():
        values.pop(_WEIGHT)
        if param in bound and values:
            state[names[param]] = {kind: v.cpu() if isinstance(v, Tensor) else v for kind, v in values.items()}
    groups = []
    for params, group in zip(binding.groups, binding.optimizer.param_groups, strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**options, "params": [names[param] for param in params]})
    return {"state": state, "param_groups": groups}


def take_named_state(binding: Binding, buffers: Iterable[FlatBuffer], state_dict: dict) -> WholeStates:
    """Take over the group options of a `named_state`, and return its tensors by parameter, for `repack`.

    Raises ValueError for other groups or parameters than the optimizer's.
    """
    params_of = {name: param for buffer in buffers for name, param in zip(buffer.names, buffer.params, strict=True)}
    names_of = {param: name for name, param in params_of.items()}
    optimizer, saved = binding.optimizer, state_dict["param_groups"]
    ours = [[names_of[param] for param in params] for params in binding.groups]
    if [list(group["params"]) for group in saved] != ours:
        raise ValueError(
            f"this state of {type(optimizer).__name__} is of other groups or parameters: it names "
            f"{[len(group['params']) for group in saved]} parameters per group, the optimizer has "
            f"{[len(names) for names in ours]}. States of hf_zero are keyed by parameter name"
        )
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})
    optimizer.state.clear()
    return {params_of[name]: dict(values) for name, values in state_dict["state"].items()}


def repack(bindings: list[Binding], buffers: Iterable[FlatBuffer], whole: WholeStates) -> list[MasterGroup]:
    """Lay the masters out anew: one flat tensor per optimizer group and dtype, [unit][slice].

    Weights and state come from the present pieces, or from `whole` where it names the parameter. Trainable parameters
    that no optimizer holds share a group of their own, which nothing steps. Returns all groups.
    """
    buffers = [buffer for buffer in buffers if buffer.trainable]
    labels = {
        param: (b, g)
        for b, binding in enumerate(bindings)
        for g, params in enumerate(binding.groups)
        for param in params
    }
    plans, numels = _plan(buffers, labels)
    device = buffers[0].full.device if buffers else torch.device("cpu")
    groups = {key: MasterGroup(numel, key[1], device) for key, numel in numels.items()}
    states: dict[MasterGroup, dict[str, object]] = {group: {} for group in groups.values()}
    old_states = {weight: state for binding in bindings for weight, state in binding.optimizer.state.items()}
    scalars = _scalar_kinds(whole)
    used = dict.fromkeys(groups, 0)
    for buffer, runs in plans:
        pieces = []
        for key, start, stop in runs:
            pieces.append(Piece(start, stop, groups[key], used[key]))
            used[key] += stop - start
        for piece in pieces:
            _fill_from_pieces(buffer, piece, states[piece.group], old_states)
            _fill_from_whole(buffer, piece, states[piece.group], whole, scalars)
        buffer.pieces = pieces
    for b, binding in enumerate(bindings):
        binding.optimizer.state = defaultdict(dict)
        for g, group in enumerate(binding.optimizer.param_groups[: len(binding.groups)]):
            members = [master for (label, _), master in groups.items() if label == (b, g)]
            group["params"] = [master.weight for master in members]
            binding.optimizer.state.update({m.weight: states[m] for m in members if states[m]})
    return list(groups.values())


def _plan(buffers: list[FlatBuffer], labels: dict) -> tuple[list, dict]:
    """Per buffer the (key, start, stop) runs of what this rank owns, and the elements of every key."""
    numels: dict[tuple, int] = {}
    plans = []
    for buffer in buffers:
        keys = [(labels.get(param), buffer.master_dtype) for param in buffer.params]
        for key in keys:
            numels.setdefault(key, 0)  # a rank that owns nothing of a group has an empty tensor for it
        runs = buffer.layout.runs(buffer.begin, buffer.end, keys)
        for key, start, stop in runs:
            numels[key] += stop - start
        plans.append((buffer, runs))
    return plans, numels


def _scalar_kinds(whole: WholeStates) -> set[str]:
    """The kinds of state that are one value per parameter: other shapes than the parameter's, at least once."""
    return {"step"} | {
        kind
        for param, state in whole.items()
        for kind, value in state.items()
        if not isinstance(value, Tensor) or value.shape != param.shape
    }


def _fill_from_pieces(buffer: FlatBuffer, piece: Piece, state: dict, old_states: dict) -> None:
    for old in buffer.pieces:
        low, high = max(piece.start, old.start), min(piece.stop, old.stop)
        if low >= high:
            continue
        old_weight = old.group.weight
        target = slice(piece.offset + low - piece.start, piece.offset + high - piece.start)
        source = slice(old.offset + low - old.start, old.offset + high - old.start)
        piece.group.weight.detach()[target] = old_weight.detach()[source]
        for kind, value in old_states.get(old_weight, {}).items():
            if isinstance(value, Tensor) and value.shape == old_weight.shape and value.dim() == 1:
                _flat(piece.group, state, kind, value.dtype)[target] = value[source]
            else:
                state[kind] = value


def _fill_from_whole(buffer: FlatBuffer, piece: Piece, state: dict, whole: WholeStates, scalars: set[str]) -> None:
    begin = buffer.begin + piece.start
    spans = list(buffer.layout.spans(begin, buffer.begin + piece.stop))
    if not spans:  # padding only, which belongs to the last parameter's group
        spans = [Span(index=len(buffer.params) - 1, start=0, offset=0, numel=0)]
    for span in spans:
        target = slice(piece.offset + span.offset, piece.offset + span.offset + span.numel)
        for kind, value in whole.get(buffer.params[span.index], {}).items():
            if kind in scalars:
                state[kind] = value
                continue
            part = value.detach().reshape(-1)[span.start : span.start + span.numel]
            if kind == _WEIGHT:
                piece.group.weight.detach()[target] = part
            else:
                _flat(piece.group, state, kind, value.dtype)[target] = part


def _flat(group: MasterGroup, state: dict, kind: str, dtype: torch.dtype) -> Tensor:
    if kind not in state:
        state[kind] = torch.zeros_like(group.weight, dtype=dtype, requires_grad=False)
    return state[kind]


def gather_states(buffers: Iterable[FlatBuffer], bindings: list[Binding]) -> WholeStates:
    """The whole master and state tensors of trainable buffers, on every rank; a collective."""
    old_states = {weight: state for binding in bindings for weight, state in binding.optimizer.state.items()}
    whole: WholeStates = {}
    for buffer in buffers:
        if not buffer.trainable:
            continue
        mine: dict[str, object] = {_WEIGHT: buffer.master_dtype}
        for piece in buffer.pieces:
            weight = piece.group.weight
            for kind, value in old_states.get(weight, {}).items():
                is_flat = isinstance(value, Tensor) and value.shape == weight.shape and value.dim() == 1
                mine[kind] = value.dtype if is_flat else value
        kinds: dict[str, object] = {}
        for theirs in buffer.comm.all_gather_object(mine):  # a rank may own padding only
            kinds.update(theirs)
        for param in buffer.params:
            whole[param] = {}
        for kind, dtype in sorted(kinds.items()):
            if isinstance(dtype, torch.dtype):
                values = [_piece_of(piece, kind, old_states) for piece in buffer.pieces]
                for param, value in zip(buffer.params, buffer.gather_flat(values, dtype), strict=True):
                    whole[param][kind] = value
            else:
                for param in buffer.params:
                    whole[param][kind] = dtype
    return whole


def _piece_of(piece: Piece, kind: str, states: dict) -> Tensor | None:
    if kind == _WEIGHT:
        return piece.weight
    flat = states.get(piece.group.weight, {}).get(kind)
    return None if flat is None else flat[piece.offset : piece.offset + piece.stop - piece.start]
