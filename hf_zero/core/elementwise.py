"""Finds out, by trying, whether an optimizer updates every element by itself, as stepping flat slices requires."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.core.twins import Snapshot, step_alone, twin_of


def check_elementwise(optimizer: torch.optim.Optimizer, *, in_parts: bool = False) -> None:
    """Step a twin of `optimizer` on a matrix and on the same numbers in flat shards; raise ValueError on a difference.

    Muon, Adafactor, LAMB and the like look at whole matrices and cannot step a slice of one; LBFGS needs a closure.
    With `in_parts` the shards are stepped one by one, too, each by a twin of its own (see `twins.Snapshot`).
    """
    generator = torch.Generator().manual_seed(0)
    values, *grads = (torch.randn(8, 4, generator=generator) for _ in range(3))
    flat_grads = [_pieces(grad) for grad in grads]
    try:
        whole = _values(_step_twin(optimizer, [values], [[grad] for grad in grads]))
        flat = _values(_step_twin(optimizer, _pieces(values), flat_grads))
        parts = _values(_step_twin(optimizer, _pieces(values), flat_grads, apart=True)) if in_parts else flat
    except Exception as error:
        raise ValueError(_refusal(optimizer, f"it fails on flat parameters: {error}")) from error
    if not torch.allclose(torch.cat(whole), torch.cat(flat), rtol=1e-5, atol=1e-7):
        raise ValueError(_refusal(optimizer, "its update of an element depends on the shape around it"))
    if not torch.equal(torch.cat(parts), torch.cat(flat)):
        raise ValueError(
            f"{type(optimizer).__name__} cannot be offloaded: it comes to other weights when its tensors are stepped "
            "one by one. Keep its state on the device (offload_optimizer_device none), or take another optimizer"
        )


def state_kinds(optimizer: torch.optim.Optimizer, options: Mapping[str, object]) -> set[str]:
    """The kinds of state ("exp_avg", ...) that `optimizer` keeps for every element of a group with these options."""
    twin = _step_twin(optimizer, [torch.zeros(2, 2)], [[torch.ones(2, 2)]], options)
    (state,) = twin.state.values() or ({},)
    return {kind for kind, value in state.items() if isinstance(value, Tensor) and value.shape == (2, 2)}


def has_two_modes(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether such optimizers train one set of weights and evaluate another, as schedule-free ones do."""
    return callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None))


def _pieces(matrix: Tensor) -> tuple[Tensor, ...]:
    return matrix.reshape(-1).split((20, 12))


def _refusal(optimizer: torch.optim.Optimizer, reason: str) -> str:
    return (
        f"{type(optimizer).__name__} cannot be sharded: {reason}. hf_zero steps flat slices of parameters, so it "
        "needs an elementwise optimizer such as AdamW, Adam, SGD, Adagrad, RMSprop, NAdam, RAdam or Lion"
    )


def _step_twin(
    optimizer: torch.optim.Optimizer,
    values: Iterable[Tensor],
    grads: list,
    options: Mapping[str, object] | None = None,
    *,
    apart: bool = False,
) -> torch.optim.Optimizer:
    """A twin of `optimizer` (same class and settings, no state before, no hooks) that has stepped small tensors.

    With `apart`, its own steps find no gradients, and each tensor is stepped by a twin. An optimizer with two modes
    is in evaluation mode afterwards.
    """
    params = [nn.Parameter(value.clone()) for value in values]
    twin: Any = twin_of(optimizer, optimizer.__dict__)
    twin.state = defaultdict(dict)
    settings = optimizer.param_groups[0] if optimizer.param_groups else {}
    twin.param_groups = [{**settings, **(options or {}), "params": params, "lr": 0.01}]
    has_modes = has_two_modes(type(optimizer))
    if has_modes:
        twin.train()
    for step_grads in grads:
        snapshot = Snapshot.take(twin) if apart else None
        if snapshot is not None:
            step_alone(twin)
        for param, grad in zip(params, step_grads, strict=True):
            param.grad = grad.clone()
            if snapshot is not None:
                snapshot.step(0, param)
                param.grad = None
        if snapshot is None:
            step_alone(twin)
    if has_modes:
        twin.eval()
    return twin


def _values(twin: torch.optim.Optimizer) -> list[Tensor]:
    return [param.detach().reshape(-1) for param in twin.param_groups[0]["params"]]
