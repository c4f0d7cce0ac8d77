"""How values come about, noted so that they can be made again: operations, with the state of the random generator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hf_zero.core.heap import heap


@dataclass(frozen=True)
class Place:
    """A tensor among the arguments of a step: where it lies in which storage, and what had been done to that."""

    storage: int
    nbytes: int
    history: tuple[Step, ...]
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class Step:
    """One operation that is to be repeated; `made` are the storages of its results, None for one that is no tensor."""

    number: int
    func: Any
    args: tuple
    kwargs: dict
    state: Tensor | None  # of the generator, before the operation
    made: list[int | None] = field(default_factory=list)

    @property
    def places(self) -> list[Place]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Place)]

    def run(self, args: tuple, kwargs: dict) -> object:
        if self.state is None:
            return self.func(*args, **kwargs)
        generator = generator_of(kwargs)
        before = generator.get_state()
        generator.set_state(self.state)
        try:
            return self.func(*args, **kwargs)
        finally:
            generator.set_state(before)


def generator_of(kwargs: dict) -> torch.Generator:
    return kwargs.get("generator") or torch.default_generator


def _steps_of(history: Iterable[Step]) -> list[Step]:
    """Everything that has to be done for the values that `history` leaves, in order."""
    found: dict[int, Step] = {}
    todo = list(history)
    while todo:
        step = todo.pop()
        if step.number not in found:
            found[step.number] = step
            todo.extend(earlier for place in step.places for earlier in place.history)
    return [found[number] for number in sorted(found)]


def repeat(history: Iterable[Step], storage: int, target: Tensor) -> None:
    """Fill `target`, the bytes of a storage, with what `history` made of the storage called `storage`."""
    steps = _steps_of(history)
    last = {place.storage: step.number for step in steps for place in step.places}
    last.update({made: step.number for step in steps for made in step.made if made not in last})
    buffers = {storage: target}

    def tensor_at(leaf: object) -> object:
        if not isinstance(leaf, Place):
            return leaf
        if leaf.storage not in buffers:
            buffers[leaf.storage] = torch.empty(leaf.nbytes, dtype=torch.uint8)
        return buffers[leaf.storage].view(leaf.dtype).as_strided(leaf.size, leaf.stride, leaf.offset)

    for step in steps:
        out = step.run(tree_map(tensor_at, step.args), tree_map(tensor_at, step.kwargs))
        for made, leaf in zip(step.made, tree_leaves(out), strict=bool(step.made)):
            if made is not None and made != storage:
                buffers[made] = bytes_of(leaf.untyped_storage())
            elif made is not None:
                target.copy_(bytes_of(leaf.untyped_storage()))
        del out
        for name in [name for name, number in last.items() if number == step.number and name != storage]:
            buffers.pop(name, None)


def bytes_of(memory: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(memory)


@dataclass(frozen=True)
class Replay:
    """How the values of a parameter come about; a `deferred.Source`."""

    history: tuple[Step, ...]
    storage: int
    numel: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        assert self.history, "values that nothing has made cannot be made again"

    def read(self, start: int, target: Tensor) -> None:
        with torch.no_grad():
            values = torch.empty(self.numel, dtype=self.dtype)
            repeat(self.history, self.storage, values.view(torch.uint8))
            target.copy_(values[start : start + target.numel()])
            nbytes = values.nbytes
            del values
            heap.has_freed(nbytes)

    @property
    def ingredients(self) -> list[Tensor]:
        """What differs where the seed does: states of the generator, and tensors that were computed elsewhere."""
        found = []
        for step in _steps_of(self.history):
            found += [] if step.state is None else [step.state]
            found += [leaf for leaf in tree_leaves((step.args, step.kwargs)) if isinstance(leaf, Tensor)]
        return found
