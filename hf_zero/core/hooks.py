"""Hooks, and classes put over those of modules, that stay behind when a module is copied or pickled."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn


class Hook(functools.partial):
    """A hook that belongs to an engine: copies of its module are ordinary modules."""

    def __deepcopy__(self, memo: dict) -> NoHook:
        return NoHook()

    def __reduce__(self) -> tuple:
        return NoHook, ()


class NoHook:
    """What a copied module has in the place of a hook."""

    def __call__(self, *_args: object, **_kwargs: object) -> None:
        """Nothing happens."""


def in_backward() -> bool:
    """Whether autograd is running: forward hooks then belong to a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Overlay(nn.Module):
    """What an engine has a module do in its own way: a class that is put over the module's own.

    The module stays the same object, whose class has its old name; copies of it are ordinary modules.
    """

    _covered: Any  # its own class


def cover(module: nn.Module, kind: type[Overlay], **attributes: Any) -> None:
    """Put `kind` over a module's class, with these attributes of the class, until it is uncovered."""
    classes: Any = kind, type(module)
    module.__class__ = _overlaid(*classes, *attributes.items())


@functools.cache  # modules of one class have one class again: the compiler would look at each of many anew
def _overlaid(kind: Any, own: Any, *attributes: tuple[str, Any]) -> type[Overlay]:
    @functools.wraps(own.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:  # who asks for its signature means that of the module
        return kind.forward(self, *args, **kwargs)

    names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(own.__name__, (kind, own), {**names, "_covered": own, "forward": forward, **dict(attributes)})


def uncover(module: nn.Module) -> None:
    """Give a module its own class back."""
    if isinstance(module, Overlay):
        module.__class__ = module._covered


def drop_placeholders(model: nn.Module) -> None:
    """Make what was copied of an engine's model an ordinary one: every `NoHook` and every `Overlay` goes."""
    for module in model.modules():
        uncover(module)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, NoHook)]:
                for kind in (
                    hooks,
                    module._forward_pre_hooks_with_kwargs,
                    module._forward_hooks_with_kwargs,
                    module._forward_hooks_always_called,
                ):
                    kind.pop(key, None)
