"""Builds parameters without keeping their values: notes how they come about, and does it again when they are needed.

[Note: recipes] While a `Recorder` is open, modules are built and initialised as always: every operation runs, so the
random numbers are those of any other process with the same seed. But a registered parameter keeps its memory only
until the next one is touched. What made its values (operations, and for random ones the state of the generator) is
noted; an operation that needs them again, or a flat buffer that wants its slice, repeats just that. Aliases stay
right meanwhile, because a storage is emptied and filled in place.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from hf_zero.core import deferred
from hf_zero.core.heap import heap
from hf_zero.lazy_init.replay import Place, Replay, Step, bytes_of, generator_of, repeat


_aten = torch.ops.aten


def _overloads(names: str) -> set:
    packets = [getattr(_aten, name) for name in names.split()]
    found = {getattr(packet, overload) for packet in packets for overload in packet.overloads()}
    return {func for func in found if not any(argument.is_out for argument in func._schema.arguments)}


_EMPTY = _overloads("empty empty_strided empty_like new_empty new_empty_strided")
# Factories as an empty tensor and an operation on it; the second is given the last argument of a `full`.
_FILLED = {
    **dict.fromkeys(_overloads("zeros zeros_like new_zeros"), (_aten.zero_.default, ())),
    **dict.fromkeys(_overloads("ones ones_like new_ones"), (_aten.fill_.Scalar, (1,))),
    **dict.fromkeys(_overloads("full full_like new_full"), (_aten.fill_.Scalar, None)),
    **dict.fromkeys(_overloads("randn randn_like"), (_aten.normal_.default, ())),
    **dict.fromkeys(_overloads("rand rand_like"), (_aten.uniform_.default, ())),
}
# They write all of their first argument and read none of it.
_OVERWRITES = _overloads(
    "normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_ zero_ fill_ copy_"
)
# They change a storage in ways that cannot be repeated on another one.
_UNREPEATABLE = _overloads("set_ resize_ resize_as_")
# They give the memory of a tensor to others than torch's operations.
_ESCAPES = {
    *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.tolist, Tensor.__reduce_ex__),
    *(Tensor.storage, Tensor.untyped_storage, Tensor._typed_storage, Tensor.share_memory_, Tensor.pin_memory),
}
_SET_DATA = Tensor.data.__set__
# More operations than this on one parameter are no initialisation.
_LONGEST_HISTORY = 64


@dataclass(eq=False)
class _Storage:
    """A storage whose values can be made again."""

    name: int
    ref: StorageWeakRef
    nbytes: int
    history: tuple[Step, ...] = ()
    registered: bool = False  # as a parameter: its memory may be given back from then on
    param: weakref.ref | None = None
    released: bool = False

    def memory(self) -> torch.UntypedStorage | None:
        """The storage itself, None once nobody holds it."""
        return torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)


class _Escapes(TorchFunctionMode):
    """What leaves torch's operations is given real memory, for good."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _ESCAPES or func == _SET_DATA:
            self.recorder.forget(args[0])
        result = func(*args, **(kwargs or {}))
        if func == _SET_DATA:
            self.recorder.register(args[0])
        return result


