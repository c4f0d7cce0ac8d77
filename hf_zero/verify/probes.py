"""What is seen at the doors of a model: its inputs, the random numbers to come, and what each module makes of them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """The generators of torch: of the host, and of the device where there is one."""
    if device.type == "cpu":
        return (torch.get_rng_state(),)
    return torch.get_rng_state(), torch.get_device_module(device.type).get_rng_state(device)


def set_random_state(state: tuple[Tensor, ...], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.get_device_module(device.type).set_rng_state(state[1], device)


def fingerprint(value: Any) -> str:
    """A hash of all tensors in nested containers, of their shapes and dtypes and of the names they go by."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(_tensors(value, "")):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _tensors(item, f"{name}/{number}")


@dataclass
class Entry:
    """How a model was called: what it was given, and where the generators stood, as fingerprints."""

    inputs: list[str] = field(default_factory=list)
    random: list[str] = field(default_factory=list)


@contextlib.contextmanager
def watched_entry(model: nn.Module, device: torch.device) -> Iterator[Entry]:
    """Inside, notes every call of `model`."""
    entry = Entry()

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        entry.inputs.append(fingerprint([*args, kwargs] if args else kwargs))
        entry.random.append(fingerprint(random_state(device)))

    handle = model.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
    try:
        yield entry
    finally:
        handle.remove()


@dataclass
class Event:
    """One call of one module: where the generators stood, the own parameters, what it was given and returned."""

    name: str
    random: str
    params: dict[str, Tensor]
    inputs: list[Tensor]
    outputs: list[Tensor]


@contextlib.contextmanager
def recorded(model: nn.Module, device: torch.device) -> Iterator[list[Event]]:
    """Inside, notes every call of every module, in the order in which they return."""
    events: list[Event] = []
    begun: list[tuple[str, list[Tensor]]] = []
    handles = []

    def begin(module: nn.Module, args: tuple, kwargs: dict) -> None:
        begun.append((fingerprint(random_state(device)), _copies([args, kwargs])))

    def end(name: str, module: nn.Module, output: Any) -> None:
        state, inputs = begun.pop()
        params = {
            key: param.detach().float().clone() for key, param in module._parameters.items() if param is not None
        }
        events.append(Event(name, state, params, inputs, _copies(output)))

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(lambda m, args, out, name=name: end(name, m, out)))
    try:
        yield events
    finally:
        for handle in handles:
            handle.remove()


def _copies(value: Any) -> list[Tensor]:
    return [tensor.detach().clone() for _, tensor in _tensors(value, "") if tensor.is_floating_point()]
