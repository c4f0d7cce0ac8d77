"""Whole gradients for who reads `.grad`: fetched when one is used, written back with what was changed in them.

[Note: whole gradients] At rest a gradient lies in slices over the ranks, or in a sum that is not reduced yet. What
`.grad` answers is a view of a whole copy of a buffer's gradients. It has a shape at once and values from its first use
on, so that asking whether there is a gradient costs nothing. Loops change gradients in place (clipping, masking,
noise) in many ways (`mul_`, `_foreach_mul_`, `.data`, numpy), so before the engine uses gradients, the copy is written
back whether or not something was written to it. Once the engine has changed gradients the copy is outdated; what is
written to it from then on would be lost, and is an error at the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsIndex, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hf_zero.core import guard
from hf_zero.core.flat_buffer import FlatBuffer


class WholeGradient(Tensor):
    """A gradient as `.grad` hands it out: `.data` can be assigned, and copies of it are plain tensors."""

    @property
    def data(self) -> Tensor:
        return guard.DESCRIPTORS.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape:
            raise ValueError(f"cannot make {tuple(value.shape)} the data of a gradient of shape {tuple(self.shape)}")
        self.copy_(value)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        return self.clone().__reduce_ex__(protocol)

    __torch_function__: Any = torch._C._disabled_torch_function_impl


class GuardedGradient(WholeGradient):
    """One whose values are not fetched yet."""

    _zero_fetch: Callable[[str], None]

    def __repr__(self) -> str:  # type: ignore[override]  # the argument that torch adds is for containers
        # Printing on one rank must not start a collective that the others do not join.
        with torch._C.DisableTorchFunctionSubclass():
            return f"Gradient(not fetched yet, shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in guard.METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, GuardedGradient):
                leaf._zero_fetch(getattr(func, "__name__", str(func)))
                cast(WholeGradient, leaf).__class__ = WholeGradient
        return func(*args, **kwargs)


class WholeGradients:
    """A whole copy of the gradients of one buffer, in the dtype of its masters.

    Attributes:
        flat: the values, laid out as the buffer is; without bytes until they are fetched.
        fetched: whether they are.
        local: whether they are this rank's sums.
        replaced: parameters that another gradient was assigned to since.
    """

    def __init__(self, buffer: FlatBuffer) -> None:
        with torch.inference_mode(False):
            self.flat = torch.empty(
                buffer.layout.padded_numel, dtype=buffer.master_dtype, device=buffer.unsharded.device
            )
            self._views = buffer.views(self.flat)
        self.flat.untyped_storage().resize_(0)
        self.fetched = self.local = False
        self.replaced: set[int] = set()
        self._alone = self._references()
        self._version = 0

    def allocate(self) -> None:
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.itemsize)
        self.flat.zero_()
        self.fetched = True

    def values_of(self, index: int) -> Tensor:
        """The gradient of one parameter, flat."""
        return self._views[index].view(-1)

    def hand_out(self, index: int, fetch: Callable[[str], None]) -> Tensor:
        """The gradient of one parameter for a reader; `fetch(operation)` is called before its values are used."""
        view: Any = self._views[index].detach()  # a view could not be detached in place
        view.__class__ = WholeGradient if self.fetched else GuardedGradient
        view._zero_fetch = fetch
        return view

    def _references(self) -> int:
        return torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata)

    @property
    def in_use(self) -> bool:
        """Whether a reader still has some of it, by whatever alias."""
        return self._references() > self._alone

    def outdate(self) -> None:
        """The gradients are other ones from here on."""
        self._version = self.flat._version

    @property
    def changed_since(self) -> bool:
        """Whether a reader has written to it since it was outdated."""
        return self.flat._version != self._version
