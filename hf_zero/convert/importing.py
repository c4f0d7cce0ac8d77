"""Writes a foreign checkpoint as a committed checkpoint of ours, one tensor at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_zero.checkpoint import commit, training_state
from hf_zero.checkpoint.background import SaveJob
from hf_zero.checkpoint.held import logical_state
from hf_zero.checkpoint.plan import SavePlan, is_pretrained, plan_module, plan_pretrained
from hf_zero.checkpoint.safetensors_file import Part, SlicedFile
from hf_zero.checkpoint.saving import StagedWeights
from hf_zero.checkpoint.staging import stage
from hf_zero.comm.communicator import Communicator
from hf_zero.convert import adapters
from hf_zero.convert.folder import carried_files, new_folder, note_dtype, save_pickle
from hf_zero.convert.source import Source, Stored, unwrapped
from hf_zero.errors import ZeroCheckpointError, first_few


SCHEDULE_NAME, ACCELERATE_SCHEDULE_NAME = "scheduler.pt", "scheduler.bin"
_ONE_FILE = 2**62  # bytes: accelerate's layout never splits


@dataclass(frozen=True, kw_only=True)
class _Match:
    """A foreign checkpoint under the names of the model: every tensor once, under the first of its names."""

    source: Source
    plan: SavePlan | None  # None: of adapters, whose file is taken over as it is
    weights: dict[str, Stored]
    states: dict[str, dict[str, Stored]]
    members: list[list[str]]  # the parameters of every optimizer group

    def with_master(self) -> set[str]:
        """The trained parameters whose masters do not stand in the model's files as they are."""
        if self.plan is None:
            return set(self.states)
        origins = self.plan.origins.items()
        inexact = (origin.names for tensor, origin in origins if self.plan.dtype_of(tensor) != torch.float32)
        return set().union(*inexact) & self.states.keys()


def without_class(source: Source) -> tuple[Source, nn.Module]:
    """For a model whose class is not known: a module that has its parameters, without values, and the source for it.

    A parameter with two names keeps the first one only, as accelerate's files do.
    """
    weights = {name: stored for name, stored in source.weights.items() if name not in source.ties}
    root = nn.Module()
    for name, stored in weights.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        values = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        module.register_parameter(last, nn.Parameter(values, requires_grad=False))
    return dataclasses.replace(source, weights=weights), root


def write(source: Source, model: nn.Module | None, config: Path | None, target: Path) -> str:
    """Make `target` from a foreign checkpoint of `model`, which has no values; returns what was written, in a line.

    Without a model it is one of adapters. With the folder of a configuration, or adapters, `target` is laid out for
    the Trainer, else for `Accelerator.load_state`. Raises ZeroCheckpointError, before anything is written, where the
    checkpoint does not fit the model.
    """
    match = _matched(source, model) if model is not None else _of_adapters(source)
    state = _state_file(match)
    carried = carried_files(source.folder, config, source.unread)
    carried += [source.folder / adapters.WEIGHTS_NAME] if match.plan is None else []
    files = {} if match.plan is None else match.plan.files
    with new_folder(target, carried, state.nbytes + sum(file.nbytes for file in files.values())) as folder:
        schedule = folder / (SCHEDULE_NAME if config is not None or match.plan is None else ACCELERATE_SCHEDULE_NAME)
        if source.schedule is not None and not schedule.exists():
            save_pickle(source.schedule, schedule)
        job, sums = SaveJob(comm=Communicator.connect(), is_main=True), {}
        if match.plan is not None:
            weights = StagedWeights(
                plan=match.plan, staged=stage(folder, files, lambda **_: _weight_parts(match), job), sums=sums
            )
            weights.commit()
        if config is not None:
            note_dtype(folder, _main_dtype(match))
        states = stage(folder, {training_state.STATE_NAME: state}, lambda **_: _state_parts(match, state), job)
        states.commit()
        commit.write_marker(folder, {**sums, training_state.STATE_NAME: states.sums})
    return _summary(match, len(carried), sum(path.stat().st_size for path in target.iterdir()))


def _summary(match: _Match, carried: int, nbytes: int) -> str:
    kinds = sorted({kind for kinds in match.states.values() for kind in kinds})
    if match.plan is None:
        weights = "adapters as they were"
    else:
        weights = f"{len(match.plan.origins)} weights in {str(_main_dtype(match)).removeprefix('torch.')}"
    return (
        f"{weights}, optimizer state ({', '.join(kinds) or 'none'}) of {len(match.states)} trained parameters in "
        f"{len(match.members)} groups, {carried} other files; {nbytes / 1e6:,.1f} MB"
    )


