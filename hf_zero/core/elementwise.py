"""Finds out, by trying, whether an optimizer steps flat slices as it steps matrices, or needs whole matrices."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hf_zero.core.twins import Snapshot, step_alone, twin_of


# A matrix of many blocks (of 128 to 2,048 elements), of which one part is less than what is quantised at all (4,096).
_MANY_BLOCKS = 64, 160


def needs_whole_matrices(
    optimizer: torch.optim.Optimizer, options: Mapping[str, object], *, in_parts: bool = False
) -> bool:
    """Whether groups with these options must be stepped in whole matrices; if not, slices of flat ones do.

    A twin steps a matrix, and the same numbers in flat shards: AdamW, SGD and Lion come to the same weights, Muon,
    Adafactor, Shampoo and LAMB, which look at whole matrices, do not. Nor do 8-bit optimizers, tried on a larger one:
    the blocks that they quantise together begin elsewhere in a slice, which Lion's states show, its weights hardly
    ever. With `in_parts` tensors are stepped one by one, each by a twin of its own (see `twins.Snapshot`). Raises
    ValueError for what can be done neither way.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{name} cannot be sharded: its step calls a closure, several times, to compute gradients anew, and "
            "hf_zero steps by gradients that are reduced once. Take one whose step needs no closure, such as AdamW"
        )
    values, grads = _numbers(8, 4)
    whole, error = _try(optimizer, options, [values], [[grad] for grad in grads])
    if whole is None:
        raise ValueError(f"{name} cannot be sharded: its step fails on a matrix of 8 x 4: {error}") from error
    is_elementwise = _steps_slices(optimizer, options, 8, 4) and _steps_slices(optimizer, options, *_MANY_BLOCKS)
    pieces = _pieces if is_elementwise else _halves
    tried = (optimizer, options, pieces(values), [pieces(grad) for grad in grads])
    together, error = _try(*tried)
    apart, error = (None, error) if together is None else _try(*tried, apart=True)
    if together is None or apart is None:
        raise ValueError(
            f"{name} cannot be sharded: its step fails where tensors have no gradient, as some ranks' have: {error}"
        ) from error
    if not _alike(_weights(together), _weights(apart)):
        raise ValueError(
            f"{name} cannot be sharded: its update of one tensor depends on the others, and each rank has some of "
            "them only. Take an optimizer that steps every tensor by itself, and clip by the engine's clip_grad_norm_"
        )
    if in_parts and not torch.equal(_weights(together), _weights(apart)):
        raise ValueError(
            f"{name} cannot be offloaded: it comes to other weights when its tensors are stepped one by one. Keep its "
            "state on the device (offload_optimizer_device none), or take another optimizer"
        )
    return not is_elementwise


def _steps_slices(optimizer: torch.optim.Optimizer, options: Mapping[str, object], rows: int, columns: int) -> bool:
    """Whether a matrix of this size and its flat shards come to the same weights and states."""
    values, grads = _numbers(rows, columns)
    whole, _ = _try(optimizer, options, [values], [[grad] for grad in grads])
    flat, _ = _try(optimizer, options, _pieces(values), [_pieces(grad) for grad in grads])
    if whole is None or flat is None or not _alike(_weights(whole), _weights(flat)):
        return False
    ours, theirs = _states(whole), _states(flat)
    return ours.keys() == theirs.keys() and all(_alike(ours[kind], theirs[kind]) for kind in ours)


def _numbers(rows: int, columns: int) -> tuple[Tensor, list[Tensor]]:
    """The values of a matrix, and two gradients."""
    generator = torch.Generator().manual_seed(0)
    values, *grads = (torch.randn(rows, columns, generator=generator) for _ in range(3))
    return values, grads


def state_kinds(optimizer: torch.optim.Optimizer, options: Mapping[str, object]) -> set[str]:
    """The kinds of state ("exp_avg", ...) that `optimizer` keeps for every element of a group with these options."""
    state = _state_of(optimizer, options, (4, 2))
    return {kind for kind, value in state.items() if isinstance(value, Tensor) and value.shape == (4, 2)}


def state_names(optimizer: torch.optim.Optimizer, options: Mapping[str, object], dims: int) -> set[str]:
    """All kinds of state, of any shape, that it keeps for a small tensor of so many dimensions."""
    return set(_state_of(optimizer, options, (4, 2, *(1 for _ in range(dims)))[:dims]))


