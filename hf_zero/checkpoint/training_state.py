"""Training state on disk: one logical tensor per parameter and optimizer state, whatever the sharding was."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hf_zero.checkpoint import commit, whole_states
from hf_zero.checkpoint.background import SaveJob
from hf_zero.checkpoint.held import counts
from hf_zero.checkpoint.safetensors_file import Part, SlicedFile
from hf_zero.checkpoint.staging import add_up, on_all_ranks, stage
from hf_zero.checkpoint.state_checks import (
    FORMAT,
    MASTER,
    VERSION,
    check_optimizers,
    check_parameters,
    kinds_in,
    open_state,
    options_for,
)
from hf_zero.comm.communicator import Communicator
from hf_zero.core.binding import Binding
from hf_zero.core.flat_buffer import FlatBuffer
from hf_zero.core.master import MasterShard


STATE_NAME = "zero_state.safetensors"


def save_state(
    folder: str | Path,
    buffers: Iterable[FlatBuffer],
    bindings: Iterable[Binding],
    job: SaveJob,
    name: str = STATE_NAME,
    stored: Container[int] = (),
    extra: Mapping[str, object] | None = None,
) -> dict[str, int]:
    """Write masters and optimizer state of all trained parameters to one file in `folder`; a collective.

    Tensors are called `<parameter>.master`, `<parameter>.exp_avg` and so on; group options and scalar states (step
    counts) are JSON in the header. `stored` has the `id` of parameters whose masters are stored elsewhere; `extra` is
    kept with the file. No step may be owed. Returns the checksums of the tensors, which are there when the job is
    done: for a thread, the values are only copied. Raises ZeroCheckpointError on all ranks when one of them cannot
    write.
    """
    comm = job.comm
    buffers, bindings = list(buffers), list(bindings)
    members, optimizers = members_of(buffers, bindings), [binding.optimizer for binding in bindings]
    buffers = [buffer for buffer in buffers if buffer.trainable]
    # A rank may own nothing of a group; what its state holds is the same on all ranks that do.
    kinds, whole = _agreed_kinds(buffers, optimizers, comm)
    tensors = {}
    for buffer in buffers:
        for parameter, param in zip(buffer.names, buffer.params, strict=True):
            for kind, found in kinds[parameter].items():
                if kind != MASTER or id(param) not in stored:
                    tensors[f"{parameter}.{kind}"] = found
    metadata = header(
        _agreed_options(optimizers, buffers, comm),
        {**(extra or {}), "members": members},
        [parameter for buffer in buffers for parameter in buffer.names],
        [type(optimizer).__name__ for optimizer in optimizers],
        whole,
    )
    file = SlicedFile(tensors, metadata)

    def parts(*, closed: bool = False, in_memory: bool | None = None) -> Iterator[Part]:
        access: Literal["read"] | None = None if closed else "read"
        for tensor, start, values in _parts(buffers, optimizers, counts, access, in_memory):
            if tensor in tensors:
                yield name, tensor, start, values

    staged = stage(Path(folder), {name: file}, parts, job)
    job.perform(staged.commit)
    return staged.sums


def header(
    optimizers: list[list[dict]],
    extra: Mapping[str, object],
    parameters: Iterable[str],
    classes: Iterable[str | None] | None = None,
    whole: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """The metadata of the file: options and scalar states per optimizer and group, and the trained parameters.

    `classes` are the names of the optimizers' classes, where they are known; `whole` says for parameters that were
    stepped whole what the optimizer keeps (see `whole_states.describe`).
    """
    return {
        "format": FORMAT,
        "version": str(VERSION),
        "optimizers": json.dumps(optimizers),
        "classes": json.dumps(list(classes or [None] * len(optimizers))),
        "extra": json.dumps(dict(extra)),
        "parameters": json.dumps(list(parameters)),
        "whole": json.dumps(dict(whole or {})),
    }


def members_of(buffers: Iterable[FlatBuffer], bindings: Iterable[Binding]) -> list[list[list[str]]]:
    """The names of the parameters of every optimizer and group, in the order in which the optimizer was given them."""
    names = {param: name for buffer in buffers for name, param in zip(buffer.names, buffer.params, strict=True)}
    return [[[names[param] for param in params] for params in binding.groups] for binding in bindings]


def load_state(
    folder: str | Path,
    buffers: Iterable[FlatBuffer],
    bindings: Iterable[Binding],
    comm: Communicator,
    name: str = STATE_NAME,
) -> tuple[set[str], dict]:
    """Read what `save_state` wrote, at any world size and stage; every rank reads its own byte ranges only.

    Returns the names of the parameters whose masters the file leaves out (they stand in the model's own files), and
    what was given as `extra`. Raises ZeroCheckpointError, on all ranks, where the file is of other parameters, shapes,
    optimizers or groups, before anything is changed; and where a tensor is not what was saved.
    """
    path = Path(folder) / name
    buffers, bindings = list(buffers), list(bindings)
    trained, optimizers = [buffer for buffer in buffers if buffer.trainable], [each.optimizer for each in bindings]
    missing: set[str] = set()
    sums: dict[str, int] = {}
    extra: dict[str, object] = {}

    def read() -> None:
        file = open_state(path)
        extra.update(json.loads(file.metadata["extra"]))
        saved = json.loads(file.metadata["optimizers"])
        missing.update(check_parameters(file, buffers, path))
        check_optimizers(file, optimizers, members_of(buffers, bindings), path)
        for optimizer, options in zip(optimizers, saved, strict=True):
            _restore_options(optimizer, options)
        kinds = kinds_in(file)
        for buffer in trained:
            for optimizer in optimizers:
                _make_states(kinds, buffer, optimizer)
                _make_whole_states(file, buffer, optimizer)
        found = commit.checksums(Path(folder))
        for chooses, adds_to in ((counts, found), (lambda *which: not counts(*which), None)):
            parts = _in_file(file, trained, optimizers, chooses, "write")
            file.read(path, parts, adds_to, _in_file(file, trained, optimizers, chooses, None))
        sums.update(found or {})

    on_all_ranks(comm, read)
    commit.compare_sums(Path(folder), name, add_up(comm, sums))
    return missing, extra


def _in_file(
    file: SlicedFile,
    buffers: list[FlatBuffer],
    optimizers: list[torch.optim.Optimizer],
    chooses: Callable[[FlatBuffer, int], bool],
    access: Literal["write"] | None,
) -> Iterator[tuple[str, int, Tensor]]:
    for name, start, values in _parts(buffers, optimizers, chooses, access):
        if name in file.tensors:
            yield name, start, values


def _states(shard: MasterShard, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The flat tensors that belong to a shard, by kind."""
    flats = {MASTER: shard.values}
    for optimizer in optimizers:
        flats.update(shard.flats_in(optimizer.state.get(shard.weight, {})))
    return flats


def _whole_states(
    matrix: MasterShard, name: str, optimizers: list[torch.optim.Optimizer]
) -> tuple[Any, dict[str, Tensor]]:
    """What is kept for a whole matrix: described, and the tensors by kind."""
    kept = {kind: value for each in optimizers for kind, value in each.state.get(matrix.weight, {}).items()}
    described, tensors = whole_states.describe(kept, name)
    return described, {MASTER: matrix.values, **tensors}


def _agreed_kinds(
    buffers: list[FlatBuffer], optimizers: list[torch.optim.Optimizer], comm: Communicator
) -> tuple[dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]], dict[str, Any]]:
    """For every parameter the kinds of tensors it has, with dtypes and shapes, and a description of what is kept for
    those that are stepped whole; the same on every rank.
    """
    mine: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
    whole: dict[str, Any] = {}
    for buffer in buffers:
        for shard in buffer.resting.flats:
            flats = {kind: flat.dtype for kind, flat in _states(shard, optimizers).items()}
            for span in shard.spans():
                shape = buffer.parts[span.index].shape
                mine[buffer.names[span.index]] = {kind: (dtype, shape) for kind, dtype in flats.items()}
        for name, matrix in _matrices(buffer):
            whole[name], tensors = _whole_states(matrix, name, optimizers)
            mine[name] = {kind: (tensor.dtype, tuple(tensor.shape)) for kind, tensor in tensors.items()}
    # Nobody owns a part of what has no elements.
    merged: dict[str, dict] = {name: {} for buffer in buffers for name in buffer.names}
    described: dict[str, Any] = {}
    for kinds, theirs in comm.all_gather_object((mine, whole)):
        merged.update(kinds)
        described.update(theirs)
    return merged, described


