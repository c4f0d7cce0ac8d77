"""Writes down what one rank would enqueue on a device: operations with the memory they touch, collectives, releases.

A dispatch mode notes which bytes each operation reads and writes; using released memory raises where it happens. A
collective of the log holds none of its tensors (NCCL's does, until its end): what keeps them alive must be the engine.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import unittest.mock
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import hf_zero
from hf_zero.core.engine import ZeroEngine
from tests.support.happens_before import Collective, Compute, Event, Free, Log, Region, Resize, Section, Wait


_PACKAGE = str(Path(hf_zero.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_BACKWARD = inspect.unwrap(ZeroEngine.backward).__code__

# Operations that take a tensor for its shape and dtype only.
_SHAPE_ONLY = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    "_wrap_tensor_autograd",
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "is_same_size"),
}


class Work(dist._Work):
    """A collective under way, also for torch's own code."""

    def __init__(self, call: Collective, on_wait: Callable[[], None]) -> None:
        super().__init__()
        self.call, self._on_wait = call, on_wait

    def wait(self, timeout: object = None) -> bool:
        self._on_wait()
        return True


class DeviceLog(TorchDispatchMode):
    """The log of one rank; written to inside `open`."""

    def __init__(self) -> None:
        super().__init__()
        self.log: Log = []
        self._storages: dict[int, int] = {}  # id of a live storage -> its name in the log
        self._names = 0
        self._open = self._paused = False
        self._label = ""
        self._after: Collective | None = None

    def section(self, name: str) -> None:
        """A pass begins."""
        self._write(Section(name))

    @contextlib.contextmanager
    def carrying(self, label: str) -> Iterator[None]:
        """Collectives launched inside carry what `label` says."""
        before, self._label = self._label, label
        try:
            yield
        finally:
            self._label = before

    @contextlib.contextmanager
    def behind(self, copy: Collective | None) -> Iterator[None]:
        """Collectives launched inside start when a copy is over."""
        self._after = copy
        try:
            yield
        finally:
            self._after = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """What happens inside is written down."""
        resize = torch.UntypedStorage.resize_

        def noted(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            name = self._name(storage)
            resize(storage, nbytes)
            self._write(Resize(name, nbytes))
            return storage

        with unittest.mock.patch.object(torch.UntypedStorage, "resize_", noted), self:
            self._open = True
            try:
                yield
            finally:
                self._open = False

    def _write(self, event: Event) -> None:
        if self._open:
            self.log.append(event)

    def launch(
        self,
        communicator: str,
        kind: str,
        members: tuple[int, ...],
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] = (),
        *,
        tagged: bool = False,
        numel: int | None = None,
    ) -> Work:
        """Write down a collective that reads `inputs` and writes `outputs`, and the wait for it when it comes.

        `numel` is to be the same on all ranks (default: as many elements as it reads).
        """
        call = Collective(
            communicator,
            kind,
            self._label,
            numel=sum(tensor.numel() for tensor in inputs or outputs) if numel is None else numel,
            reads=tuple(self._region(tensor, kind) for tensor in inputs),
            writes=tuple(self._region(tensor, kind) for tensor in outputs),
            members=members,
            tagged=tagged,
            after=self._after,
        )
        self._write(call)
        return Work(call, functools.partial(self._write, Wait(call)))

    def touch(self, name: str, target: Tensor) -> None:
        """Write down a change of `target` that no operation of torch makes."""
        self._write(Compute(name, (), (self._region(target, name),), of_model=False))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is no operation of the program."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # it comes back with the tensors inside
        if self._paused or not self._open:
            return func(*args, **kwargs)
        reads, writes = _accesses(func, args, kwargs)
        name = func.overloadpacket.__name__
        reads = tuple(self._region(tensor, name) for tensor in reads)
        writes = tuple(self._region(tensor, name) for tensor in writes)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._name(_storage(tensor))
        if reads or writes:
            self._write(Compute(name, reads, writes, of_model=not _issued_by_engine()))
        return result

    def _region(self, tensor: Tensor, name: str) -> Region:
        """The bytes of a tensor. Raises RuntimeError where its storage does not have them."""
        storage = _storage(tensor)
        if not tensor.numel():
            return Region(self._name(storage), 0, 0)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.storage_offset() * tensor.itemsize
        end = begin + (last + 1) * tensor.itemsize
        if storage.nbytes() < end:
            raise RuntimeError(f"{name} uses released memory: a tensor of shape {tuple(tensor.shape)}")
        return Region(self._name(storage), begin, end)

    def _name(self, storage: torch.UntypedStorage) -> int:
        if id(storage) not in self._storages:
            self._names += 1
            self._storages[id(storage)] = self._names
            weakref.finalize(storage, self._forget, id(storage)).atexit = False
            self._write(Resize(self._names, storage.nbytes()))
        return self._storages[id(storage)]

    def _forget(self, key: int) -> None:
        self._write(Free(self._storages.pop(key)))


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunctionSubclass():  # the guard of parameters must not answer
        return tensor.untyped_storage()


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, (list, tuple)) else []


@functools.cache
def _access_of(func: torch._ops.OpOverload) -> tuple[tuple[str, bool], ...] | None:
    """(name, whether it is written to) of each argument; None where no memory is touched (views, shapes)."""
    schema = func._schema
    views = any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
    if views or func.overloadpacket.__name__ in _SHAPE_ONLY:
        return None
    return tuple((arg.name, arg.alias_info is not None and arg.alias_info.is_write) for arg in schema.arguments)


def _accesses(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads, and those that it writes to."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for position, (name, written) in enumerate(_access_of(func) or ()):
        value = args[position] if position < len(args) else kwargs.get(name)
        (writes if written else reads).extend(_tensors(value))
    return reads, writes


def _issued_by_engine() -> bool:
    """Whether hf_zero asked for the operation under way; what autograd runs is the model's."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not _BACKWARD:
        file = frame.f_code.co_filename
        if not file.startswith(_TORCH):
            return file.startswith(_PACKAGE)
        frame = frame.f_back
    return False
