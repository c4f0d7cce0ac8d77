"""Differences between two systems, each beside the rounding that explains it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor


ULP = 2.0**-23  # of fp32
# Kernels may add in another order where tensors lie elsewhere in memory: what they make differs by a few roundings.
KERNEL = 16 * ULP
ROUNDING = {"no": KERNEL, "bf16": 2.0**-7, "fp16": 2.0**-9}  # of what a model computes in that precision


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A difference that its bound does not explain."""

    where: str
    difference: float
    bound: float


@dataclass(kw_only=True)
class Measure:
    """The largest difference that was met for one promise, and whether all values had the same bits."""

    promise: str
    explained: str  # why the bound is what it is
    largest: float = 0.0
    bound: float = 0.0
    where: str = ""
    compared: int = 0
    bitwise: bool = True
    mismatch: Mismatch | None = field(default=None, repr=False)

    def numbers(self, mine: float, theirs: float, bound: float, where: str) -> None:
        """Compare two numbers; `bound` is absolute."""
        same = mine == theirs or (math.isnan(mine) and math.isnan(theirs))
        self._note(0.0 if same else abs(mine - theirs), bound, where, same)

    def tensors(self, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], bounds: Mapping[str, float]) -> None:
        """Compare by name; one that is missing counts as zeros."""
        for name in dict.fromkeys([*theirs, *mine]):
            a, b = mine.get(name), theirs.get(name)
            a, b = (torch.zeros_like(b) if a is None else a), (torch.zeros_like(a) if b is None else b)
            if a.shape != b.shape:
                self._note(math.inf, 0.0, name, False)
            elif a.numel():
                same = torch.equal(a, b)
                apart = 0.0 if same else (a - b).abs().max().item()
                self._note(apart, bounds.get(name, 0.0), name, same or (a.isnan() == b.isnan()).all() and apart == 0)

    def apart(self, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], bound: float) -> list[str]:
        """Compare 2-norms over all tensors: of the difference, relative to that of `theirs`, as codecs are judged.

        Returns the tensors that are further apart than the bound themselves; the worst one is named.
        """
        shares, wrong, whole = {}, 0.0, 0.0
        for name, right in theirs.items():
            apart = (mine[name] - right).double().square().sum().item() if name in mine else math.inf
            size = right.double().square().sum().item()
            shares[name] = math.sqrt(apart / size) if size else math.inf if apart else 0.0
            wrong, whole = wrong + apart, whole + size
        error = math.sqrt(wrong / whole) if whole else math.inf if wrong else 0.0
        where = max(shares, key=lambda name: shares[name], default="")
        self._note(error, bound, where, error == 0)
        return [name for name, share in shares.items() if not share <= bound]

    def _note(self, difference: float, bound: float, where: str, same: bool) -> None:
        self.compared += 1
        self.bitwise = self.bitwise and bool(same)
        failed = not difference <= bound and not same  # nan fails
        if failed and (self.mismatch is None or _times(difference, bound) > _times_of(self.mismatch)):
            self.mismatch = Mismatch(where=where, difference=difference, bound=bound)
        if not self.where or _times(difference, bound) > _times(self.largest, self.bound):
            self.largest, self.bound, self.where = difference, bound, where

    def to_dict(self) -> dict:
        return {key: value for key, value in asdict(self).items() if key != "mismatch"}


def _times(difference: float, bound: float) -> float:
    return difference / bound if bound else (math.inf if difference else 0.0)


def _times_of(mismatch: Mismatch) -> float:
    return _times(mismatch.difference, mismatch.bound)


def gradient_bounds(sizes: Mapping[str, Tensor], summands: int, wire: float = 0.0) -> dict[str, float]:
    """How far sums of the same numbers in another order may be apart, for each parameter.

    Each of `summands` additions rounds to one part in 2**24 of what has been added up so far, which is at most
    `sizes`, the sum of absolute values; `wire` is the relative rounding of what ranks send (2**-8 for bf16).
    """
    largest = {name: size.abs().max().item() if size.numel() else 0.0 for name, size in sizes.items()}
    floor = KERNEL * max(largest.values(), default=0.0) / 16
    return {name: (summands * ULP + KERNEL + wire) * value + floor for name, value in largest.items()}


def update_bounds(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, float]:
    """What the rounding of an elementwise step may change: of the weight itself, and of its update."""
    bounds = {}
    for name, value in after.items():
        moved = (value - before[name]).abs().max().item() if value.numel() else 0.0
        bounds[name] = 2 * ULP * (value.abs().max().item() if value.numel() else 0.0) + KERNEL * moved
    return bounds