def _matrices(buffer: FlatBuffer) -> list[tuple[str, MasterShard]]:
    """The whole matrices that this rank owns, with the names of the parameters."""
    owned = {} if buffer.owned is None else buffer.owned.matrices
    return [(buffer.names[index], matrix) for index, matrix in owned.items()]


def _parts(
    buffers: list[FlatBuffer],
    optimizers: list[torch.optim.Optimizer],
    chooses: Callable[[FlatBuffer, int], bool],
    access: Literal["read", "write"] | None,
    in_memory: bool | None = None,
) -> Iterator[tuple[str, int, Tensor]]:
    """(tensor name, first element, values) of everything this rank owns of the parameters that `chooses` says.

    Values are valid until the next are asked for; without `access` they have shapes only. `in_memory` as in
    `staging.Parts`.
    """
    for buffer in buffers:
        chosen = {index for index in range(len(buffer.params)) if chooses(buffer, index)}
        if not chosen:
            continue
        for shard in (shard for shard in buffer.resting.flats if in_memory in (None, shard.keeps_memory)):
            with contextlib.nullcontext() if access is None else shard.open(write=access == "write"):
                for kind, flat in _states(shard, optimizers).items():
                    for span in shard.spans():
                        values = flat[span.offset : span.offset + span.numel]
                        placed = buffer.parts.placed(span.index, span.start, values) if span.index in chosen else ()
                        for at, part in placed:
                            yield f"{buffer.names[span.index]}.{kind}", at, part
        for name, matrix in _matrices(buffer):
            if in_memory in (None, matrix.keeps_memory):
                with contextlib.nullcontext() if access is None else matrix.open(write=access == "write"):
                    for kind, tensor in _whole_states(matrix, name, optimizers)[1].items():
                        yield f"{name}.{kind}", 0, tensor.reshape(-1)


