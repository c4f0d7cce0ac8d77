"""Activations: what gradient checkpoints keep of a forward pass rests elsewhere until its layers are recomputed.

[Note: what is taken] `torch.utils.checkpoint` saves the inputs of a layer where autograd's default hooks for saved
tensors see it; what is computed inside of the checkpoint it keeps from them. So hooks that are set around the call of
the model are shown these inputs, and besides only what is saved outside of all checkpoints. That stays where it is:
logits and losses are needed at once. The two are told apart by who saves them, as torch says nothing else of it.

[Note: ownership] Copies to a host and back go on while the device computes. What is on its way belongs to the courier,
and then to the `_Activation`: memory that a copy still writes to is given up behind the copy only, whoever drops it.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import deque
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_zero.core.homes import Home, Shelf
from hf_zero.core.hooks import Hook, in_backward
from hf_zero.errors import ZeroRuntimeError


_CHECKPOINT, _FUNCTION = (inspect.getfile(module) for module in (torch.utils.checkpoint, torch.autograd.function))
_KIND = "activation"
_AHEAD = 2  # inputs that are read while a layer is recomputed


class Activations:
    """Has the inputs of the checkpointed layers of a model rest in `home`, whose device may be the model's own.

    They are taken from there to `device` bit for bit, with the strides that they had. Forward begins to write what it
    leaves, and backward reads ahead in the opposite order.
    """

    def __init__(self, home: Home, device: torch.device) -> None:
        self._home, self._device = home, device
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._last: weakref.ref[_Activation] | None = None
        self._gone: deque[_Left] = deque()  # of activations that autograd has dropped, in whatever thread
        self._seen: set[bool] = set()  # whether checkpoints, and whether others, have saved tensors

    def follow(self, model: nn.Module) -> list[RemovableHandle]:
        """Act in calls of `model` from now on; the handles undo it."""
        return [
            model.register_forward_pre_hook(Hook(torch.compiler.disable(self._enter))),
            model.register_forward_hook(Hook(torch.compiler.disable(self._leave)), always_call=True),
        ]

    def _enter(self, model: nn.Module, args: tuple) -> None:
        self._clear_up()
        if torch.is_grad_enabled() and not in_backward() and self._hooks is None:
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, self._restore)
            self._hooks.__enter__()

    def _leave(self, model: nn.Module, args: tuple, output: object) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is None:
            return
        hooks.__exit__()
        if self._seen == {False} and model.training and output is not None:
            raise ZeroRuntimeError(
                "offload_activations_device is set, and nothing is there to be offloaded: it is the inputs of "
                f"checkpointed layers, and {type(model).__name__} checkpoints none. Set gradient_checkpointing in the "
                "training arguments (model.gradient_checkpointing_enable()), or offload_activations_device to none"
            )

    def _save(self, tensor: Tensor) -> _Activation | tuple[Tensor, int]:
        of_checkpoint = _is_saved_by_checkpoint()
        self._seen.add(of_checkpoint)
        if not of_checkpoint or self._home.is_near or not _can_rest(tensor) or tensor.numel() < self._home.least:
            return tensor, tensor._version
        self._clear_up()
        before = None if self._last is None else self._last()
        activation = _Activation(tensor, self._home, self._device, before, self._gone)
        self._last = weakref.ref(activation)
        return activation

    def _restore(self, saved: _Activation | tuple[Tensor, int]) -> Tensor:
        if isinstance(saved, _Activation):
            self._clear_up()
            return saved.fetch()
        tensor, version = saved
        if tensor._version != version:  # torch leaves this to the hooks where there are any
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tensor.type()} {list(tensor.shape)} is at version {tensor._version}; expected version {version}"
            )
        return tensor

    def _clear_up(self) -> None:
        while self._gone:
            shelf, coming = self._gone.popleft()
            if coming is not None:
                self._home.courier.join()  # what the device is told next may be given this memory
            if shelf is not None:
                shelf.leave()


_Left = tuple[Shelf | None, Tensor | None]  # what rests, and what is on its way back


class _Activation:
    """One tensor at rest, for as long as autograd knows it (see [Note: ownership])."""

    def __init__(
        self, tensor: Tensor, home: Home, device: torch.device, before: _Activation | None, gone: deque[_Left]
    ) -> None:
        self._size, self._stride, self._gone = tensor.size(), tensor.stride(), gone
        self._home, self._device = home, device
        self._before = None if before is None else weakref.ref(before)
        self._shelf: Shelf | None = None  # until it has arrived
        self._coming: Tensor | None = None  # on the device, when `courier.join` says so
        with torch.no_grad():
            flat = tensor.detach().as_strided((tensor.numel(),), (1,))
            self._kept: Tensor | None = torch.empty(flat.shape, dtype=flat.dtype, device=home.device)
            home.courier.down(flat, self._take)

    def __del__(self) -> None:
        if hasattr(self, "_coming"):
            self._gone.append((self._shelf, self._coming))

    def _take(self, at: int, values: Tensor) -> None:
        """Take over a part that has arrived."""
        assert self._kept is not None, "the last part has not come"
        with torch.no_grad():
            self._kept[at : at + values.numel()] = values
        if at + values.numel() == self._kept.numel():
            self._shelf, self._kept = self._home.shelf(self._kept.numel(), {_KIND: self._kept}), None

    def fetch(self) -> Tensor:
        """The tensor in memory of its own. Raises ZeroRuntimeError where it cannot be read."""
        self._begin_up()
        self._home.courier.join()
        flat, self._coming = self._coming, None
        assert flat is not None
        earlier: _Activation | None = self
        for number in range(_AHEAD):
            earlier = earlier._before() if earlier is not None and earlier._before is not None else None
            if earlier is not None and number == 0 and self._home.courier.crosses and self._home.keeps_memory:
                earlier._begin_up()  # while the layer is recomputed
            elif earlier is not None and earlier._shelf is not None:
                earlier._shelf.begin_fetch()
        return flat.as_strided(self._size, self._stride)

    def _begin_up(self) -> None:
        if self._coming is not None:
            return
        if self._shelf is None:
            self._home.courier.land()
        assert self._shelf is not None, "it has arrived"
        with self._shelf.open() as flats, torch.no_grad():
            self._coming = torch.empty(flats[_KIND].shape, dtype=flats[_KIND].dtype, device=self._device)
            self._home.courier.up(self._coming, flats[_KIND])


def _can_rest(tensor: Tensor) -> bool:
    """Whether it is a plain tensor of numbers that fill a piece of memory without gaps."""
    return (
        type(tensor) is Tensor
        and tensor.is_floating_point()
        and tensor.numel() > 0
        and torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    )


def _is_saved_by_checkpoint() -> bool:
    """Whether the tensor that autograd saves now is an input of `torch.utils.checkpoint`, and not of an operation."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == _FUNCTION:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == _CHECKPOINT
