"""Writes one of our checkpoints as the stock libraries': weights in fp32, and torch's own state of the optimizer."""

from __future__ import annotations

import functools
import json
import mmap
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_zero.checkpoint import commit, training_state, whole_states
from hf_zero.checkpoint.background import SaveJob
from hf_zero.checkpoint.loading import weight_files
from hf_zero.checkpoint.plan import INDEX_NAME, WEIGHTS_NAME, SavePlan, plan_pretrained
from hf_zero.checkpoint.safetensors_file import Part, SlicedFile, library_order
from hf_zero.checkpoint.saving import StagedWeights
from hf_zero.checkpoint.staging import Parts, stage
from hf_zero.comm.communicator import Communicator
from hf_zero.convert import adapters
from hf_zero.convert.folder import carried_files, find_config, is_accelerates, new_folder, note_dtype, save_pickle
from hf_zero.errors import ZeroCheckpointError


_OPTIMIZER_NAME, _ACCELERATES_OPTIMIZER_NAME, _SCALER_NAME = "optimizer.pt", "optimizer.bin", "scaler.pt"
_RANDOM_NAME, _RANDOM_OF_RANK_0 = "rng_state.pth", "rng_state_0.pth"
# What torch's gradient scaler begins with, but for the scale.
_SCALER = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


def find(folder: Path) -> bool:
    """Whether `folder` is a checkpoint of ours."""
    return (folder / training_state.STATE_NAME).is_file()


@dataclass(frozen=True)
class _Ours:
    """A checkpoint of ours, its tensors mapped from the files and not read."""

    folder: Path

    @cached_property
    def state(self) -> SlicedFile:
        return SlicedFile.open(self.folder / training_state.STATE_NAME)

    @cached_property
    def home(self) -> dict[str, str]:
        """The file of every tensor of the model."""
        return weight_files(self.folder)

    @cached_property
    def _layouts(self) -> dict[str, SlicedFile]:
        return {file: SlicedFile.open(self.folder / file) for file in set(self.home.values())}

    def weight(self, tensor: str) -> Tensor:
        """A tensor of the model's files, flat."""
        file = self.home[tensor]
        return _mapped(self.folder / file, self._layouts[file], tensor).view(-1)

    def state_tensor(self, name: str) -> Tensor:
        return _mapped(self.folder / training_state.STATE_NAME, self.state, name)

    @property
    def masters(self) -> set[str]:
        """The parameters whose masters are not in the model's files."""
        ending = f".{training_state.MASTER}"
        return {name.removesuffix(ending) for name in self.state.tensors if name.endswith(ending)}

    def has_half_weights(self) -> bool:
        dtypes = {dtype for layout in self._layouts.values() for dtype, _ in layout.tensors.values()}
        return bool(dtypes & {torch.bfloat16, torch.float16})

    @cached_property
    def optimizer(self) -> tuple[list[dict], list[list[str]], dict]:
        """Options and scalars of every group, the names of its parameters, and what else was kept."""
        optimizers, extra = (json.loads(self.state.metadata[key]) for key in ("optimizers", "extra"))
        if len(optimizers) != 1:
            raise ZeroCheckpointError(f"{self.folder} has {len(optimizers)} optimizers: the stock Trainer has one")
        if "members" not in extra:
            raise ZeroCheckpointError(
                f"{self.folder} was saved by an older hf_zero, without the names of the parameters of each optimizer "
                "group: resume from it and save again"
            )
        return optimizers[0], extra["members"][0], extra


def write(folder: Path, config: Path | None, build: Callable[[Path], nn.Module], target: Path) -> str:
    """Make `target` from a checkpoint of ours; `build` makes the model of a configuration, without values.

    Returns what was written, in a line. Raises ZeroCheckpointError, before anything is written, where the checkpoint
    is damaged or cannot be expressed.
    """
    if not commit.is_committed(folder):
        raise ZeroCheckpointError(f"{folder} was not saved completely (it has no {commit.MARKER} file)")
    commit.check_files(folder)
    commit.check_tensors(folder)
    ours = _Ours(folder)
    groups, members, extra = ours.optimizer
    carried, new = _weights_to_write(ours, config, build)
    with new_folder(target, carried, sum(file.nbytes for file in new.files.values()) + ours.state.nbytes) as built:
        new.write(built)
        name = _ACCELERATES_OPTIMIZER_NAME if config is None and is_accelerates(folder) else _OPTIMIZER_NAME
        save_pickle(_state_dict(ours, groups, members), built / name)
        if "loss_scale" in extra:
            scale = {"scale": extra["loss_scale"]["scale"], "_growth_tracker": extra["loss_scale"]["since_overflow"]}
            save_pickle({**_SCALER, **scale}, built / _SCALER_NAME)
        if (built / _RANDOM_OF_RANK_0).exists() and not (built / _RANDOM_NAME).exists():
            shutil.copyfile(built / _RANDOM_OF_RANK_0, built / _RANDOM_NAME)  # of a run with one process
    nbytes = sum(path.stat().st_size for path in target.iterdir())
    count = sum(len(names) for names in members)
    return f"weights in fp32, {name} of {count} parameters in {len(groups)} groups; {nbytes / 1e6:,.1f} MB"


@dataclass(frozen=True, kw_only=True)
class _NewWeights:
    """Weight files that are written anew."""

    files: Mapping[str, SlicedFile] = field(default_factory=dict)
    parts: Parts = lambda **_: ()
    plan: SavePlan | None = None

    def write(self, folder: Path) -> None:
        if not self.files:
            return
        job = SaveJob(comm=Communicator.connect(), is_main=True, sums=False)
        staged = stage(folder, self.files, self.parts, job)
        if self.plan is None:
            staged.commit()
        else:
            StagedWeights(plan=self.plan, staged=staged).commit()
            note_dtype(folder, torch.float32)


