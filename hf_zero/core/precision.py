"""Which precision a 16-bit run computes in: its parameters, its operations, what it returns.

[Note: 16-bit runs] Gathered parameters are 16-bit casts of fp32 masters, and the model's forward runs under
`torch.autocast`, as with the stock Trainer. Matrices meet 16-bit inputs whatever else is in the model (fp32 buffers,
constants, inputs), and losses are computed in fp32. As weights are 16-bit already, autocast casts activations only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hf_zero.core import guard


_HALVES = (torch.float16, torch.bfloat16)


class Precision:
    """The precision of one model; with `dtype` None every tensor keeps its own."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        # Kernels of normalisation with running statistics take these and the weights in one dtype, fp32.
        normalised = (module for module in model.modules() if isinstance(module, _NormBase))
        self._keeping = {param for module in normalised for param in module._parameters.values()}
        self._keeping.update(param for param in model.parameters() if guard.is_packed(param))

    def of(self, param: nn.Parameter) -> torch.dtype:
        """The dtype that a parameter has where it is computed with."""
        if self.dtype is None or not param.is_floating_point() or param in self._keeping:
            return param.dtype
        return self.dtype

    def autocast(self) -> AbstractContextManager:
        """What forward runs in. The meta device, on which runs are planned, has no autocast."""
        if self.dtype is None or not torch.amp.is_autocast_available(self.device.type):
            return contextlib.nullcontext()
        # Nothing is cached: a cast of a weight would outlive its release.
        return torch.autocast(self.device.type, self.dtype, cache_enabled=False)

    def layers_to_hook(self, model: nn.Module) -> Iterable[nn.Module]:
        """The layers whose inputs `meet_weight` is to cast."""
        if self.dtype is None or self.device.type != "cpu":
            return ()
        return (module for module in model.modules() if isinstance(module, (nn.LayerNorm, nn.GroupNorm)))


def meet_weight(module: nn.Module, args: tuple) -> tuple:
    """Cast what enters a norm to the dtype of its weight.

    Autocast does so on an accelerator; for the CPU it leaves norms out, whose kernels refuse fp32 inputs with 16-bit
    weights.
    """
    weight: Tensor | None = getattr(module, "weight", None)
    if weight is None:
        return args
    dtype = weight.dtype
    return tuple(arg.to(dtype) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args)


def widen(value: Any) -> Any:
    """`value` with the 16-bit tensors in its containers as fp32, as accelerate returns them from under autocast."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALVES else value
    if isinstance(value, Mapping):
        return type(value)({key: widen(item) for key, item in value.items()})  # type: ignore[call-arg]  # as dict takes it
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(widen, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(widen, value))
    return value
