"""What one of ATen's operations costs: products, and bytes that are read and written."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on the computing stream.

    Attributes:
        name: as ATen calls it.
        flops: of products and attention, 0 for all others.
        nbytes: read and written, each storage once.
        dtype: of the first tensor that it reads.
        narrowest: the smallest dimension of a matrix product; 0 for other operations.
        on_host: it runs in the host's memory, and the device has one of its own.
    """

    name: str
    flops: int
    nbytes: int
    dtype: torch.dtype
    narrowest: int = 0
    on_host: bool = False


_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def short_name(dtype: torch.dtype) -> str:
    """Of a dtype, in descriptions of machines; those without one count as fp32."""
    return _SHORT.get(dtype, "fp32")


def rate_name(operation: Operation) -> str:
    """Of an operation in `Machine.rates`: `add_` costs what `add` does; the dtype stands behind, if it has 16 bits."""
    name, short = operation.name.removesuffix("_"), short_name(operation.dtype)
    return name if short == "fp32" else f"{name} {short}"


# Operations that take a tensor for its shape only, or make one without writing to it.
_WITHOUT_MEMORY = {
    *("empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"),
    *("detach", "resize_", "_unsafe_view"),
}
COLLECTIVES = ("_c10d_functional", "c10d")  # whose operations are moves
# Operations that write to a tensor what does not depend on its values.
_FILLING = {"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_"}
# Operations that read as much of a tensor as they write.
_PICKING = {"embedding", "index", "index_select", "gather", "nll_loss_forward"}

# How many times the products of the forward pass an attention's backward makes, as torch's counter has it.
_ATTENTION_BACKWARD = 2.5


def describe(func: torch._ops.OpOverload, args: tuple, kwargs: dict, result: object) -> Operation | None:
    """What an operation costs; None where it only makes a view or room."""
    return _operation(func, args, kwargs, tensors_in(result)) if _touches_memory(func) else None


@functools.cache
def _touches_memory(func: torch._ops.OpOverload) -> bool:
    views = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
    return not views and func.namespace not in COLLECTIVES and func.overloadpacket.__name__ not in _WITHOUT_MEMORY


def _operation(func: torch._ops.OpOverload, args: tuple, kwargs: dict, made: list[Tensor]) -> Operation | None:
    """What an operation costs; None where it touches no tensor."""
    read = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
    if not (read or made):
        return None
    name, nbytes, dtype = func.overloadpacket.__name__, _nbytes(func, args, kwargs, made), (read or made)[0].dtype
    if name.startswith("_scaled_dot_product"):
        return Operation(name, _attention_flops(name, read, args, kwargs), nbytes, dtype)
    counter = flop_registry.get(func.overloadpacket)
    if counter is None:
        return Operation(name, 0, nbytes, dtype)
    flops = int(counter(*args, **kwargs, out_val=made[0] if len(made) == 1 else tuple(made)))
    inner = flops // max(1, 2 * made[0].numel())
    return Operation(name, flops, nbytes, dtype, min(*made[0].shape[-2:], inner))


def _attention_flops(name: str, read: list[Tensor], args: tuple, kwargs: dict) -> int:
    """Two products, halved where a causal mask leaves half of them out, as fused kernels do."""
    backward = "backward" in name
    query, key = (read[1], read[2]) if backward else (read[0], read[1])
    batch_and_heads = math.prod(query.shape[:-2])
    flops = 4 * batch_and_heads * query.shape[-2] * key.shape[-2] * query.shape[-1]
    causal = kwargs.get("is_causal", any(value is True for value in args))
    return int(flops * (_ATTENTION_BACKWARD if backward else 1.0) * (0.5 if causal else 1.0))


def _nbytes(func: torch._ops.OpOverload, args: tuple, kwargs: dict, made: list[Tensor]) -> int:
    """What is read and written, each range of memory once for either."""
    name = func.overloadpacket.__name__
    if name in _PICKING:
        return 2 * sum(nbytes for _, nbytes in map(_range, made))
    read: dict[tuple[int, int], int] = {}
    written = dict(map(_range, made))
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        ranges = dict(map(_range, tensors_in(value)))
        changes = argument.alias_info is not None and argument.alias_info.is_write
        if not (changes and (argument.name == "out" or name in _FILLING)):
            read.update(ranges)
        if changes:
            written.update(ranges)
    return sum(read.values()) + sum(written.values())


def _range(tensor: Tensor) -> tuple[tuple[int, int], int]:
    """Where a tensor lies, and its bytes in memory: those of an expanded one are few."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = min(tensor.numel(), last + 1) if tensor.numel() else 0
    return (tensor.untyped_storage()._cdata, tensor.storage_offset()), count * tensor.itemsize


def tensors_in(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
