"""Puts flat masters in the place of an optimizer's parameters; the optimizer object stays the user's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn

from hf_zero.core.elementwise import check_elementwise, has_two_modes
from hf_zero.core.flat_buffer import FlatBuffer
from hf_zero.core.homes import Home, Homes
from hf_zero.core.layout import Span
from hf_zero.core.master import MASTER, MasterShard
from hf_zero.core.placement import Place


# Whole tensors by parameter and kind (MASTER, "exp_avg", ...), for parameters whose masters are not in a shard yet.
WholeStates = dict[nn.Parameter, dict[str, Any]]


class OptimizerOwner(Protocol):
    """What an adopted optimizer asks of the engine whose masters it steps."""

    def before_zero_grad(self, set_to_none: bool) -> None:
        """The gradients of masters are about to go, or to become zero in place."""

    def drop_gradients_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget what its masters do not show."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict:
        """What `state_dict()` answers."""

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state_dict: dict) -> None:
        """What `load_state_dict()` does."""

    def adopt_group(self, optimizer: torch.optim.Optimizer) -> None:
        """A group was added."""

    def before_rewrite(self) -> None:
        """The optimizer is about to rewrite the masters outside of a step."""

    def after_load(self) -> None:
        """The masters have changed."""


if TYPE_CHECKING:  # what the mixins are put before
    _Optimizer: TypeAlias = torch.optim.Optimizer

    class _WithModes(torch.optim.Optimizer):
        def train(self) -> None: ...

        def eval(self) -> None: ...
else:
    _Optimizer = _WithModes = object


class ZeroOptimizerMixin(_Optimizer):
    """Added to the class of an adopted optimizer: it steps masters, and the engine holds gradients it does not see."""

    _zero_owner: OptimizerOwner

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """As torch's; a closure is called first, as the gradients that it makes belong to this step."""
        if closure is None:
            return super().step(*args, **kwargs)
        with torch.enable_grad():
            loss = closure()
        super().step(*args, **kwargs)
        return loss

    # torch would run the hooks of the step around this, too; a twin steps without any of it.
    step.hooked = step.calls_closure = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._zero_owner.before_zero_grad(set_to_none)
        super().zero_grad(set_to_none)
        self._zero_owner.drop_gradients_of(self)

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


class TwoModesMixin(ZeroOptimizerMixin, _WithModes):
    """For optimizers that rewrite the weights between training and evaluation: the model follows their masters."""

    def train(self) -> None:
        self._zero_switch("train", super().train)

    def eval(self) -> None:
        self._zero_switch("eval", super().eval)

    def _zero_switch(self, mode: str, switch: Callable[[], None]) -> None:
        if "_zero_owner" not in self.__dict__:  # a twin, which no engine knows
            switch()
        # Trainer asks for train mode before every micro-batch. Loading a state may change the mode that groups note.
        elif self.__dict__.get("_zero_mode") != (mode, self._zero_noted()):
            self._zero_owner.before_rewrite()
            switch()
            self._zero_owner.after_load()
            self._zero_mode = (mode, self._zero_noted())

    def _zero_noted(self) -> list[list[tuple[str, bool]]]:
        return [[(key, v) for key, v in group.items() if isinstance(v, bool)] for group in self.param_groups]


@dataclass(eq=False)
class Binding:
    """An adopted optimizer: by group, the model's parameters it stands for, and the masters it has in their place."""

    optimizer: torch.optim.Optimizer
    groups: list[list[nn.Parameter]] = field(default_factory=list)
    shards: list[list[MasterShard]] = field(default_factory=list)

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
    optimizer: torch.optim.Optimizer,
    owner: OptimizerOwner,
    home: dict[nn.Parameter, FlatBuffer],
    bound: set[nn.Parameter],
    rests: Home,
) -> tuple[Binding, WholeStates]:
    """Make `optimizer` one that steps masters, which `rebuild_masters` gives to it and which rest in the home `rests`.

    Raises ValueError where it cannot be one.
    """
    check_elementwise(optimizer, in_parts=rests.place is not Place.DEVICE)
    if has_two_modes(type(optimizer)) and not rests.is_near:
        raise ValueError(
            f"{type(optimizer).__name__} rewrites all weights between training and evaluation, which is not supported "
            f"where its state rests on the {rests.place.value}: set offload_optimizer_device to none"
        )
    binding = Binding(optimizer)
    states = binding.take_new_groups(home, bound)
    base = type(optimizer)
    mixin = TwoModesMixin if has_two_modes(base) else ZeroOptimizerMixin
    optimizer.__class__ = type(base.__name__, (mixin, base), {"__module__": base.__module__})
    cast(ZeroOptimizerMixin, optimizer)._zero_owner = owner
    return binding, states


def named_state(binding: Binding, buffers: Iterable[FlatBuffer], bindings: list[Binding]) -> dict:
    """The state of one optimizer by parameter name; a collective."""
    buffers = list(buffers)
    names = {param: name for buffer in buffers for name, param in zip(buffer.names, buffer.params, strict=True)}
    bound = {param for params in binding.groups for param in params}
    state = {}
    for param, values in gather_states(buffers, bindings).items():
        values.pop(MASTER)
        if param in bound and values:
            state[names[param]] = {kind: v.cpu() if isinstance(v, Tensor) else v for kind, v in values.items()}
    groups = []
    for params, group in zip(binding.groups, binding.optimizer.param_groups, strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**options, "params": [names[param] for param in params]})
    return {"state": state, "param_groups": groups}


