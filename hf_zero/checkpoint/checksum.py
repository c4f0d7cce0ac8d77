"""Checksums of tensors that several ranks compute together: the sum over any cut of a tensor is the same.

The checksum is the sum of `word * weight(position)` over the words of a tensor, modulo 2**64. A word is an element, as
an integer of its size; elements of 8 bytes are two words, as two changes in the highest bits of 64-bit words would
cancel. Weights are odd, so that a change in one word can never go unnoticed.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable

import numpy as np
from torch import Tensor


_BLOCK = 1 << 15  # words whose weights are kept; small enough to stay in a core's cache
_MASK = (1 << 64) - 1
_WORDS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int32}


def memory_of(values: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, as long as it lives.

    `Tensor.numpy` would give them, too, and forbid for ever that the storage is released.
    """
    assert values.is_contiguous() and values.device.type == "cpu"
    return memoryview((ctypes.c_char * values.nbytes).from_address(values.data_ptr())).cast("B")


@functools.cache
def _weights() -> np.ndarray:
    """An odd number for every position in a block."""
    return (np.arange(_BLOCK, dtype=np.int64) * 0x1E3779B97F4A7C15) | 1


def combine(*parts: int) -> int:
    """The checksum of a tensor from those of its parts."""
    return sum(parts) & _MASK


class Checksums(dict[str, int]):
    """The checksums of tensors by name, added up from parts of them.

    Args:
        names: tensors that have a checksum even when no part of them comes (it is 0).
        wide: elements of 8 bytes are one word, as they were at first.
    """

    def __init__(self, names: Iterable[str] = (), wide: bool = False) -> None:
        super().__init__(dict.fromkeys(names, 0))
        self._words = {**_WORDS, 8: np.int64} if wide else _WORDS
        self._integers = np.empty(_BLOCK, dtype=np.int64)  # kept: fresh memory costs more than the products

    def add(self, name: str, start: int, values: Tensor) -> None:
        """Add elements `start` and following of tensor `name`; `values` are contiguous, on the CPU."""
        words = np.frombuffer(memory_of(values), dtype=self._words[values.itemsize])
        first = start * (values.itemsize // words.itemsize)
        total, at = self.get(name, 0), 0
        while at < len(words):
            block, column = divmod(first + at, _BLOCK)
            count = min(_BLOCK - column, len(words) - at)
            integers = self._integers[:count]
            integers[:] = words[at : at + count]
            # The product of integers wraps, and that is meant.
            total += int(np.dot(integers, _weights()[column : column + count])) * (2 * block + 1)
            at += count
        self[name] = total & _MASK
