"""Whether a file of training state fits a model and its optimizers: parameters, shapes, classes and groups."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from hf_zero.checkpoint.safetensors_file import SlicedFile
from hf_zero.core.elementwise import state_kinds, state_names
from hf_zero.core.flat_buffer import FlatBuffer
from hf_zero.errors import ZeroCheckpointError, first_few


FORMAT, VERSION = "hf_zero", 1
MASTER = "master"
# The names of the parameters of every group.
Groups = list[list[str]]


def open_state(path: Path) -> SlicedFile:
    """The layout of a file of training state. Raises ZeroCheckpointError where it is none that this version reads."""
    if not path.exists():
        raise ZeroCheckpointError(f"{path} does not exist: {path.parent} holds no training state of hf_zero")
    file = SlicedFile.open(path)
    if file.metadata.get("format") != FORMAT:
        raise ZeroCheckpointError(f"{path} was not written by hf_zero: its header does not say so")
    version = int(file.metadata.get("version", 1))
    if version > VERSION:
        raise ZeroCheckpointError(f"{path} has version {version}, this hf_zero reads up to {VERSION}: update hf_zero")
    return file


def kinds_in(file: SlicedFile) -> dict[str, dict[str, torch.dtype]]:
    """For every parameter the kinds of optimizer state that the file has, and their dtypes."""
    kinds: dict[str, dict[str, torch.dtype]] = {}
    for tensor, (dtype, _) in file.tensors.items():
        parameter, _, kind = tensor.rpartition(".")
        if kind != MASTER:
            kinds.setdefault(parameter, {})[kind] = dtype
    return kinds


def options_for(group: Mapping[str, object], described: Mapping[str, dict]) -> dict[str, object]:
    """The saved options of a group, as `group` has them: JSON knows no tuples."""
    saved = described["options"].items()
    return {key: tuple(value) if isinstance(group.get(key), tuple) else value for key, value in saved}


def check_parameters(file: SlicedFile, buffers: Iterable[FlatBuffer], path: Path) -> set[str]:
    """The trained parameters whose masters the file leaves out.

    Raises ZeroCheckpointError where the file is of other parameters or shapes.
    """
    known, names = set(json.loads(file.metadata["parameters"])), set()
    shapes: dict[str, tuple[int, ...]] = {}
    for buffer in buffers:
        names.update(buffer.names)
        if buffer.trainable:
            shapes.update({name: buffer.parts[index].shape for index, name in enumerate(buffer.names)})
    problems = {name: f"'{name}' is missing" for name in shapes.keys() - known}
    problems |= {name: f"the model has no parameter '{name}' of its own" for name in known - names}
    whole = json.loads(file.metadata.get("whole", "{}"))  # of which states may have any shape
    for tensor, (_, shape) in file.tensors.items():
        name, _, kind = tensor.rpartition(".")
        if kind != MASTER and name in whole:
            continue
        if shapes.get(name, shape) != shape:
            problems.setdefault(name, f"'{name}' has shape {shape}, the model's is {shapes[name]}")
    if problems:
        shown = first_few((problem for _, problem in sorted(problems.items())), "; ")
        raise ZeroCheckpointError(f"{path} does not fit the model: {shown}")
    return {name for name in shapes if f"{name}.{MASTER}" not in file.tensors}


def check_optimizers(
    file: SlicedFile, optimizers: list[torch.optim.Optimizer], members: list[Groups], path: Path
) -> None:
    """Raise ZeroCheckpointError unless the file holds the state of these optimizers and of their `members`."""
    saved = json.loads(file.metadata["optimizers"])
    if len(saved) != len(optimizers):
        raise ZeroCheckpointError(f"{path} holds the state of {len(saved)} optimizers, this run has {len(optimizers)}")
    # Older files, and those made of other systems' checkpoints, lack one or the other.
    classes = json.loads(file.metadata.get("classes", "null")) or [None] * len(saved)
    written = json.loads(file.metadata["extra"]).get("members", members)
    trained = set(json.loads(file.metadata["parameters"]))
    for number, optimizer in enumerate(optimizers):
        name, groups = type(optimizer).__name__, saved[number]
        if classes[number] not in (None, name):
            raise ZeroCheckpointError(
                f"{path} holds the state of {classes[number]}, this run's optimizer is {name}: build the same one. To "
                "go on from the weights with another optimizer, load them as a model instead of resuming"
            )
        if len(groups) != len(optimizer.param_groups):
            raise ZeroCheckpointError(
                f"{path} holds {len(groups)} optimizer groups, this run's {name} has "
                f"{len(optimizer.param_groups)}: build the optimizer with the same groups"
            )
        _check_members(written[number], members[number], trained, f"{path} does not fit the groups of {name}")
        kinds = kinds_in(file) if classes[number] is None else {}
        for group, described, names in zip(optimizer.param_groups, groups, members[number], strict=True):
            found = {kind for name in names for kind in kinds.get(name, ())}
            check_kinds(found, optimizer, options_for(group, described), path)


def _check_members(theirs: Groups, ours: Groups, trained: set[str], what: str) -> None:
    """Raise where a trained parameter is in another group than it was."""
    was, now = ({name: i for i, names in enumerate(groups) for name in names} for groups in (theirs, ours))
    moved = sorted(name for name in trained if was.get(name) != now.get(name))
    if moved:
        then, here = (f"group {i[moved[0]]}" if moved[0] in i else "none of its groups" for i in (was, now))
        more = f"; {len(moved) - 1} more differ" if len(moved) > 1 else ""
        raise ZeroCheckpointError(f"{what}: '{moved[0]}' was in {then} and is in {here}{more}")


def check_kinds(found: set[str], optimizer: torch.optim.Optimizer, options: Mapping[str, object], path: Path) -> None:
    """Raise where a group with these options has other states per element than `optimizer` keeps, if it has any."""
    wanted = state_kinds(optimizer, options) if found else found
    if found != wanted:
        raise _other_states(found, wanted, optimizer, path)


def check_whole(
    found: set[str], dims: int, optimizer: torch.optim.Optimizer, options: Mapping[str, object], path: Path
) -> None:
    """Raise where a tensor of so many dimensions, stepped whole, lacks states that `optimizer` keeps.

    It may have more: some states are for large tensors only.
    """
    wanted = state_names(optimizer, options, dims) if found else found
    if not wanted <= found:
        raise _other_states(found, wanted, optimizer, path)


def _other_states(
    found: set[str], wanted: set[str], optimizer: torch.optim.Optimizer, path: Path
) -> ZeroCheckpointError:
    return ZeroCheckpointError(
        f"{path} holds the states {sorted(found)}, and {type(optimizer).__name__} keeps {sorted(wanted)}: build "
        "the optimizer that was saved"
    )
