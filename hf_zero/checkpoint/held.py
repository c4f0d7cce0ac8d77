"""What a rank holds of a model's weights: names of the state dict, units, and every element once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator

from torch import Tensor, nn

from hf_zero.core import guard
from hf_zero.core.flat_buffer import FlatBuffer
from hf_zero.core.master import MASTER
from hf_zero.core.unit import units_of


# (name in the state dict, first element, values, the buffer that they lie in; None for buffers of modules)
Held = tuple[str, int, Tensor, FlatBuffer | None]


def logical_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with the parameters themselves: nothing is read."""
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def held(
    model: nn.Module,
    within: Callable[[FlatBuffer], tuple[int, int] | None],
    names: Container[str] | None = None,
    *,
    chooses: Callable[[FlatBuffer, int], bool] = lambda buffer, index: True,
    write: bool = False,
    closed: bool = False,
    in_memory: bool | None = None,
) -> Iterator[Held]:
    """All that this rank holds, or of `names` only; of tied weights, the first name.

    `within` gives the elements of a flat buffer that are asked for (None: none), and `chooses` says of which
    parameters. What modules have in buffers of their own comes with the shape that it has. Elements of parameters are
    counted in the whole tensor. Values are valid until the next are asked for; with `write`, what is left in
    them is kept. `closed` ones have shapes only. `in_memory` chooses what rests in memory, or what does not.
    """
    logical = logical_state(model)
    firsts = {id(tensor): name for name, tensor in reversed(logical.items())}
    firsts = {key: name for key, name in firsts.items() if names is None or name in names}
    for unit in units_of(model.parameters()):
        for buffer in unit.buffers:
            wanted = {
                index: firsts[id(param)]
                for index, param in enumerate(buffer.params)
                if id(param) in firsts and chooses(buffer, index)
            }
            bounds = within(buffer) if wanted else None
            if bounds is None:
                continue
            for index, start, values in _exact(buffer, *bounds, write=write, closed=closed, in_memory=in_memory):
                if index in wanted:
                    for at, part in buffer.parts.placed(index, start, values):
                        yield wanted[index], at, part, buffer
    for name, tensor in logical.items() if in_memory is not False else ():
        if firsts.get(id(tensor)) == name and not guard.is_prepared(tensor):
            yield name, 0, tensor.detach(), None


def is_first(buffer: FlatBuffer, index: int) -> bool:
    """For `held`: whether this is the first of the tensor-parallel ranks that hold the same of a parameter."""
    return buffer.parts[index].first


def counts(buffer: FlatBuffer, index: int) -> bool:
    """For `held`: whether this is the first of all ranks that keep the same exact values of a parameter."""
    return buffer.is_first_owner and is_first(buffer, index)


def own_slice(buffer: FlatBuffer) -> tuple[int, int] | None:
    """For `held`: over all ranks every element once; what is replicated is shared out by slices, too."""
    topology = buffer.mesh.topology
    if topology.place_of(topology.rank)[0] != 0:
        return None  # the first replica has all
    return buffer.layout.slice_bounds(topology.slice_of(topology.rank))


def _spans(
    buffer: FlatBuffer, low: int, high: int, kept: Iterable[tuple[int, int, Tensor]]
) -> Iterator[tuple[int, int, Tensor]]:
    """(parameter, first element, values) of what is `kept` in [low, high)."""
    for start, stop, values in kept:
        begin, end = max(low, buffer.begin + start), min(high, buffer.begin + stop)
        offset = begin - buffer.begin - start
        for span in buffer.layout.spans(begin, end):
            at = offset + span.offset
            yield span.index, span.start, values[at : at + span.numel]


def _exact(
    buffer: FlatBuffer, low: int, high: int, *, write: bool, closed: bool, in_memory: bool | None
) -> Iterator[tuple[int, int, Tensor]]:
    """(parameter, first element, values) of the best values in [low, high), and of all masters that this rank owns.

    Where every rank has all matrices, only those in [low, high), too.
    """
    kept = buffer.exact(write=write, closed=closed, in_memory=in_memory)
    if buffer.owned is None:
        yield from _spans(buffer, low, high, kept)
        return
    away = buffer.owned.ownership.params
    for index, start, values in _spans(buffer, low, high, kept):
        if index not in away:
            yield index, start, values
    for run in buffer.resting.runs:
        if in_memory in (None, run.keeps_memory):
            with contextlib.nullcontext() if closed else run.open(write=write, kinds=(MASTER,)):
                for span in run.spans():
                    yield span.index, span.start, run.values[span.offset : span.offset + span.numel]
    for index, matrix in buffer.owned.matrices.items():
        if in_memory in (None, matrix.keeps_memory):
            begin, end = (low, high) if len(buffer.owned.ownership.slices) == 1 else (matrix.start, matrix.stop)
            with contextlib.nullcontext() if closed else matrix.open(write=write, kinds=(MASTER,)):
                for span in buffer.layout.spans(max(begin, matrix.start), min(end, matrix.stop)):
                    yield index, span.start, matrix.values.view(-1)[span.start : span.start + span.numel]
