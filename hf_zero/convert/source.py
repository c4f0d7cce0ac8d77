"""What every foreign checkpoint is read as: whole tensors by name, in parts that stay in their files until written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor


# What wrappers put before or into the names of parameters.
_WRAPPERS = frozenset({"module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
# Options that say how a step is computed and not what it computes, and bookkeeping of DeepSpeed and accelerate.
_NOT_OPTIONS = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "step", "name", "bias_correction"}
)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in foreign files; `parts()` yields (first element, flat values) in any order, one at a time."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[tuple[int, Tensor]]]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def whole(tensor: Tensor) -> Stored:
    """A tensor that its file holds in one piece."""
    return Stored(
        dtype=tensor.dtype, shape=tuple(tensor.shape), parts=lambda: iter([(0, tensor.detach().reshape(-1))])
    )


@dataclass(frozen=True, kw_only=True)
class Group:
    """An optimizer group: its options, the scalar states of its parameters (step counts), and their names."""

    options: dict[str, object]
    scalars: dict[str, object]
    names: list[str]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A foreign checkpoint.

    `weights` has a tensor for every name of the state dict, the fp32 master where there is one; `dtypes` says in which
    dtype the model computes with them. `states` has the optimizer's tensors, by trained parameter and kind. `ties` has
    second names of parameters that have two.
    """

    what: str
    folder: Path
    weights: dict[str, Stored]
    dtypes: dict[str, torch.dtype]
    states: dict[str, dict[str, Stored]]
    groups: list[Group]
    ties: dict[str, str] = field(default_factory=dict)
    loss_scale: dict[str, float] | None = None
    schedule: dict[str, object] | None = None  # of a learning-rate schedule that Trainer has not stored itself
    unread: set[str] = field(default_factory=set)  # files and folders of `folder` that the result does not need


def options_of(group: Mapping[str, object]) -> dict[str, object]:
    """The options of an optimizer group that carry over to another implementation of the same optimizer."""
    options = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in options.items()}


def described_scalar(value: object) -> object:
    """A scalar state as our files hold it; a step count is a tensor, as torch's optimizers keep it."""
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
    return {"tensor": tensor.item(), "dtype": str(tensor.dtype).removeprefix("torch.")}


def unwrapped(name: str, known: Iterable[str]) -> str:
    """The name without what wrappers have added, where the model does not know it as it stands."""
    if name in known:
        return name
    bare = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    return bare if bare in known else name
