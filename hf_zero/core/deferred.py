"""Parameters without values: a flat buffer reads its slice from a file, say; any other use reads them whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from hf_zero.core import guard


class Source(Protocol):
    """Where the values of a parameter can be read."""

    def read(self, start: int, target: Tensor) -> None:
        """Fill a flat tensor with elements `start` and following."""

    @property
    def ingredients(self) -> Sequence[Tensor]:
        """What the values are made from, where it may differ between ranks."""


_NEEDS_NO_VALUES = guard.METADATA | {guard.DESCRIPTORS.requires_grad.__set__}
_sources = WeakTensorKeyDictionary()


class DeferredParameter(nn.Parameter):
    """A parameter with a shape and without values; it becomes an ordinary one at the first use of its values."""

    _zero_base = nn.Parameter  # no packed one (see guard)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _NEEDS_NO_VALUES:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, DeferredParameter):
                    materialize(leaf)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = deferred(self.shape, self.dtype, _sources[self], self.requires_grad)
        return memo[id(self)]

    def __repr__(self) -> str:  # type: ignore[override]  # the argument that torch adds is for containers
        with torch._C.DisableTorchFunctionSubclass():
            return f"Parameter(no values yet, shape={tuple(self.shape)}, dtype={self.dtype})"


def deferred(shape: torch.Size, dtype: torch.dtype, source: Source, requires_grad: bool) -> DeferredParameter:
    """A parameter that takes next to no memory, whose values `source` has."""
    param = nn.Parameter(torch.empty((), dtype=dtype).expand(shape), requires_grad=requires_grad)
    defer(param, source)
    return cast(DeferredParameter, param)


def defer(param: nn.Parameter, source: Source) -> None:
    """Make `param` one whose values only `source` has; its memory is free."""
    _sources[param] = source
    # First the class: a recorder that is open would take the placeholder of an ordinary parameter for its values.
    param.__class__ = DeferredParameter
    guard.point_to(param, torch.empty((), dtype=param.dtype).expand(param.shape))


def source_of(param: nn.Parameter) -> Source | None:
    """Where the values of a parameter can be read, None where it has them."""
    return _sources[param] if isinstance(param, DeferredParameter) else None


def take(param: nn.Parameter) -> Source | None:
    """The source of a parameter's values, None where it has them. Whoever takes it gives the parameter values."""
    if not isinstance(param, DeferredParameter):
        return None
    cast(nn.Parameter, param).__class__ = nn.Parameter
    return _sources.pop(param)


def materialize(param: nn.Parameter) -> None:
    """Give the parameter its values."""
    source = take(param)
    assert source is not None, "it has its values"
    with _disable_current_modes():  # a mode that watches operations does not see what comes from a file
        values = torch.empty(param.shape, dtype=param.dtype)
        source.read(0, values.view(-1))
    guard.point_to(param, values)
