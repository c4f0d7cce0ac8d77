"""Parameters whose values still lie in files: a flat buffer reads its slice, any other use reads them whole."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from hf_zero import access


class Source(Protocol):
    """Where the values of a parameter can be read."""

    def read(self, start: int, target: Tensor) -> None:
        """Fill a flat tensor with elements `start` and following."""


_NEEDS_NO_VALUES = access.METADATA | {Tensor.requires_grad.__set__}
_sources = WeakTensorKeyDictionary()


class DeferredParameter(nn.Parameter):
    """A parameter with a shape and without values; it becomes an ordinary one at the first use of its values."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in _NEEDS_NO_VALUES:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, DeferredParameter):
                    _materialize(leaf)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = deferred(self.shape, self.dtype, _sources[self], self.requires_grad)
        return memo[id(self)]

    def __repr__(self) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return f"Parameter(still in a file, shape={tuple(self.shape)}, dtype={self.dtype})"


def deferred(shape: torch.Size, dtype: torch.dtype, source: Source, requires_grad: bool) -> DeferredParameter:
    """A parameter that takes next to no memory, whose values `source` has."""
    shell = torch.empty((), dtype=dtype).expand(shape)
    param = nn.Parameter(shell, requires_grad=requires_grad)
    param.__class__ = DeferredParameter
    _sources[param] = source
    return param


def take(param: nn.Parameter) -> Source | None:
    """The source of a parameter's values, None where it has them. Whoever takes it gives the parameter values."""
    if not isinstance(param, DeferredParameter):
        return None
    param.__class__ = nn.Parameter
    return _sources.pop(param)


def _materialize(param: DeferredParameter) -> None:
    source = take(param)
    values = torch.empty(param.shape, dtype=param.dtype)
    source.read(0, values.view(-1))
    access.point_to(param, values)
