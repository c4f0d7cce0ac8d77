"""Runs tensor code without values and says, for every element of the results, which source element it is.

[Note: tensors without memory] Libraries recognise shared weights by their storage, so the stand-ins need real,
distinct addresses. They lie in read-only pages that the system never has to provide: nothing reads them. A copy
(`contiguous`, `cat`) is not made either; its result is another stand-in, and the copied runs are noted.
"""

from __future__ import annotations

import itertools
import mmap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


_aten = torch.ops.aten
# Below this many elements on average, runs are too short to be written one by one.
_SHORTEST_RUN = 64


@dataclass(frozen=True)
class Run:
    """Elements [at, at + numel) of a tensor are elements [start, start + numel) of the source called `name`."""

    at: int
    name: str
    start: int
    numel: int

    def cut(self, begin: int, end: int) -> Run | None:
        """What of it lies in [begin, end) of the tensor, counted from `begin`; None where nothing does."""
        low, high = max(begin, self.at), min(end, self.at + self.numel)
        return Run(low - begin, self.name, self.start + low - self.at, high - low) if low < high else None


@dataclass(frozen=True)
class Origin:
    """Where the elements of a tensor come from; `runs` is None where values were computed, not moved."""

    names: frozenset[str]
    runs: tuple[Run, ...] | None


class Tracer(TorchDispatchMode):
    """While it is active, tensor code works on stand-ins (see [Note: tensors without memory])."""

    def __init__(self) -> None:
        super().__init__()
        self._origins: dict[int, Origin] = {}  # by address of the storage
        self._numels: dict[str, int] = {}  # of the sources
        self._kept: list[Tensor] = []  # an address must not be used twice

    def source(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A stand-in for the tensor `name`."""
        self._numels[name] = numel = torch.Size(shape).numel()
        return self._make(dtype, shape, Origin(frozenset([name]), (Run(0, name, 0, numel),)))

    def numel(self, name: str) -> int:
        """The elements of a source."""
        return self._numels[name]

    def origin(self, tensor: Tensor) -> Origin:
        """Where the elements of `tensor`, in its own row-major order, come from."""
        stored = self._origins.get(tensor.untyped_storage().data_ptr())
        if stored is None:
            return Origin(frozenset(), None)
        return Origin(stored.names, _view_runs(stored.runs, tensor))

    def origin_of(self, value: Tensor | None) -> Origin | None:
        """The origin of a stand-in; None for anything else."""
        if value is None or value.device.type == "meta":
            return None
        origin = self.origin(value)
        return origin if origin.names else None

    def _make(self, dtype: torch.dtype, shape: tuple[int, ...], origin: Origin) -> Tensor:
        made = _stand_in(dtype, shape)
        self._kept.append(made)
        self._origins[made.untyped_storage().data_ptr()] = origin
        return made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.is_view or func in (_aten.detach.default, _aten._unsafe_view.default):
            return func(*args, **kwargs)
        names = frozenset(name for tensor in inputs for name in self.origin(tensor).names)
        if not names:
            return func(*args, **kwargs)
        runs = self._moved(func, args, kwargs)
        shapes = func(*tree_map(_on_meta, args), **{**tree_map(_on_meta, kwargs), **_device(kwargs)})
        return tree_map(
            lambda leaf: (
                self._make(leaf.dtype, tuple(leaf.shape), Origin(names, runs)) if isinstance(leaf, Tensor) else leaf
            ),
            shapes,
        )

    def _moved(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Run, ...] | None:
        """The runs of a result that is a copy; None for anything else."""
        if func in (_aten.clone.default, _aten.contiguous.default):
            return self.origin(args[0]).runs
        if func is _aten._to_copy.default:
            return self.origin(args[0]).runs  # a cast: whoever moves the elements makes it
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        if func is _aten.cat.default or (func is _aten.stack.default and dim == 0):
            stored = [self.origin(tensor).runs for tensor in args[0]]
            parts = [(tensor, runs) for tensor, runs in zip(args[0], stored, strict=True) if runs is not None]
            if len(parts) == len(stored):
                return _joined(parts, dim if func is _aten.cat.default else 0)
        return None


def _on_meta(value: object) -> object:
    return value.to("meta") if isinstance(value, Tensor) else value


def _device(kwargs: dict) -> dict:
    return {"device": "meta"} if kwargs.get("device") is not None else {}


def _stand_in(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    numel = torch.Size(shape).numel()
    if numel == 0:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the pages cannot be written: that is the point
        return torch.frombuffer(pages, dtype=dtype, count=numel).view(shape)


def _joined(parts: list[tuple[Tensor, tuple[Run, ...]]], dim: int) -> tuple[Run, ...] | None:
    """The runs of tensors put together along `dim`; None where they would be too short."""
    shape = parts[0][0].shape
    outer = torch.Size(shape[: dim % len(shape)]).numel() if shape else 1
    lengths = [tensor.numel() // outer for tensor, _ in parts]
    if outer > 1 and sum(lengths) < _SHORTEST_RUN * len(parts):
        return None
    runs: list[Run] = []
    at = 0
    for index in range(outer):
        for length, (_, stored) in zip(lengths, parts, strict=True):
            runs.extend(_cut(stored, index * length, (index + 1) * length, at))
            at += length
    return tuple(_merged(runs))


def _view_runs(stored: tuple[Run, ...] | None, view: Tensor) -> tuple[Run, ...] | None:
    """The runs of a strided view of a storage that holds `stored`; None where they would be too short."""
    if stored is None:
        return None
    if view.numel() == 0:
        return ()
    length, outer = 1, list(zip(view.shape, view.stride(), strict=True))
    while outer and (outer[-1][0] == 1 or outer[-1][1] == length):
        length *= outer.pop()[0]
    if outer and length < _SHORTEST_RUN:
        return None
    runs: list[Run] = []
    for number, index in enumerate(itertools.product(*(range(size) for size, _ in outer))):
        begin = int(view.storage_offset()) + sum(i * stride for i, (_, stride) in zip(index, outer, strict=True))
        runs.extend(_cut(stored, begin, begin + length, number * length))
    return tuple(_merged(runs))


def _cut(stored: tuple[Run, ...], begin: int, end: int, at: int) -> Iterator[Run]:
    """The part [begin, end) of `stored`, moved to position `at`."""
    for run in stored:
        part = run.cut(begin, end)
        if part is not None:
            yield replace(part, at=at + part.at)


def _merged(runs: list[Run]) -> Iterator[Run]:
    """Runs that go on where the one before ends become one."""
    last: Run | None = None
    for run in runs:
        if last is not None and run == Run(last.at + last.numel, last.name, last.start + last.numel, run.numel):
            last = replace(last, numel=last.numel + run.numel)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last