def _agreed_options(
    optimizers: list[torch.optim.Optimizer], buffers: list[FlatBuffer], comm: Communicator
) -> list[list[dict]]:
    """`_options` of every optimizer, the same on every rank: one that owns nothing of a group has counted no steps."""
    flats = {id(shard.weight) for buffer in buffers for shard in buffer.resting.flats}
    first, *others = comm.all_gather_object([_options(optimizer, flats) for optimizer in optimizers])
    for other in others:
        for groups, theirs in zip(first, other, strict=True):
            for group, its in zip(groups, theirs, strict=True):
                group["scalars"] = {**its["scalars"], **group["scalars"]}
    return first


def _options(optimizer: torch.optim.Optimizer, flats: set[int]) -> list[dict]:
    """Per group: its options, and the scalar states (step counts) of those of its tensors whose `id` is in `flats`."""
    described = []
    for group in optimizer.param_groups:
        options = {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
        del options["params"]
        scalars: dict[str, object] = {}
        for weight in (weight for weight in group["params"] if id(weight) in flats):
            for kind, value in optimizer.state.get(weight, {}).items():
                if isinstance(value, Tensor) and value.dim() == 0:
                    scalars[kind] = {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
                elif not isinstance(value, Tensor):
                    scalars[kind] = value
        described.append({"options": options, "scalars": scalars})
    return described


def _restore_options(optimizer: torch.optim.Optimizer, saved: list[dict]) -> None:
    for group, described in zip(optimizer.param_groups, saved, strict=True):
        for key, value in options_for(group, described).items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
        for weight in group["params"]:
            for kind, value in described["scalars"].items():
                if isinstance(value, dict):
                    value = torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
                optimizer.state[weight][kind] = value


def _make_states(
    kinds: Mapping[str, Mapping[str, torch.dtype]], buffer: FlatBuffer, optimizer: torch.optim.Optimizer
) -> None:
    """Make room for the state tensors that the file has for this rank's part of the buffer."""
    adopted = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    for shard in buffer.resting.flats:
        weight = shard.weight
        if id(weight) not in adopted:
            continue
        spans = list(shard.spans())
        # A shard of padding only has the states of its group too: an optimizer expects all of them or none.
        indices = [span.index for span in spans] or [len(buffer.names) - 1]
        wanted = {kind: dtype for index in indices for kind, dtype in kinds.get(buffer.names[index], {}).items()}
        missing = wanted.keys() - optimizer.state.get(weight, {}).keys()
        if missing:
            with shard.open(write=True):
                for kind in sorted(missing):
                    values = torch.empty(shard.numel, dtype=wanted[kind], device=weight.device)
                    at = 0  # zeros where nothing will be read
                    for span in (span for span in spans if kind in kinds.get(buffer.names[span.index], {})):
                        values[at : span.offset] = 0
                        at = span.offset + span.numel
                    values[at:] = 0
                    optimizer.state[weight][kind] = values
                shard.keep(optimizer.state[weight])


def _make_whole_states(file: SlicedFile, buffer: FlatBuffer, optimizer: torch.optim.Optimizer) -> None:
    """Make room for what the file has for the whole matrices that this rank owns."""
    adopted = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    whole = json.loads(file.metadata.get("whole", "{}"))
    for name, matrix in _matrices(buffer):
        weight = matrix.weight
        if id(weight) not in adopted:
            continue
        # Files made of other systems' checkpoints have states by kind, and the scalars of groups, which are there.
        described = whole.get(name) or whole_states.of_kinds(kinds_in(file).get(name, ()))
        before = {} if name in whole else optimizer.state[weight]
        with matrix.open(write=True):
            state = whole_states.rebuild(described, functools.partial(_room, file, name, weight.device))
            optimizer.state[weight] = {**before, **state}
            matrix.keep(state)


def _room(file: SlicedFile, name: str, device: torch.device, kind: str) -> Tensor:
    dtype, shape = file.tensors[f"{name}.{kind}"]
    return torch.zeros(shape, dtype=dtype, device=device)