def _of_adapters(source: Source) -> _Match:
    weights = {name: source.weights[name] for name in source.states}
    adapters.tensors(source.folder, {name: stored.shape for name, stored in weights.items()})
    members = [group.names for group in source.groups]
    return _Match(source=source, plan=None, weights=weights, states=source.states, members=members)


def _matched(source: Source, model: nn.Module) -> _Match:
    logical = logical_state(model)
    names = {name: unwrapped(name, logical) for name in source.weights}
    unknown = [name for name, ours in names.items() if ours not in logical]
    if unknown:
        raise _misfit(source, model, f"the model has no {_some(unknown)}")
    first = {id(tensor): name for name, tensor in reversed(logical.items())}
    firsts = {name: first[id(logical[ours])] for name, ours in names.items()}
    trained = {firsts[name] for name in source.states}
    weights = {
        firsts[name]: stored
        for name, stored in source.weights.items()
        if name in source.states or firsts[name] not in trained  # not the 16-bit copy under another name
    }
    for name, stored in weights.items():
        shape = tuple(logical[name].shape)
        if stored.shape != shape:
            raise _misfit(source, model, f"'{name}' has shape {stored.shape}, the model's is {shape}")
    dtypes = {firsts[name]: dtype for name, dtype in source.dtypes.items() if name in firsts}

    def dtype_of(tensor: Tensor) -> torch.dtype:
        name = first[id(tensor)]
        return dtypes.get(name, weights[name].dtype if name in weights else tensor.dtype)

    if is_pretrained(model):
        plan = plan_pretrained(model, dtype_of)
    else:
        plan = plan_module(model, dtype_of, max_shard_size=_ONE_FILE)
    missing = {name for origin in plan.origins.values() for name in origin.names} - weights.keys()
    if missing:
        raise _misfit(source, model, f"it lacks {_some(missing)}")
    if plan.computed:
        raise _misfit(source, model, f"the files of such a model hold {_some(plan.computed)} in a computed form")
    return _Match(
        source=source,
        plan=plan,
        weights=weights,
        states={firsts[name]: kinds for name, kinds in source.states.items()},
        members=[[firsts[name] for name in group.names] for group in source.groups],
    )


def _misfit(source: Source, model: nn.Module, reason: str) -> ZeroCheckpointError:
    return ZeroCheckpointError(f"{source.folder} does not fit {type(model).__name__}, as config.json has it: {reason}")


def _some(names: Iterable[str]) -> str:
    return first_few(map(repr, sorted(names)), limit=3)


def _main_dtype(match: _Match) -> torch.dtype:
    """The dtype of the first weight that is a floating-point number."""
    dtypes = (match.plan.dtype_of(tensor) for tensor in match.plan.origins)
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)


def _state_file(match: _Match) -> SlicedFile:
    tensors, with_master = {}, match.with_master()
    for name, kinds in match.states.items():
        if name in with_master:
            tensors[f"{name}.{training_state.MASTER}"] = (torch.float32, match.weights[name].shape)
        for kind, stored in kinds.items():
            tensors[f"{name}.{kind}"] = (stored.dtype, stored.shape)
    groups = [{"options": group.options, "scalars": group.scalars} for group in match.source.groups]
    extra: dict[str, object] = {"members": [match.members]}
    if match.source.loss_scale is not None:
        extra["loss_scale"] = match.source.loss_scale
    return SlicedFile(tensors, training_state.header([groups], extra, match.states))


def _weight_parts(match: _Match) -> Iterator[Part]:
    """Every tensor of the weight files, from the weights that it consists of."""
    for name, stored in match.weights.items():
        for start, values in stored.parts():
            yield from match.plan.parts_of(name, start, values)


def _state_parts(match: _Match, file: SlicedFile) -> Iterator[Part]:
    for name, kinds in match.states.items():
        for kind, stored in {training_state.MASTER: match.weights[name], **kinds}.items():
            if f"{name}.{kind}" in file.tensors:
                for start, values in stored.parts():
                    yield training_state.STATE_NAME, f"{name}.{kind}", start, values
