"""Counts the bytes of tensor storages as operations make and drop them, on any device."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.planning.remembered import Remembered, is_composed, is_trial


ACTIVATIONS = "activations"


class _Entry:
    """One live storage."""

    __slots__ = ("born", "category", "nbytes", "ref")

    def __init__(self, ref: weakref.ref, nbytes: int, category: str, born: int) -> None:
        self.ref, self.nbytes, self.category, self.born = ref, nbytes, category, born


class Peak:
    """What was live when there was most of it; the categories `without` are left out.

    A tensor may be seen before its owner has got hold of it, and be left out afterwards. The moments that were a peak
    until then are therefore kept until the next look, when all tensors of before have their labels.
    """

    def __init__(self, without: Iterable[str] = ()) -> None:
        self.without = frozenset(without)
        self._moments: list[tuple[int, Counter[str]]] = [(0, Counter())]  # (storages seen by then, what was live)

    def total(self, live: Counter[str]) -> int:
        """The bytes that count; called at every operation that makes a tensor."""
        return sum(live.values()) - sum(live[name] for name in self.without)

    @property
    def live(self) -> Counter[str]:
        return max((live for _, live in self._moments), key=Counter.total)

    @property
    def nbytes(self) -> int:
        return self.live.total()

    def close(self) -> None:
        """All tensors seen so far have their labels: only the best moment matters."""
        self._moments = [max(self._moments, key=lambda moment: moment[1].total())]

    def record(self, seen: int, live: Counter[str]) -> None:
        taken = {name: count for name, count in live.items() if name not in self.without}
        self._moments.append((seen, Counter(taken)))

    def relabel(self, born: int, nbytes: int, category: str) -> None:
        """A tensor that was counted as an activation was of this category all the time."""
        for seen, live in self._moments:
            if born <= seen:
                live[ACTIVATIONS] -= nbytes
                if category not in self.without:
                    live[category] += nbytes


class StorageMeter(TorchDispatchMode):
    """Inside, knows which bytes are live, by category, and what was live when there were most.

    A storage counts as an activation until `label` says otherwise. Bytes of storages that are released and refilled
    without an operation (`resize_`) are read from `resizable` before every look.

    Args:
        without: categories that the peak leaves out.

    Attributes:
        watches: whether peaks are looked for.
    """

    _run = Remembered()

    def __init__(self, without: Iterable[str] = ()) -> None:
        super().__init__()
        self.watches = True
        self.live: Counter[str] = Counter()
        self.peak = Peak(without)
        self.resizable: Callable[[], Iterable[Tensor]] = tuple
        self.before_peak: Callable[[], None] = tuple  # last chance to label what is live
        self.logits_width = 0
        self.most_logits = 0
        self._entries: dict[int, _Entry] = {}
        self._seen = 0
        self._closed = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here, and saying so at each operation costs more than the operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if types and is_composed(types):
            return NotImplemented
        if types and is_trial(types):
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return True  # "are all of these ones (a mask without padding)?" is what models ask of values
        if func is torch.ops.aten._grouped_mm.default and args[0].device.type == "meta":
            out = _grouped_mm(*args, **(kwargs or {}))
        else:
            out = self._run(func, args, kwargs or {})
        grown = False
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor):
                grown = self._see(value) or grown
        if grown and self.watches:
            self._look()
        return out

    def _see(self, tensor: Tensor, category: str = ACTIVATIONS) -> bool:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._entries:
            return False
        if category == ACTIVATIONS and self.logits_width and tensor.shape[-1:] == (self.logits_width,):
            category = "logits"
        self._seen += 1
        ref = weakref.ref(storage, lambda _: self._forget(key))
        self._entries[key] = _Entry(ref, storage.nbytes(), category, self._seen)
        self.live[category] += storage.nbytes()
        self.most_logits = max(self.most_logits, self.live["logits"])
        return True

    def _forget(self, key: int) -> None:
        entry = self._entries.pop(key)
        self.live[entry.category] -= entry.nbytes

    def label(self, tensors: Iterable[Tensor], category: str) -> None:
        """Count the storages of these tensors in `category` from now on."""
        for tensor in tensors:
            self._see(tensor, category)
            entry = self._entries[tensor.untyped_storage()._cdata]
            if entry.category == category:
                continue
            if entry.category == ACTIVATIONS:
                self.peak.relabel(entry.born, entry.nbytes, category)
            self.live[entry.category] -= entry.nbytes
            entry.category, entry.nbytes = category, tensor.untyped_storage().nbytes()
            self.live[category] += entry.nbytes

    def is_in(self, category: str, tensor: Tensor) -> bool:
        """Whether the storage of a tensor counts in a category."""
        entry = self._entries.get(tensor.untyped_storage()._cdata)
        return entry is not None and entry.category == category

    def refresh(self) -> None:
        """Read the present size of the resizable storages."""
        for tensor in self.resizable():
            storage = tensor.untyped_storage()
            entry = self._entries.get(storage._cdata)
            if entry is not None and entry.nbytes != storage.nbytes():
                self.live[entry.category] += storage.nbytes() - entry.nbytes
                entry.nbytes = storage.nbytes()

    def _look(self) -> None:
        self.refresh()
        if not self._closed:
            self.before_peak()
            self._closed = True
            self.peak.close()
        if self.peak.total(self.live) <= self.peak.nbytes:
            return
        self.before_peak()
        if self.peak.total(self.live) > self.peak.nbytes:
            self.peak.record(self._seen, self.live)
        self._closed = False

    def reset_peak(self) -> None:
        self.peak = Peak(self.peak.without)
        self._closed = True


def _grouped_mm(left: Tensor, right: Tensor, offs: Tensor, *_: object) -> Tensor:
    """The result's shape; torch's own rule for meta tensors admits only the dtype of its fastest kernel."""
    if left.dim() == right.dim() == 2:  # groups lie along the common dimension: a weight's gradient
        return left.new_empty(offs.numel(), left.shape[0], right.shape[-1])
    return left.new_empty(left.shape[0], right.shape[-1])
