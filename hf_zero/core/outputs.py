"""Finds the tensors in what a module returns, also inside dataclasses and other objects."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)


def leaves(value: object) -> list[object]:
    """As `tree_leaves` in some order: what layers mostly take and return is looked at here, which is faster."""
    found: list[object] = []
    waiting = [value]
    for item in waiting:
        kind = type(item)
        if kind is tuple or kind is list:
            waiting += cast(Iterable, item)
        elif kind is dict:
            waiting += cast(dict, item).values()
        elif kind is Tensor or kind in _PLAIN:
            found.append(item)
        else:
            found += tree_leaves(item)
    return found


def find_tensors(value: object) -> tuple[list[Tensor], list[object]]:
    """The tensors in `value`, and the objects of classes that are neither containers nor dataclasses.

    These objects are searched, by their attributes, only where nothing else requires a gradient: a cache of keys and
    values holds what a model has computed on its way, which nobody differentiates from outside.
    """
    tensors: list[Tensor] = []
    objects: list[object] = []
    seen: set[int] = set()
    waiting, asked, differentiable = [value], 0, False
    while waiting:
        for leaf in leaves(waiting.pop()):
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
                differentiable = differentiable or leaf.requires_grad
            elif not isinstance(leaf, _PLAIN) and id(leaf) not in seen:
                seen.add(id(leaf))
                if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
                    waiting.append([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])
                else:
                    objects.append(leaf)
        if not waiting and not differentiable:
            waiting += [vars(item) for item in objects[asked:] if _has_parts(item)]
            asked = len(objects)
    return tensors, objects


def _has_parts(item: object) -> bool:
    return hasattr(item, "__dict__") and not callable(item) and not isinstance(item, types.ModuleType)
