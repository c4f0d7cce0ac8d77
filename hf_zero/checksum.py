"""Checksums of tensors that several ranks compute together: the sum over any cut of a tensor is the same."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


_BLOCK = 1 << 15  # elements whose weights are kept; small enough to stay in a core's cache
_MASK = (1 << 64) - 1
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.cache
def _weights() -> Tensor:
    """An odd number for every position in a block, so that no change of one element can go unnoticed."""
    return (torch.arange(_BLOCK, dtype=torch.int64) * 0x1E3779B97F4A7C15) | 1


def checksum(values: Tensor, start: int = 0) -> int:
    """The sum of `bits(element) * weight(position)`, modulo 2**64, of elements `start` and following of a tensor.

    Parts of a tensor add up (modulo 2**64) to the checksum of the whole. One wrong element always changes it.
    """
    words, weights, total = values.reshape(-1).view(_WORDS[values.itemsize]), _weights(), 0
    at, end = 0, words.numel()
    while at < end:
        block, column = divmod(start + at, _BLOCK)
        count = min(_BLOCK - column, end - at)
        part = torch.dot(words[at : at + count].to(torch.int64), weights[column : column + count])
        total += int(part) * (2 * block + 1)
        at += count
    return total & _MASK


def combine(*parts: int) -> int:
    """The checksum of a tensor from those of its parts."""
    return sum(parts) & _MASK
