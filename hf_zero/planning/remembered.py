"""Remembers what operations make of tensors without values, so that torch's rules run once per kind of call.

A model has the same operations in every layer, and a plan trains it many times. Torch finds out the shape of each
result anew, for most operations in Python; looking it up is several times faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


_META = torch.device("meta")
_NUMBERS = (bool, int, float, complex)
_CONSTANTS = (str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
_MOST = 1 << 16  # calls that are remembered

# (shape, stride, dtype) of a new tensor; a number says which argument the result is; None where there is none.
_Result = tuple[torch.Size, tuple[int, ...], torch.dtype] | int | None


def is_composed(types: Iterable[type]) -> bool:
    """Whether an operation has tensors made of others (DTensors), whose classes make operations on these of it.

    What runs are these, which a mode sees if it leaves the first to the classes (NotImplemented).
    """
    return any(one.__torch_dispatch__ is not Tensor.__torch_dispatch__ for one in types) and not is_trial(types)


def is_trial(types: Iterable[type]) -> bool:
    """Whether an operation finds out the shape of a DTensor's result, on stand-ins of whole tensors: nothing runs."""
    return FakeTensor in types


class _Unknown(Exception):
    """A call of which nothing can be remembered."""


class Remembered:
    """Runs operations; those whose results follow from shapes, strides, dtypes and constants, once each."""

    def __init__(self) -> None:
        self._results: dict[tuple, tuple[bool, list[_Result]] | None] = {}

    def __call__(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func.is_view:  # which storage the result has is the point of it
            return func(*args, **kwargs)
        try:
            key = _key(func, args, kwargs)
        except _Unknown:
            return func(*args, **kwargs)
        if key in self._results:
            found = self._results[key]
            return func(*args, **kwargs) if found is None else _made_anew(found, args)
        out = func(*args, **kwargs)
        if len(self._results) < _MOST:
            is_same = key == _key(func, args, kwargs)  # some operations change the shape of what they are given
            self._results[key] = _results_of(func, out, args, kwargs) if is_same else None
        return out


def _key(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """What the results of a call may depend on. Raises _Unknown for all but tensors on meta and constants."""
    found: list[object] = [func]
    _describe(args, found)
    if kwargs:
        found += kwargs
        _describe(kwargs.values(), found)
    return tuple(found)


def _describe(values: Iterable[object], found: list[object]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_meta or value.layout is not torch.strided or value.dtype.is_complex:
                raise _Unknown
            found += (value.dtype, value.shape, value.stride())
        elif isinstance(value, _CONSTANTS):
            found.append(value)
        elif isinstance(value, _NUMBERS):
            found += (type(value), value)  # 1, 1.0 and True are equal, and make other dtypes
        elif isinstance(value, (tuple, list)):
            found.append(len(value))
            _describe(value, found)
        else:
            raise _Unknown


def _results_of(func: Any, out: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[bool, list[_Result]] | None:
    """What to answer the next time: whether it is one tensor and no tuple, and each result. None: run it again."""
    outs = out if isinstance(out, (tuple, list)) else [] if out is None else [out]
    if type(out) is list or (func._schema.is_mutable and len(outs) > 1):
        return None
    given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, tuple(kwargs.values())))}
    results: list[_Result] = []
    for tensor in outs:
        if tensor is None:
            results.append(None)
            continue
        if not isinstance(tensor, Tensor) or tensor.device != _META or tensor.dtype.is_complex:
            return None
        own = [number for number, arg in enumerate(args) if arg is tensor]
        storage = tensor.untyped_storage()
        if own:
            results.append(own[0])
        elif storage._cdata in given or storage.nbytes() != _extent(tensor) or tensor.storage_offset():
            return None  # a view, or one of something larger
        else:
            given.add(storage._cdata)
            results.append((tensor.shape, tensor.stride(), tensor.dtype))
    return not isinstance(out, tuple), results


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


def _extent(tensor: Tensor) -> int:
    """The bytes from the first to the last element."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _made_anew(found: tuple[bool, list[_Result]], args: tuple) -> Any:
    alone, results = found
    if alone:
        return _make(results[0], args) if results else None
    return tuple(_make(result, args) for result in results)


def _make(result: _Result, args: tuple) -> Tensor | None:
    if result is None:
        return None
    if isinstance(result, int):
        return args[result]
    shape, stride, dtype = result
    return torch.empty_strided(shape, stride, dtype=dtype, device=_META)
