"""Twins of an optimizer: its own `step` code, run on other tensors or at another time, of which nobody else knows."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


_FUSED_ON_HOST = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def twin_of(optimizer: torch.optim.Optimizer, attributes: Mapping[str, object]) -> torch.optim.Optimizer:
    """An optimizer of the same class with these attributes, without hooks."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(attributes)
    for name in ("step", "_zero_owner"):  # a scheduler's counter, the engine that `optimizer` belongs to
        twin.__dict__.pop(name, None)
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return twin


def step_alone(twin: torch.optim.Optimizer) -> None:
    """Step a twin without the hooks that are called for every optimizer's step."""
    steps = (vars(kind).get("step") for kind in type(twin).__mro__)
    step: Any = next(step for step in steps if step is not None and not hasattr(step, "calls_closure"))
    # torch wraps a class's `step` once, in what calls hooks.
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(twin)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """An optimizer as it was when it was told to step: what happens to it afterwards has no effect on the step."""

    optimizer: torch.optim.Optimizer
    attributes: dict[str, object]
    options: list[dict[str, object]]  # of every group

    @classmethod
    def take(cls, optimizer: torch.optim.Optimizer) -> Snapshot:
        options = [_by_value(group) for group in optimizer.param_groups]
        return cls(optimizer=optimizer, attributes=dict(optimizer.__dict__), options=options)

    def step(self, group: int, weight: Tensor, *, on_host: bool = False) -> None:
        """Step one tensor of a group, by its `grad`; its state is made and kept in `optimizer.state`.

        `on_host`: the optimizer was made for tensors on a device, and this one is the host's.
        """
        twin = twin_of(self.optimizer, self.attributes)
        options = _by_value(self.options[group])
        if on_host:
            options = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in options.items()}
            if isinstance(twin, _FUSED_ON_HOST) and options.get("fused") is None and options.get("foreach") is None:
                options["fused"] = True  # what torch takes by itself there is several times slower
        if on_host or options.get("fused") or options.get("capturable"):  # these want step counts beside the weight
            state = self.optimizer.state.get(weight, {})
            state.update({k: v.to(weight.device) for k, v in state.items() if isinstance(v, Tensor) and not v.dim()})
        twin.param_groups = [{**options, "params": [weight]}]
        step_alone(twin)


def _by_value(options: Mapping[str, object]) -> dict[str, object]:
    return {key: _copy(value) for key, value in options.items() if key != "params"}


def _copy(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value