def kept_for(
    optimizer: torch.optim.Optimizer, options: Mapping[str, object], shape: tuple[int, ...]
) -> list[Tensor] | None:
    """The tensors, of one dimension at least, that it keeps for a weight of this shape, on meta; None: it is unknown.

    A twin steps on meta, where a step ends at the first question for a value: states are made before. That none is
    missing is told by their number, which a small weight with values has, too.
    """
    small = tuple(min(size, 2 + side) for side, size in enumerate(shape))
    with torch.device("meta"):
        twin, (param,) = _twin_for(optimizer, options, [torch.zeros(shape)])
        param.grad = torch.zeros(shape)
        with contextlib.suppress(Exception):
            step_alone(twin)
        kept = _tensors_in(twin.state[param])
    expected, _ = _try(optimizer, options, [torch.zeros(small)], [[torch.ones(small)]])
    if expected is None or len(kept) < sum(len(_tensors_in(state)) for state in expected.state.values()):
        return None
    return kept


def _tensors_in(state: Mapping[str, object]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(dict(state)) if isinstance(leaf, Tensor) and leaf.dim()]


def _state_of(
    optimizer: torch.optim.Optimizer, options: Mapping[str, object], shape: tuple[int, ...]
) -> dict[str, object]:
    options = {**(optimizer.param_groups[0] if optimizer.param_groups else {}), **options}
    twin = _step_twin(optimizer, options, [torch.zeros(shape)], [[torch.ones(shape)]])
    (state,) = twin.state.values() or ({},)
    return state


def has_two_modes(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether such optimizers train one set of weights and evaluate another, as schedule-free ones do."""
    return callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None))


def _pieces(matrix: Tensor) -> tuple[Tensor, ...]:
    at = matrix.numel() * 5 // 8 + 1  # where no block begins
    return matrix.reshape(-1).tensor_split((at,))


def _halves(matrix: Tensor) -> tuple[Tensor, ...]:
    return matrix.split((5, 3))


def _try(
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, object],
    values: Iterable[Tensor],
    grads: Iterable[Sequence[Tensor]],
    *,
    apart: bool = False,
) -> tuple[torch.optim.Optimizer | None, Exception | None]:
    """A twin that has stepped tensors, or the error that it raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of shapes that are tried only
            with torch.compiler.set_stance("force_eager"):  # nothing is compiled for them, either
                twin = _step_twin(optimizer, options, values, grads, apart=apart)
    except Exception as error:
        return None, error
    return twin, None


def _weights(twin: torch.optim.Optimizer) -> Tensor:
    return _end_to_end(twin.param_groups[0]["params"])


def _states(twin: torch.optim.Optimizer) -> dict[str, Tensor]:
    """By kind, what it keeps for every element."""
    kept = defaultdict(list)
    for param in twin.param_groups[0]["params"]:
        for kind, value in twin.state[param].items():
            if isinstance(value, Tensor) and value.shape == param.shape:
                kept[kind].append(value)
    return {kind: _end_to_end(values) for kind, values in kept.items()}


def _end_to_end(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def _made_with(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], like: Tensor) -> dict[str, object]:
    """What an optimizer has noted for a parameter when it was made, before any step (APOLLO: a seed)."""
    if isinstance(optimizer, torch.optim.Adagrad):  # with torch 2.10 its step makes no state
        total = torch.full_like(like, options["initial_accumulator_value"])
        return {"step": torch.zeros((), device=like.device), "sum": total}
    first: dict[str, object] = next(iter(optimizer.state.values()), {})
    has_stepped = "step" in first or any(isinstance(value, Tensor) for value in first.values())
    return {} if has_stepped else dict(first)


def _twin_for(
    optimizer: torch.optim.Optimizer, options: Mapping[str, object], values: Iterable[Tensor]
) -> tuple[Any, list[nn.Parameter]]:
    """A twin of `optimizer` that has not stepped, and its parameters."""
    params = [nn.Parameter(value.clone()) for value in values]
    twin: Any = twin_of(optimizer, optimizer.__dict__)
    twin.state = defaultdict(dict, {param: _made_with(optimizer, options, param.detach()) for param in params})
    lr = options.get("lr")  # torchao's optimizers insist on a tensor
    rate = torch.full_like(lr, 0.01) if isinstance(lr, Tensor) else 0.01
    twin.param_groups = [{**options, "params": params, "lr": rate}]
    return twin, params


def _step_twin(
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, object],
    values: Iterable[Tensor],
    grads: Iterable[Sequence[Tensor]],
    *,
    apart: bool = False,
) -> torch.optim.Optimizer:
    """A twin of `optimizer` (same class and settings, no state before, no hooks) that has stepped small tensors.

    With `apart`, its own steps find no gradients, and each tensor is stepped by a twin. An optimizer with two modes
    is in evaluation mode afterwards.
    """
    twin, params = _twin_for(optimizer, options, values)
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