def _weights_to_write(
    ours: _Ours, config: Path | None, build: Callable[[Path], nn.Module]
) -> tuple[list[Path], _NewWeights]:
    """The files that are carried over, and the weights that are not: those of which there are masters in fp32."""
    folder, unread = ours.folder, {training_state.STATE_NAME}
    for_accelerate = config is None and is_accelerates(folder)
    if for_accelerate or adapters.present(folder):
        file = WEIGHTS_NAME if for_accelerate else adapters.WEIGHTS_NAME
        return carried_files(folder, None, unread), _file_fp32(ours, file)
    config = find_config(folder, config)
    carried = carried_files(folder, config, unread)
    if ours.has_half_weights():
        plan = _plan_fp32(build(config), ours)
        return carried, _NewWeights(files=plan.files, parts=lambda **_: _weight_parts(plan, ours), plan=plan)
    carried += [folder / file for file in sorted(set(ours.home.values()))]
    carried += [folder / INDEX_NAME] if (folder / INDEX_NAME).is_file() else []
    return carried, _NewWeights()


def _trained_in(ours: _Ours, file: str) -> dict[str, str]:
    """The parameter of every tensor in a file of adapters, or in accelerate's only one, of those that have masters."""
    if file != adapters.WEIGHTS_NAME:
        return {name: name for name in ours.masters}
    shapes = {name: ours.state.tensors[f"{name}.{training_state.MASTER}"][1] for name in ours.masters}
    return {tensor: name for name, tensor in adapters.tensors(ours.folder, shapes).items()}


def _file_fp32(ours: _Ours, file: str) -> _NewWeights:
    """A file whose tensors are whole parameters, with the masters in the place of those that have one."""
    path, trained = ours.folder / file, _trained_in(ours, file)
    old = SlicedFile.open(path)
    kinds = {
        tensor: (torch.float32 if tensor in trained else dtype, shape)
        for tensor, (dtype, shape) in old.tensors.items()
    }

    def parts(**_: object) -> Iterator[Part]:
        for tensor in old.tensors:
            if tensor in trained:
                values = ours.state_tensor(f"{trained[tensor]}.{training_state.MASTER}")
            else:
                values = _mapped(path, old, tensor)
            yield file, tensor, 0, values.view(-1)

    return _NewWeights(files={file: SlicedFile(library_order(kinds), old.metadata)}, parts=parts)


def _state_dict(ours: _Ours, groups: list[dict], members: list[list[str]]) -> dict:
    """The state of the optimizer as torch gives it: parameters are numbers, in the order of the groups."""
    kinds: dict[str, list[str]] = {}
    for name in ours.state.tensors:
        parameter, kind = name.rsplit(".", 1)
        if kind != training_state.MASTER:
            kinds.setdefault(parameter, []).append(kind)
    whole = json.loads(ours.state.metadata.get("whole", "{}"))
    state, described, number = {}, [], 0
    for group, names in zip(groups, members, strict=True):
        options = {key: tuple(value) if isinstance(value, list) else value for key, value in group["options"].items()}
        described.append({**options, "params": list(range(number, number + len(names)))})
        for name in names:
            if name in whole:
                state[number] = whole_states.rebuild(whole[name], functools.partial(_tensor_of, ours, name))
            elif name in kinds:
                tensors = {kind: ours.state_tensor(f"{name}.{kind}") for kind in kinds[name]}
                state[number] = {**{kind: _scalar(value) for kind, value in group["scalars"].items()}, **tensors}
            number += 1
    return {"state": state, "param_groups": described}


def _tensor_of(ours: _Ours, name: str, kind: str) -> Tensor:
    return ours.state_tensor(f"{name}.{kind}")


def _scalar(value: object) -> object:
    if isinstance(value, dict):
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    return value


def _plan_fp32(model: nn.Module, ours: _Ours) -> SavePlan:
    """The weight files of the model in fp32."""

    def dtype_of(tensor: Tensor) -> torch.dtype:
        return torch.float32 if tensor.is_floating_point() else tensor.dtype

    plan = plan_pretrained(model, dtype_of)
    if plan.computed or plan.origins.keys() != ours.home.keys():
        raise ZeroCheckpointError(
            f"{ours.folder} holds other weights than {type(model).__name__}, as its config.json has it, would save"
        )
    return plan


def _weight_parts(plan: SavePlan, ours: _Ours) -> Iterator[Part]:
    """Every tensor of the new files: from masters where there are some, from our files where there are none."""
    masters = ours.masters
    for tensor, origin in plan.origins.items():
        for run in origin.runs or ():
            if run.name in masters:
                flat, begin = ours.state_tensor(f"{run.name}.{training_state.MASTER}").view(-1), run.start
            else:
                flat, begin = ours.weight(tensor), run.at
            yield plan.home[tensor], tensor, run.at, flat[begin : begin + run.numel]


def _mapped(path: Path, layout: SlicedFile, name: str) -> Tensor:
    """A tensor whose memory is the file; each has a storage of its own, as a pickle holds whole storages."""
    dtype, shape = layout.tensors[name]
    nbytes = dtype.itemsize * torch.Size(shape).numel()
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    begin = layout.position(name, 0)
    page = begin - begin % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        # Copy-on-write, since torch has no read-only tensors; nothing is written.
        pages = mmap.mmap(file.fileno(), begin + nbytes - page, access=mmap.ACCESS_COPY, offset=page)
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=begin - page).view(dtype).view(shape)