class Recorder(TorchDispatchMode):
    """While it is open, parameters of modules on the CPU are built without keeping their values.

    When it closes they become `DeferredParameter`s. A parameter that cannot be made again (its values came from
    elsewhere, or something else holds its memory) is an ordinary one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, _Storage] = {}  # by address
        self._resident: list[_Storage] = []  # registered, with memory
        self._numbers = itertools.count()
        self._scope = contextlib.ExitStack()

    def __enter__(self) -> Recorder:
        handle = register_module_parameter_registration_hook(lambda module, name, param: self.register(param))
        self._scope.callback(handle.remove)
        self._scope.enter_context(_Escapes(self))
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self._scope.close()
        for storage in self._storages.values():
            if storage.registered:
                self._close(storage)

    # -- operations -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _EMPTY or func in _FILLED:
            return self._make(func, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = [storage for tensor in tensors if (storage := self._find(tensor)) is not None]
        if not known:
            return func(*args, **kwargs)
        if func in _UNREPEATABLE:
            for tensor in tensors:
                self.forget(tensor)
            return func(*args, **kwargs)
        if func.is_view or torch.Tag.inplace_view in func.tags or func is _aten.detach.default:
            with self._room_for(known):
                return func(*args, **kwargs)
        anew = self._overwritten(func, tensors)
        for storage in known:
            self._bring_back(storage, fill=storage is not anew)
        step = self._note(func, args, kwargs, anew)
        out = func(*args, **kwargs)
        self._keep(step, func, args, kwargs, out, anew)
        self._release_all_but(known)
        return out

    def _overwritten(self, func, tensors: list[Tensor]) -> _Storage | None:
        """The storage of which the operation writes all and reads nothing."""
        if func not in _OVERWRITES:
            return None
        storage = self._find(tensors[0])
        whole = storage is not None and _is_whole(tensors[0], storage.nbytes)
        return storage if whole and all(self._find(tensor) is not storage for tensor in tensors[1:]) else None

    def _make(self, func, args: tuple, kwargs: dict) -> Tensor:
        """Run a factory; its result can be made again."""
        state = generator_of(kwargs).get_state() if torch.Tag.nondeterministic_seeded in func.tags else None
        out = func(*args, **kwargs)
        if out.device.type == "cpu" and out.layout == torch.strided:
            storage = self._add(out)
            if func in _FILLED:
                fill, values = _FILLED[func]
                values = (args[-1] if len(args) > 1 else kwargs["fill_value"],) if values is None else values
                generator = {"generator": kwargs["generator"]} if "generator" in kwargs else {}
                place = self._place(storage, out, ())
                step = Step(next(self._numbers), fill, (place, *values), generator, state)
                storage.history = (step,)
        return out

    def _note(self, func, args: tuple, kwargs: dict, anew: _Storage | None) -> Step:
        def stand_in(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            storage = self._find(leaf)
            if storage is None:
                return leaf.detach().clone()
            return self._place(storage, leaf, () if storage is anew else storage.history)

        state = generator_of(kwargs).get_state() if torch.Tag.nondeterministic_seeded in func.tags else None
        return Step(next(self._numbers), func, tree_map(stand_in, args), tree_map(stand_in, kwargs), state)

    def _keep(self, step: Step, func, args: tuple, kwargs: dict, out: object, anew: _Storage | None) -> None:
        """Note the step with everything that it has written or made."""
        for tensor in _written(func, args, kwargs):
            storage = self._find(tensor)
            if storage is not None:
                storage.history = (step,) if storage is anew else (*storage.history, step)
                if len(storage.history) > _LONGEST_HISTORY:
                    self.forget(tensor)
        made: list[int | None] = []
        for leaf in tree_leaves(out):
            fresh = isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.layout == torch.strided
            if fresh and self._find(leaf) is None and not _is_written(leaf, func, args, kwargs):
                storage = self._add(leaf)
                storage.history = (step,)
                made.append(storage.name)
            else:
                made.append(None)
        step.made = made if any(name is not None for name in made) else []

    # -- storages -------------------------------------------------------------------------------------------------

    def _find(self, tensor: Tensor) -> _Storage | None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return None
        return self._storages.get(_storage_of(tensor)._cdata)

    def _add(self, tensor: Tensor) -> _Storage:
        if len(self._storages) % 1024 == 1023:
            self._storages = {key: s for key, s in self._storages.items() if not s.ref.expired()}
        memory = _storage_of(tensor)
        # The weak reference keeps the address from being used again.
        storage = _Storage(next(self._numbers), StorageWeakRef(memory), memory.nbytes())
        self._storages[memory._cdata] = storage
        return storage

    def _place(self, storage: _Storage, tensor: Tensor, history: tuple[Step, ...]) -> Place:
        layout = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        return Place(storage.name, storage.nbytes, history, tensor.dtype, *layout)

    def register(self, param: Tensor | None) -> None:
        """From now on the parameter's memory is given back when others are touched."""
        if type(param) is not nn.Parameter or not param.numel():
            return
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            storage = self._find(param)
            if storage is not None and not storage.registered and _is_whole(param, storage.nbytes):
                storage.registered = True
                storage.param = weakref.ref(param)
                self._release(storage)

    def forget(self, tensor: Tensor) -> None:
        """Give the tensor its memory for good."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            storage = self._find(tensor)
            if storage is not None:
                self._bring_back(storage, fill=True)
                del self._storages[_storage_of(tensor)._cdata]
                self._resident = [other for other in self._resident if other is not storage]

    def _bring_back(self, storage: _Storage, fill: bool) -> None:
        if storage.released:
            memory = storage.memory()
            memory.resize_(storage.nbytes)
            storage.released = False
            self._resident.append(storage)
            if fill:
                with torch.no_grad():
                    repeat(storage.history, storage.name, bytes_of(memory))

    @contextlib.contextmanager
    def _room_for(self, known: list[_Storage]) -> Iterator[None]:
        """Views are made of released storages too, but torch wants to see that they fit."""
        empty = [storage for storage in known if storage.released]
        for storage in empty:
            storage.memory().resize_(storage.nbytes)
        try:
            yield
        finally:
            for storage in empty:
                storage.memory().resize_(0)

    def _release_all_but(self, kept: Iterable[_Storage]) -> None:
        touched = set(kept)
        if any(storage.registered for storage in touched):
            stay = [storage for storage in self._resident if storage in touched]
            go, self._resident = [storage for storage in self._resident if storage not in touched], stay
            for storage in go:
                self._release(storage)

    def _release(self, storage: _Storage) -> None:
        memory = storage.memory()
        if memory is not None:
            memory.resize_(0)
            storage.released = True
            heap.has_freed(storage.nbytes)

    def _close(self, storage: _Storage) -> None:
        memory, param = storage.memory(), storage.param()
        if memory is None:
            return
        # One holder is the parameter, the other is `memory`.
        alone = param is not None and _storage_of(param)._cdata == memory._cdata and _holders(memory) == 2
        if alone and storage.history and _is_whole(param, storage.nbytes):
            del memory
            deferred.defer(param, Replay(storage.history, storage.name, param.numel(), param.dtype))
        else:
            self._bring_back(storage, fill=True)


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()


def _holders(memory: torch.UntypedStorage) -> int:
    """How many tensors and Python objects hold a storage."""
    return torch._C._storage_Use_Count(memory._cdata)


def _is_whole(tensor: Tensor, nbytes: int) -> bool:
    """Whether a tensor is all of its storage of that size, in order."""
    return tensor.is_contiguous() and tensor.storage_offset() == 0 and tensor.nbytes == nbytes


@cache
def _write_positions(func) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((at, arg.name) for at, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write)


def _written(func, args: tuple, kwargs: dict) -> list[Tensor]:
    given = [args[at] if at < len(args) else kwargs.get(name) for at, name in _write_positions(func)]
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]


def _is_written(tensor: Tensor, func, args: tuple, kwargs: dict) -> bool:
    return any(tensor is other for other in _written(func, args, kwargs))
