"""What optimizers keep for the weights that they step: tensors like each, or, of whole ones, what a trial finds."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_zero.core.elementwise import kept_for, needs_whole_matrices, state_kinds
from hf_zero.planning.model import PlanError


# State tensors per weight, of the optimizers that Trainer knows by these names.
_FLAT = {
    "adamw": 2,
    "adam": 2,
    "nadam": 2,
    "radam": 2,
    "lion": 1,
    "rmsprop": 1,
    "adagrad": 1,
    "sgd_momentum": 1,
    "sgd": 0,
}

Sizes = Sequence[tuple[Sequence[int], torch.dtype]]  # of the tensors kept for one weight


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What an optimizer keeps.

    Attributes:
        flat: tensors like the weight, of each weight that is stepped in slices.
        whole: says what is kept for a matrix of a shape, where these are stepped whole (None: they are not).
        vectors: whether what is no matrix is stepped whole, too.
        fused: whether a device leaves its step out by itself where a gradient is inf or nan, as it does fused Adam's.
    """

    flat: int = 2
    whole: Callable[[tuple[int, ...]], Sizes] | None = None
    vectors: bool = False
    fused: bool = False


@functools.cache
def kept_by(name: str) -> Kept:
    """What the optimizer of this name keeps, or `package.module:Class`, made with its own defaults.

    Raises PlanError where there is none, and where it cannot be tried.
    """
    if name in _FLAT:
        return Kept(flat=_FLAT[name], fused=name in ("adamw", "adam"))
    make = _maker(name)
    matrix = _made(make, name, torch.zeros(8, 4))
    options = matrix.param_groups[0]
    try:
        if not needs_whole_matrices(matrix, options):
            return Kept(flat=len(state_kinds(matrix, options)))
    except ValueError as error:
        raise PlanError(f"--optimizer {name}: {error}") from error
    return Kept(whole=tried(matrix, options), vectors=_steps_vectors(make, name))


def tried(optimizer: torch.optim.Optimizer, options: Mapping[str, object]) -> Callable[[tuple[int, ...]], Sizes]:
    """Says, of any shape, what `optimizer` keeps for a weight in a group with these options.

    It raises PlanError where that cannot be found out without values.
    """

    @functools.cache
    def sizes(shape: tuple[int, ...]) -> Sizes:
        kept = kept_for(optimizer, options, shape)
        if kept is None:
            raise PlanError(
                f"what {type(optimizer).__name__} keeps for a weight of shape {shape} cannot be found out without "
                "values: plan with --optimizer adamw, which keeps as much as the weights in fp32 twice"
            )
        return [(tuple(tensor.shape), tensor.dtype) for tensor in kept]

    return sizes


def _maker(name: str) -> Callable[..., torch.optim.Optimizer]:
    if name == "muon":
        return torch.optim.Muon
    if name == "adafactor":
        from transformers import Adafactor

        return functools.partial(Adafactor, scale_parameter=False, relative_step=False)  # as Trainer makes it
    module, _, kind = name.partition(":")
    try:
        return getattr(importlib.import_module(module), kind)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(f"--optimizer {name}: {error}: give the class as package.module:Class") from error


def _made(make: Callable[..., torch.optim.Optimizer], name: str, weight: Tensor) -> torch.optim.Optimizer:
    try:
        return make([nn.Parameter(weight)], lr=1e-3)
    except Exception as error:  # whatever a constructor raises that wants other arguments
        raise PlanError(f"--optimizer {name} cannot be made of parameters and lr alone: {error}") from error


def _steps_vectors(make: Callable[..., torch.optim.Optimizer], name: str) -> bool:
    """Muon does not: AdamW steps vectors beside it."""
    try:
        optimizer = _made(make, name, torch.zeros(4))
        return kept_for(optimizer, optimizer.param_groups[0], (4,)) is not None
    except PlanError:
        return False
