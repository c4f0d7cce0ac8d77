"""Packed weights: what of their libraries' own bookkeeping has to follow the sharded codes, and what is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.core import guard
from hf_zero.core.wrappers import inner_tensors, is_wrapper


def read_parameters_only(model: nn.Module) -> None:
    """Have layers that keep the codes of their packed weight in other places too take them from the parameter."""
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None and guard.is_packed(param) and not is_wrapper(param):
                _read_parameter_only(module, param)


def _read_parameter_only(layer: Any, param: Any) -> None:
    # Since its first call a bitsandbytes layer of 8 bit holds codes and scales itself; it asks the parameter
    # where that has them.
    state: Any = getattr(layer, "state", None)
    if isinstance(getattr(state, "CB", None), Tensor):
        param.CB, param.SCB = state.CB, state.SCB
        state.CB = state.SCB = None
    guard.make_followers(param)
    # Those of 4 bit rearrange the codes, in place of the parameter's, when they are evaluated on some CPUs.
    if getattr(layer, "support_avx512bf16_for_cpu", False):
        layer.support_avx512bf16_for_cpu = False


def take_apart(name: str, param: nn.Parameter, device: torch.device) -> dict[str, nn.Parameter]:
    """By name what is sharded of a parameter: itself, or the bytes of all that it is made of.

    Parameters take the place of the latter's tensors (see [Note: tensors of tensors]). Raises ValueError where it is
    not on `device`.
    """
    if not is_wrapper(param):
        return {name: param}
    if torch.empty(0, device=param.device).device != torch.empty(0, device=device).device:  # 'cpu:0' is 'cpu'
        raise ValueError(
            f"'{name}' is a {type(param).__name__} on {param.device}, and {device} trains: its library moves such "
            f"tensors, so call model.to('{device}') before the model is prepared"
        )
    parts: dict[str, nn.Parameter] = {}
    for path, holder, tensor in list(inner_tensors(param)):
        dense = tensor.detach()
        if dense.numel() != 1 + sum((size - 1) * step for size, step in zip(dense.shape, dense.stride(), strict=True)):
            dense = dense.contiguous()
        in_memory = dense.as_strided((dense.numel(),), (1,))
        parts[f"{name}.{path}"] = part = nn.Parameter(in_memory.view(torch.uint8), requires_grad=False)
        follower = nn.Parameter(dense, requires_grad=False)
        guard.add_follower(part, follower)
        setattr(holder, path.rpartition(".")[2], follower)
    guard.add_follower(next(iter(parts.values())), param)
    return parts


def put_together(param: nn.Parameter) -> None:
    """Give a parameter that is made of tensors ordinary ones again, which it shares with nobody."""
    for path, holder, tensor in list(inner_tensors(param)) if is_wrapper(param) else ():
        setattr(holder, path.rpartition(".")[2], tensor.detach())


def check_conversion(model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Raise ValueError where `function` would change the dtype that what is made of tensors computes in."""
    for name, param in model.named_parameters():
        if is_wrapper(param):
            sample = function(torch.empty(0, dtype=param.dtype, device=param.device))
            if sample.dtype != param.dtype:
                raise ValueError(
                    f"cannot make the prepared parameter '{name}' of {param.dtype} one of {sample.dtype}: its codes "
                    "are packed. Convert the model before it is prepared"
                )
