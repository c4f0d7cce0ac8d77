"""Counts the bytes of tensor storages as operations make and drop them, on any device."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


ACTIVATIONS = "activations"


class _Entry:
    """One live storage."""

    __slots__ = ("born", "category", "nbytes", "ref")

    def __init__(self, ref: weakref.ref, nbytes: int, category: str, born: int) -> None:
        self.ref, self.nbytes, self.category, self.born = ref, nbytes, category, born


class StorageMeter(TorchDispatchMode):
    """Inside, knows which bytes are live, by category, and what was live when there were most.

    A storage counts as an activation until `label` says otherwise. Bytes of storages that are released and refilled
    without an operation (`resize_`) are read from `resizable` before every look.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.peak_bytes = 0
        self.resizable: Callable[[], Iterable[Tensor]] = tuple
        self.before_peak: Callable[[], None] = tuple  # last chance to label what is live
        self.logits_width = 0
        self.most_logits = 0
        self._entries: dict[int, _Entry] = {}
        self._seen = 0
        self._seen_at_peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return True  # "are all of these ones (a mask without padding)?" is what models ask of values
        if func is torch.ops.aten._grouped_mm.default and args[0].device.type == "meta":
            out = _grouped_mm(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        grown = False
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor):
                grown = self._see(value) or grown
        if grown:
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
            if entry.category == ACTIVATIONS and entry.born <= self._seen_at_peak:
                # It was already what it is now said to be, but its owner had not got hold of it yet.
                self.peak[ACTIVATIONS] -= entry.nbytes
                self.peak[category] += entry.nbytes
            self.live[entry.category] -= entry.nbytes
            entry.category, entry.nbytes = category, tensor.untyped_storage().nbytes()
            self.live[category] += entry.nbytes

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
        total = self.live.total()
        if total > self.peak_bytes:
            self.before_peak()
            self.peak_bytes, self.peak, self._seen_at_peak = total, Counter(self.live), self._seen

    def reset_peak(self) -> None:
        self.peak_bytes, self.peak, self._seen_at_peak = 0, Counter(), 0


def _grouped_mm(left: Tensor, right: Tensor, offs: Tensor, *_: object) -> Tensor:
    """The result's shape; torch's own rule for meta tensors admits only the dtype of its fastest kernel."""
    if left.dim() == right.dim() == 2:  # groups lie along the common dimension: a weight's gradient
        return left.new_empty(offs.numel(), left.shape[0], right.shape[-1])
    return left.new_empty(left.shape[0], right.shape[-1])
