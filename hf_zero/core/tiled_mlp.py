"""Tiles of MLPs: what looks at one token at a time is computed for some tokens after others, and again in backward.

[Note: tiles of MLPs] An MLP is known by what it is made of: its forward takes one tensor, and in it are linear layers,
activations and norms. Each class is also tried once, as its forward could still mix tokens. A tile keeps its inputs
for backward, as a checkpoint does. Weights are gathered, and gradients reduced, once for all tiles: the engine's hooks
are on the layer around them.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_zero.core.hooks import Overlay, cover, uncover
from hf_zero.errors import ZeroConfigError, first_few


logger = logging.getLogger(__name__)

_OFF = "leave tile_mlp (zero_tile_mlp) out"

# Rounding of 16-bit numbers is below this share of the largest one; what depends on other tokens is far above it.
_ROUNDING = 0.05
_by_itself: dict[type, bool] = {}  # classes of MLPs that were tried, and whether they look at one token at a time


class _Tiled(Overlay):
    """Over the class of an MLP."""

    _tokens: int

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        whole = super().forward
        (hidden,) = (*args, *kwargs.values())
        if hidden.dim() < 2 or hidden[..., 0].numel() <= self._tokens:
            return whole(hidden)
        rows = hidden.reshape(*[1] * (hidden.dim() - 2), -1, hidden.shape[-1])
        if not _looks_at_one(self, whole, rows[..., :3, :].detach()):
            return whole(hidden)
        tiles = rows.split(self._tokens, dim=-2)
        if torch.is_grad_enabled():
            outputs = [checkpoint(whole, tile, use_reentrant=False) for tile in tiles]
        else:
            outputs = [whole(tile) for tile in tiles]
        return torch.cat(outputs, dim=-2).view(*hidden.shape[:-1], -1)


def _looks_at_one(module: _Tiled, forward: Callable, tokens: Tensor) -> bool:
    """Whether a few tokens together give what each gives by itself."""
    kind = module._covered
    if kind not in _by_itself and not tokens.is_meta and not torch.compiler.is_compiling():
        with torch.no_grad(), _without_dropout(module):
            together = forward(tokens)
            difference = together - torch.cat([forward(token) for token in tokens.split(1, dim=-2)], dim=-2)
        _by_itself[kind] = bool(difference.abs().max() <= _ROUNDING * together.abs().max())
        if not _by_itself[kind]:
            logger.warning("hf_zero: %s looks at several tokens, so tile_mlp leaves it alone", kind.__name__)
    return _by_itself.get(kind, True)


@contextlib.contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


class TiledMLPs:
    """MLPs (see `mlps_in`), which take `tokens` at a time until they are removed."""

    def __init__(self, modules: list[nn.Module], tokens: int) -> None:
        self._modules = modules
        for module in modules:
            cover(module, _Tiled, _tokens=tokens)

    def remove(self) -> None:
        """Each takes all tokens together again."""
        for module in self._modules:
            uncover(module)


def mlps_in(model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The MLPs in `layers` of a model that can take their tokens in tiles. Raises ZeroConfigError without any."""
    names = {module: name for name, module in model.named_modules()}
    found = {layer: list(_mlps(layer)) for layer in layers}
    without = [names[layer] for layer, modules in found.items() if not modules]
    modules = list(dict.fromkeys(module for each in found.values() for module in each))
    if not modules:
        raise ZeroConfigError(
            f"tile_mlp: no layer of {type(model).__name__} has an MLP of linear layers that looks at one token at a "
            f"time (experts are not computed in tiles); {_OFF}"
        )
    if without:
        logger.info("hf_zero: tile_mlp leaves layers alone that have experts, or no MLP: %s", first_few(without))
    return modules


def _mlps(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost MLPs in a layer; not those of experts, which get what tokens a router gives them."""
    if _is_mlp(module):
        yield module
    else:
        for name, child in module.named_children():
            if name != "experts":
                yield from _mlps(child)


def _is_mlp(module: nn.Module) -> bool:
    parts = [part for part in module.modules() if next(part.parameters(recurse=False), None) is not None]
    if sum(map(_is_linear, parts)) < 2 or any(isinstance(part, nn.ModuleList) for part in module.modules()):
        return False
    return len(inspect.signature(module.forward).parameters) == 1 and all(map(_is_tokenwise, parts))


def _is_linear(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"  # transformers' linear layer of GPT-2


def _is_tokenwise(part: nn.Module) -> bool:
    return (
        _is_linear(part)
        or isinstance(part, nn.LayerNorm)
        or type(part).__name__.endswith("RMSNorm")
        or all(param.numel() == 1 for param in part.parameters(recurse=False))  # activations that learn
    )
