"""Nested values and tensors in one safetensors file, without pickle: what the user and the generators have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from hf_zero.errors import ZeroCheckpointError


# Values that JSON gives back as they were.
_PLAIN = (bool, int, float, str, type(None))
_KEY = "value"


def check(value: object, name: str) -> None:
    """Raise TypeError for what cannot be written; it says where in `value`, which is called `name`, that is."""
    _encode(value, {}, name)


def write(path: Path, value: object) -> None:
    """Write `value`: tensors, numbers, strings, None, and mappings, lists and tuples of such values."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    text = json.dumps(_encode(value, tensors, path.stem))
    # A copy of each, as the library refuses tensors that share memory.
    save_file(
        {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, path, {_KEY: text}
    )


def read(path: Path) -> object:
    """What `write` has written, with tensors on the CPU and every mapping as a dict.

    Raises ZeroCheckpointError where the file is no such file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            return _decode(json.loads(file.metadata()[_KEY]), tensors)
    except (OSError, SafetensorError, LookupError, ValueError, TypeError) as error:
        raise ZeroCheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _encode(value: object, tensors: dict[str, Tensor], name: str) -> object:
    """As JSON knows it; what it does not know is an object with one key, which says what it is."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        keys = [_encode(key, tensors, f"the key {key!r} of {name}") for key in value]
        items = [_encode(item, tensors, f"{name}[{key!r}]") for key, item in value.items()]
        return {"mapping": list(zip(keys, items, strict=True))}
    if isinstance(value, list | tuple):
        items = [_encode(item, tensors, f"{name}[{number}]") for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    raise TypeError(
        f"{name} is a {type(value).__name__}, which cannot be saved without pickle. Give numbers, strings, None, "
        "tensors, and dicts, lists and tuples of them: of an object its state_dict(), of an array a tensor"
    )


def _decode(value: object, tensors: Mapping[str, Tensor]) -> object:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in content)
    return {_decode(key, tensors): _decode(item, tensors) for key, item in content}
