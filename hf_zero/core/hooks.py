"""Hooks that stay behind when a module is copied or pickled."""

from __future__ import annotations

import functools

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


def drop_placeholders(model: nn.Module) -> None:
    """Take every `NoHook` out of `model`."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, NoHook)]:
                for kind in (
                    hooks,
                    module._forward_pre_hooks_with_kwargs,
                    module._forward_hooks_with_kwargs,
                    module._forward_hooks_always_called,
                ):
                    kind.pop(key, None)
