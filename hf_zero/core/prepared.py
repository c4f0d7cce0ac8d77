"""The class of a prepared model: what calling, moving, copying and pickling it means."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, TypeAlias

from torch import Tensor, nn

from hf_zero.core import guard
from hf_zero.core.build import WHOLE_MODEL_COMPILED
from hf_zero.core.hooks import drop_placeholders
from hf_zero.core.precision import Precision, widen


class ModelEngine(Protocol):
    """What a prepared model asks of its engine."""

    @property
    def precision(self) -> Precision:
        """What the model computes in."""

    def zero_grad(self) -> None:
        """Forget all gradients."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside, gradients of several micro-batches accumulate."""

    def convert(self, function: Callable[[Tensor], Tensor]) -> None:
        """Do to the tensors of the model what `function` does to one (`model.to`, `model.half`)."""

    def copy_parameters(self, memo: dict) -> None:
        """Put an ordinary copy of each parameter into the memo of `copy.deepcopy`; a collective."""


if TYPE_CHECKING:  # what the mixins are put before
    _Module: TypeAlias = nn.Module

    class _Generating:
        def generate(self, *args: Any, **kwargs: Any) -> Any: ...
else:
    _Module = _Generating = object


class ZeroModuleMixin(_Module):
    """Added to the class of a prepared model, whose name and type checks stay as they were."""

    _zero_engine: ModelEngine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        precision = self._zero_engine.precision
        if precision.dtype is None:
            return super().__call__(*args, **kwargs)
        with precision.autocast():
            output = super().__call__(*args, **kwargs)
        return widen(output)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._zero_engine.zero_grad()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """As DistributedDataParallel's: gradients of all micro-batches but the last accumulate inside."""
        return self._zero_engine.no_sync()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(WHOLE_MODEL_COMPILED)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self._zero_engine.convert(fn)
        return self

    def __copy__(self) -> nn.Module:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict) -> nn.Module:
        """An ordinary model with whole parameters of its own; call it on all ranks where weights are sharded."""
        self._zero_engine.copy_parameters(memo)
        with _as_ordinary(self):
            twin = copy.deepcopy(self, memo)
        drop_placeholders(twin)
        return twin

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        # Protocol 1 names the class to make; later ones insist that it is the class of this object.
        return copy.deepcopy(self).__reduce_ex__(1)


class ZeroGenerationMixin(_Generating):
    """Added to the class of a prepared model that generates."""

    _zero_engine: ModelEngine

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        # It also calls parts of the model, an encoder, outside of forward.
        with self._zero_engine.precision.autocast():
            return super().generate(*args, **kwargs)


def attach(model: nn.Module, engine: ModelEngine, mixins: Sequence[type] = ()) -> None:
    """Make `model` a prepared one, whose class also has `mixins` (what layers above override of its methods)."""
    base = type(model)
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    if hasattr(base, "generate"):
        mixins = [*mixins, ZeroGenerationMixin]
    model.__dict__["_zero_engine"] = engine
    model.__class__ = type(base.__name__, (*mixins, ZeroModuleMixin, base), names)


def detach(model: nn.Module) -> None:
    """Make `model` an ordinary one again."""
    del model.__dict__["_zero_engine"]
    model.__class__ = type(model).__bases__[-1]


@contextlib.contextmanager
def _as_ordinary(model: nn.Module) -> Iterator[None]:
    prepared, engine = type(model), model.__dict__["_zero_engine"]
    detach(model)
    try:
        yield
    finally:
        model.__dict__["_zero_engine"] = engine
        model.__class__ = prepared


def convert_others(model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Do to module buffers, and to parameters that were added since the model was prepared, what `function` does."""
    for module in model.modules():
        module._buffers.update({k: function(value) for k, value in module._buffers.items() if value is not None})
        for param in module.parameters(recurse=False):
            if not guard.is_prepared(param):
                param.data = function(param.data)
