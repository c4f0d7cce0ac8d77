"""Reads the weights of a saved folder into a prepared model: every rank only the byte ranges that it keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor, nn

from hf_zero.checkpoint import commit, held
from hf_zero.checkpoint.plan import INDEX_NAME, WEIGHTS_NAME, SavePlan, is_pretrained, plan_module, plan_pretrained
from hf_zero.checkpoint.safetensors_file import SlicedFile
from hf_zero.checkpoint.staging import add_up, on_all_ranks
from hf_zero.comm.communicator import Communicator
from hf_zero.core.flat_buffer import FlatBuffer
from hf_zero.errors import ZeroCheckpointError, first_few


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights as safetensors."""
    return (folder / WEIGHTS_NAME).is_file() or (folder / INDEX_NAME).is_file()


def weight_files(folder: Path) -> dict[str, str]:
    """The file of every tensor in a folder, or in one file. Raises ZeroCheckpointError where there are no weights."""
    if folder.is_file():
        return dict.fromkeys(SlicedFile.open(folder).tensors, folder.name)
    # Where both are there, transformers reads the one file, too.
    if (folder / WEIGHTS_NAME).is_file():
        return dict.fromkeys(SlicedFile.open(folder / WEIGHTS_NAME).tensors, WEIGHTS_NAME)
    if (folder / INDEX_NAME).is_file():
        return _read_index(folder / INDEX_NAME)
    raise ZeroCheckpointError(f"{folder} holds neither {WEIGHTS_NAME} nor {INDEX_NAME}")


def _read_index(path: Path) -> dict[str, str]:
    """The file of every tensor; raises ZeroCheckpointError where one is not beside the index."""
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        outside = sorted(name for name in set(files.values()) if Path(name).name != name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ZeroCheckpointError(f"{path} is no index of weight files: {error!r}") from error
    if outside:
        raise ZeroCheckpointError(f"{path} names '{outside[0]}', which is no file beside it")
    return files


def computed_weights(model: nn.Module) -> set[str]:
    """The weights that the model's files do not hold as they stand, but as something that a converter computes."""
    return {name for origin in _plan(model).computed.values() for name in origin.names}


def can_load(model: nn.Module) -> bool:
    """Whether the model's files hold its weights as they stand."""
    return not computed_weights(model)


def load_weights(
    model: nn.Module,
    folder: str | Path,
    comm: Communicator,
    wanted: Callable[[str], bool] = lambda name: True,
    plan: SavePlan | None = None,
    rest: bool = False,
) -> None:
    """Fill weights and module buffers from a saved folder or file; call it on all ranks, with the units resting.

    `wanted(name)` chooses by names of the state dict; `plan` is the one that the files were written by, if not the
    model's own. With `rest`, tensors that are not wanted are compared, too, each by one rank. Raises
    ZeroCheckpointError, on all ranks, where a tensor is missing or has another shape, and ZeroDamageError where it is
    not what was saved.
    """
    folder, plan = Path(folder), plan or _plan(model)
    home = folder.parent if folder.is_file() else folder
    names = {name for name, first in plan.aliases.items() if wanted(first)}
    files: dict[str, str] = {}
    sums: dict[str, int] = {}

    def read() -> None:
        files.update(weight_files(folder))
        layouts = {file: SlicedFile.open(home / file) for file in sorted(set(files.values()))}
        _check(plan, names, files, layouts, folder)
        found = commit.checksums(home)
        for file in layouts:
            inside = {tensor for tensor, there in files.items() if there == file}
            for counted in (True, False):
                which = (model, plan, comm, names, inside, counted)
                parts, coming = _parts(*which), _parts(*which, closed=True)
                layouts[file].read(home / file, parts, found if counted else None, coming)
            if rest and found is not None:
                others = inside - {tensor for tensor, origin in plan.origins.items() if origin.names & names}
                layouts[file].sum_up(home / file, sorted(others)[comm.rank :: comm.world_size], found)
        sums.update(found or {})

    on_all_ranks(comm, read)
    whole = add_up(comm, sums)
    for file in sorted(set(files.values())):
        commit.compare_sums(home, file, {name: whole[name] for name in whole if files[name] == file})


def _plan(model: nn.Module) -> SavePlan:
    if is_pretrained(model):
        return plan_pretrained(model, lambda tensor: tensor.dtype)
    return plan_module(model, lambda tensor: tensor.dtype)


def _check(plan: SavePlan, names: set[str], files: dict[str, str], layouts: dict, folder: Path) -> None:
    problems = []
    for tensor, origin in plan.origins.items():
        if not origin.names & names:
            continue
        if origin.runs is None:
            problems.append(f"'{tensor}' stands there in a form that is computed from weights")
            continue
        shape = plan.files[plan.home[tensor]].tensors[tensor][1]
        found = layouts[files[tensor]].tensors.get(tensor) if tensor in files else None
        if found is None:
            problems.append(f"'{tensor}' is missing")
        elif found[1] != shape:
            problems.append(f"'{tensor}' has shape {found[1]}, the model's is {shape}")
    if problems:
        raise ZeroCheckpointError(f"{folder} does not fit the model: {first_few(problems, '; ')}")


def _parts(
    model: nn.Module,
    plan: SavePlan,
    comm: Communicator,
    names: set[str],
    inside: set[str],
    counted: bool,
    *,
    closed: bool = False,
) -> Iterator[tuple[str, int, Tensor]]:
    """(tensor, first element, values to fill) of what this rank keeps of weights in the tensors `inside` a file.

    `counted`: only where its read counts for the checksum, or only where it does not. `closed` ones have shapes only.
    """

    def within(buffer: FlatBuffer) -> tuple[int, int]:
        return buffer.begin, buffer.end

    def chooses(buffer: FlatBuffer, index: int) -> bool:
        return held.counts(buffer, index) == counted

    wanted = names & {run.name for tensor in inside & plan.origins.keys() for run in plan.origins[tensor].runs or ()}
    for name, start, values, buffer in held.held(
        model, within, wanted, chooses=chooses, write=not closed, closed=closed
    ):
        if buffer is not None or counted == (comm.rank == 0):
            for _, tensor, at, part in plan.parts_of(name, start, values.view(-1)):
                if tensor in inside:
                    yield tensor, at, part
