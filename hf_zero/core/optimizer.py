"""Puts masters in the place of an optimizer's parameters; the optimizer object stays the user's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn

from hf_zero.comm import dtensors
from hf_zero.core.binding import Binding, WholeStates
from hf_zero.core.elementwise import has_two_modes
from hf_zero.core.flat_buffer import FlatBuffer
from hf_zero.core.homes import Home
from hf_zero.core.master import MASTER, map_tensors
from hf_zero.core.placement import Place
from hf_zero.core.rebuild import gather_states


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
    if has_two_modes(type(optimizer)) and not rests.is_near:
        raise ValueError(
            f"{type(optimizer).__name__} rewrites all weights between training and evaluation, which is not supported "
            f"where its state rests on the {rests.place.value}: set offload_optimizer_device to none"
        )
    binding = Binding(optimizer)
    states = binding.take_new_groups(home, bound, in_parts=rests.place is not Place.DEVICE)
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
            state[names[param]] = map_tensors(values, functools.partial(_joined_on_cpu, param))
    groups = []
    for params, group in zip(binding.groups, binding.optimizer.param_groups, strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**options, "params": [names[param] for param in params]})
    return {"state": state, "param_groups": groups}


def _joined_on_cpu(param: nn.Parameter, value: Tensor) -> Tensor:
    return dtensors.joined(param, value).cpu()


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
    return {
        params_of[name]: map_tensors(dict(values), functools.partial(dtensors.cut, params_of[name]))
        for name, values in state_dict["state"].items()
    }
