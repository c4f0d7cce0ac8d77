"""What optimizers keep for whole matrices, of any shapes and in any nest, as tensors of a file and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from hf_zero.errors import ZeroCheckpointError


_TENSOR, _TUPLE, _DICT = "tensor", "tuple", "dict"


def describe(state: object, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """A state as JSON, and its tensors by the names that stand there: `exp_avg`, `Q[0]`, ...

    Raises ZeroCheckpointError for what is neither a tensor nor a number, string, dict, list or tuple.
    """
    tensors: dict[str, Tensor] = {}

    def walk(value: object, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value
            return {_TENSOR: path}
        if isinstance(value, dict):
            return {
                _DICT: {str(key): walk(each, f"{path}[{key}]" if path else str(key)) for key, each in value.items()}
            }
        if isinstance(value, (list, tuple)):
            items = [walk(each, f"{path}[{number}]") for number, each in enumerate(value)]
            return {_TUPLE: items} if isinstance(value, tuple) else items
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise ZeroCheckpointError(f"the optimizer state '{path}' of '{name}' is a {type(value).__name__}: not saved")

    return walk(state, ""), tensors


def of_kinds(kinds: Iterable[str]) -> Any:
    """What `describe` answers for a dict of tensors by kind."""
    return {_DICT: {kind: {_TENSOR: kind} for kind in kinds}}


def rebuild(described: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """The state that `describe` has described, with the tensors that `tensor_of(name)` gives."""
    if isinstance(described, list):
        return [rebuild(each, tensor_of) for each in described]
    if not isinstance(described, dict):
        return described
    ((kind, value),) = described.items()
    if kind == _TENSOR:
        return tensor_of(value)
    if kind == _TUPLE:
        return tuple(rebuild(each, tensor_of) for each in value)
    return {key: rebuild(each, tensor_of) for key, each in value.items()}
