"""Tensors that are made of other tensors, as torchao's quantised ones: what of them has memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor, nn

from hf_zero.comm import dtensors


def is_wrapper(tensor: Tensor) -> bool:
    """Whether it is made of other tensors, and no DTensor."""
    return hasattr(type(tensor), "__tensor_flatten__") and not dtensors.is_dtensor(tensor)


def inner_tensors(wrapper: Tensor, path: str = "") -> Iterator[tuple[str, Any, Tensor]]:
    """(path, the wrapper in whose attribute it is, tensor) of every tensor with memory that `wrapper` is made of.

    The last name of the path is that of the attribute.
    """
    for key in cast(Any, wrapper).__tensor_flatten__()[0]:
        tensor = getattr(wrapper, key)
        if is_wrapper(tensor):
            yield from inner_tensors(tensor, f"{path}{key}.")
        else:
            yield path + key, wrapper, tensor


def is_made_of_plain_tensors(tensor: Tensor) -> bool:
    """Whether it is such a tensor, and all that it is made of are ordinary ones or parameters."""
    parts = [inner for _, _, inner in inner_tensors(tensor)] if is_wrapper(tensor) else []
    return bool(parts) and all(type(inner) is Tensor or isinstance(inner, nn.Parameter) for inner in parts)