def take_named_state(binding: Binding, buffers: Iterable[FlatBuffer], state_dict: dict) -> WholeStates:
    """Take over the group options of a `named_state`, and return its tensors by parameter, for `rebuild_masters`.

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


def rebuild_masters(
    bindings: list[Binding], buffers: Iterable[FlatBuffer], whole: WholeStates, homes: Homes
) -> list[Tensor]:
    """Lay the masters out anew: in every buffer, one flat tensor for each run of parameters of one optimizer group.

    Weights and state come from the present shards, or from `whole` where it names the parameter. Trainable parameters
    that no optimizer holds have masters that nothing steps. Returns all masters.
    """
    labels = {
        param: (b, g)
        for b, binding in enumerate(bindings)
        for g, params in enumerate(binding.groups)
        for param in params
    }
    old_states = {weight: state for binding in bindings for weight, state in binding.optimizer.state.items()}
    states: dict[Tensor, dict[str, object]] = {}
    scalars = _scalar_kinds(whole)
    members: dict[tuple[int, int] | None, list[MasterShard]] = defaultdict(list)
    buffers = [buffer for buffer in buffers if buffer.trainable]
    assignment = homes.masters(sum(buffer.end - buffer.begin for buffer in buffers))
    for buffer in buffers:
        own = [labels.get(param) for param in buffer.params]
        old, shards = buffer.master_shards, []
        for label, shard in buffer.resting.new_masters(own, buffer.master_dtype, assignment):
            state: dict[str, object] = {}
            _fill_from_shards(old, shard, state, old_states)
            _fill_from_whole(buffer, shard, state, whole, scalars)
            shard.rest(state)
            states[shard.weight] = state
            shards.append(shard)
            members[label].append(shard)
        buffer.resting.masters = shards
        for shard in old:
            shard.leave()
        for label in set(own) - members.keys():  # a rank that owns nothing of a group has an empty tensor for it
            members[label].append(buffer.resting.empty_master(buffer.master_dtype))
    for b, binding in enumerate(bindings):
        binding.shards = [members[b, g] for g in range(len(binding.groups))]
        binding.optimizer.state = defaultdict(dict)
        for group, shards in zip(binding.optimizer.param_groups, binding.shards, strict=False):
            group["params"] = [shard.weight for shard in shards]
            binding.optimizer.state.update({w: states[w] for w in group["params"] if states.get(w)})
    return [shard.weight for shards in members.values() for shard in shards]


def _scalar_kinds(whole: WholeStates) -> set[str]:
    """The kinds of state that are one value per parameter: other shapes than the parameter's, at least once."""
    return {"step"} | {
        kind
        for param, state in whole.items()
        for kind, value in state.items()
        if not isinstance(value, Tensor) or value.shape != param.shape
    }


def _fill_from_shards(olds: list[MasterShard], shard: MasterShard, state: dict, old_states: dict) -> None:
    for old in olds:
        low, high = max(shard.start, old.start), min(shard.stop, old.stop)
        if low >= high:
            continue
        target = slice(low - shard.start, high - shard.start)
        source = slice(low - old.start, high - old.start)
        if old.weight.grad is not None:
            shard.set_grad(target.start, old.weight.grad[source])
        old_state = old_states.get(old.weight, {})
        flats = old.flats_in(old_state)
        with old.open():
            shard.values[target] = old.values[source]
            for kind, value in flats.items():
                _flat(shard, state, kind, value.dtype)[target] = value[source]
        state.update({kind: _copy(value) for kind, value in old_state.items() if kind not in flats})


def _fill_from_whole(
    buffer: FlatBuffer, shard: MasterShard, state: dict, whole: WholeStates, scalars: set[str]
) -> None:
    spans = list(shard.spans())
    if not spans:  # padding only, which belongs to the last parameter's group
        spans = [Span(index=len(buffer.params) - 1, start=0, offset=0, numel=0)]
    for span in spans:
        target = slice(span.offset, span.offset + span.numel)
        for kind, value in whole.get(buffer.params[span.index], {}).items():
            if kind in scalars:
                state[kind] = _copy(value)
                continue
            part = value.detach().reshape(-1)[span.start : span.start + span.numel]
            if kind == MASTER:
                shard.values[target] = part
            else:
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
    old_states = {weight: state for binding in bindings for weight, state in binding.optimizer.state.items()}
    whole: WholeStates = {}
    for buffer in buffers:
        if not buffer.trainable:
            continue
        mine: dict[str, object] = {MASTER: buffer.master_dtype}
        for shard in buffer.master_shards:
            state = old_states.get(shard.weight, {})
            mine.update({**state, **{kind: flat.dtype for kind, flat in shard.flats_in(state).items()}})
        kinds: dict[str, object] = {}
        for theirs in buffer.comm.all_gather_object(mine):  # a rank may own padding only
            kinds.update(theirs)
        for param in buffer.params:
            whole[param] = {}
        for kind, dtype in sorted(kinds.items()):
            if isinstance(dtype, torch.dtype):
                values = _values_of(kind, buffer.master_shards, old_states)
                for param, value in zip(buffer.params, buffer.gather_flat(values, dtype), strict=True):
                    whole[param][kind] = value
            else:
                for param in buffer.params:
                    whole[param][kind] = dtype
    return whole


def _values_of(
    kind: str, shards: list[MasterShard], states: Mapping[Tensor, dict]
) -> Iterator[tuple[MasterShard, Tensor | None]]:
    for shard in shards:
        with shard.open(kinds=(kind,)):
            yield shard, shard.values if kind == MASTER else states.get(shard.weight, {}).get(kind)
