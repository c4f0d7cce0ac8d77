"""Reads DeepSpeed's ZeRO-1, 2 and 3 checkpoints, of any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_zero.convert.dropped_group import restored
from hf_zero.convert.pickles import Inert, load
from hf_zero.convert.source import Group, Source, Stored, described_scalar, options_of, whole
from hf_zero.errors import ZeroCheckpointError


_OPTIM = re.compile(r"((?:bf16_|fp16_)?zero_pp_rank_)(\d+)(_mp_rank_)(\d+)(_optim_states\.pt)")
_MODEL = re.compile(r"(zero_pp_rank_)(\d+)(_mp_rank_)(\d+)(_model_states\.pt)")
_MODEL_WHOLE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_EXPERTS = re.compile(r"(layer_\d+_)?expert_\d+_.*\.pt|expp_rank_\d+_.*\.pt")
_PIPELINE = re.compile(r"layer_\d+-model_.*\.pt")
_SCRIPTS = {"latest", "zero_to_fp32.py", "zero_to_torch.py"}


def find(folder: Path) -> Path | None:
    """The folder with DeepSpeed's own files: `folder`, or the one in it that `latest` names; None where there is none.

    Raises ZeroCheckpointError where it cannot be told, or is not there.
    """
    latest = folder / "latest"
    if latest.is_file():
        name = latest.read_text(encoding="utf-8", errors="replace").strip()
        tag = folder / name
        if Path(name).name != name or name in ("", ".."):
            raise ZeroCheckpointError(f"{latest} names '{name}', which is no folder beside it")
        if not tag.is_dir():
            raise ZeroCheckpointError(f"{tag} is missing: {latest} names it as the newest checkpoint")
        return tag
    if any(folder.glob("*_optim_states.pt")) or any(folder.glob("*_model_states.pt")):
        return folder
    tags = sorted(path for path in folder.glob("global_step*") if path.is_dir())
    if len(tags) > 1:
        raise ZeroCheckpointError(
            f"{folder} holds {', '.join(tag.name for tag in tags)}, and no `latest` file that names one: choose"
        )
    return tags[0] if tags else None


def read(folder: Path, tag: Path) -> Source:
    """The checkpoint in `tag`; Trainer's own files lie in `folder`. Raises ZeroCheckpointError where it is unfit."""
    try:
        return _read(folder, tag)
    except (KeyError, IndexError) as error:
        raise ZeroCheckpointError(f"{tag} is not laid out as DeepSpeed's checkpoints are: it lacks {error}") from error


def _read(folder: Path, tag: Path) -> Source:
    _refuse_other_parallelism(tag)
    optim = _by_rank(tag, _OPTIM)
    if not optim:
        raise ZeroCheckpointError(f"{tag} holds no *_optim_states.pt: it has no ZeRO optimizer state to convert")
    lowest, *others = optim
    first = _optimizer_part(optim[lowest])
    count = first.get("partition_count")
    ranks = max(count) if isinstance(count, (list, tuple)) else int(count)
    _check_ranks(tag, optim, ranks)
    parts = [first, *(_optimizer_part(optim[rank]) for rank in others)]
    stage = _stage(first)
    if stage == 3:
        files = _by_rank(tag, _MODEL)
        if not files:
            raise ZeroCheckpointError(f"{tag} holds no zero_pp_rank_*_model_states.pt: the checkpoint is incomplete")
        _check_ranks(tag, files, ranks)
        models = [_model_part(files[rank]) for rank in range(ranks)]
    else:
        models = [_model_part(tag / "mp_rank_00_model_states.pt")]
    _refuse_model_parallelism(tag, models[0])
    reader = _ZeRO3(tag, parts, models) if stage == 3 else _ZeRO12(tag, parts, models)
    groups = [_in_model_order(group, models[0]["module"]) for group in reader.groups()]
    trained, states = reader.trained()
    dtypes = {name: value.dtype for name, value in models[0]["module"].items() if isinstance(value, Tensor)}
    weights = {**reader.untrained(trained), **trained}
    source = Source(
        what=f"DeepSpeed ZeRO-{stage} of {ranks} rank{'s' * (ranks > 1)}",
        folder=folder,
        weights={name: weights[name] for name in [*dtypes, *weights] if name in weights},  # in the model's order
        dtypes=dtypes,
        states=states,
        groups=groups,
        ties=dict(models[0].get("shared_params") or {}),
        loss_scale=_loss_scale(first, dtypes),
        schedule=_schedule(models[0], groups),
        unread=_SCRIPTS | {tag.name} | {path.name for path in folder.glob("*_states.pt")},
    )
    # With an optimizer section in DeepSpeed's configuration there is one group from the start.
    return source if "optimizer" in models[0].get("ds_config", {}) else restored(source)


# -- which files there are --------------------------------------------------------------------------------------------


def _refuse_other_parallelism(tag: Path) -> None:
    for path in sorted(tag.iterdir()):
        if _EXPERTS.fullmatch(path.name):
            raise ZeroCheckpointError(f"{path}: experts that are spread over ranks (DeepSpeed-MoE) are not supported")
        if _PIPELINE.fullmatch(path.name):
            raise ZeroCheckpointError(f"{path}: pipeline parallelism is not supported")
        match = _OPTIM.fullmatch(path.name) or _MODEL.fullmatch(path.name)
        whole_match = _MODEL_WHOLE.fullmatch(path.name)
        if (match and int(match[4])) or (whole_match and int(whole_match[1])):
            raise ZeroCheckpointError(f"{path}: tensor parallelism is not supported")


def _refuse_model_parallelism(tag: Path, model: Mapping[str, object]) -> None:
    degrees = model.get("checkpoint_parallel_dimensions") or {}
    tensor = max(int(model.get("mp_world_size") or 1), int(degrees.get("tp_degree") or 1))
    if tensor > 1:
        raise ZeroCheckpointError(f"{tag}: tensor parallelism (of {tensor} ranks) is not supported")
    if int(degrees.get("pp_degree") or 1) > 1:
        raise ZeroCheckpointError(f"{tag}: pipeline parallelism is not supported")
    if model.get("autoep_layers") or model.get("ds_autoep_layers"):
        raise ZeroCheckpointError(f"{tag}: experts that are spread over ranks are not supported")


def _by_rank(tag: Path, pattern: re.Pattern) -> dict[int, Path]:
    found = ((pattern.fullmatch(path.name), path) for path in tag.iterdir())
    return dict(sorted((int(match[2]), path) for match, path in found if match))


def _check_ranks(tag: Path, files: Mapping[int, Path], ranks: int) -> None:
    example = next(iter(files.values())).name
    for rank in range(ranks):
        if rank not in files:
            name = re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{rank}", example)
            raise ZeroCheckpointError(f"{tag / name} is missing: {ranks} ranks wrote this checkpoint")
    for rank, path in files.items():
        if rank >= ranks:
            raise ZeroCheckpointError(f"{path} is not part of this checkpoint, which {ranks} ranks wrote: remove it")


def _optimizer_part(path: Path) -> dict:
    content = load(path)
    part = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    if not isinstance(part, dict) or "partition_count" not in part:
        raise ZeroCheckpointError(f"{path} holds no ZeRO optimizer state")
    return part


def _model_part(path: Path) -> dict:
    content = load(path)
    if not isinstance(content, dict) or not isinstance(content.get("module"), dict) or "param_shapes" not in content:
        raise ZeroCheckpointError(f"{path} holds no model state of DeepSpeed's")
    return content


def _stage(part: Mapping[str, object]) -> int:
    """The stage; a checkpoint without one is of the optimizer that DeepSpeed has for bf16 at stage 1."""
    stage = part.get("zero_stage", 1)
    return int(stage.args[0] if isinstance(stage, Inert) else stage)


# -- where each parameter lies ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """A parameter in the flat tensors of a group: each rank holds elements [begin, end) of its flat tensor."""

    name: str
    shape: tuple[int, ...]
    group: int
    begin: int
    end: int


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


@dataclass(frozen=True)
class _Reader:
    """What both layouts have in common. `parts` and `models` are the content of the files, by rank."""

    tag: Path
    parts: list[dict]
    models: list[dict]

    def trained(self) -> tuple[dict[str, Stored], dict[str, dict[str, Stored]]]:
        """The fp32 masters, and the optimizer's tensors, of all trained parameters."""
        weights, states = {}, {}
        for place in self.places():
            flats = [self.masters(part)[place.group] for part in self.parts]
            weights[place.name] = self.stored(place, flats)
            found = [self.optimizer(part)["state"].get(place.group, {}) for part in self.parts]
            kinds = {
                kind
                for kind, value in found[0].items()
                if isinstance(value, Tensor) and value.dim() == 1 and value.numel() >= flats[0].numel()
            }
            states[place.name] = {kind: self.stored(place, [state[kind] for state in found]) for kind in sorted(kinds)}
        return weights, states

    def scalars(self, group: int) -> dict[str, object]:
        """The step counts and the like of a flat tensor; old optimizers keep them in the options of its group."""
        state = self.optimizer(self.parts[0])["state"].get(group, {})
        found = {
            kind: value
            for kind, value in state.items()
            if (isinstance(value, Tensor) and value.dim() == 0) or isinstance(value, (int, float))
        }
        return {kind: described_scalar(value) for kind, value in found.items()}

    def misfit(self, place_or_group: str, wanted: int, found: int) -> ZeroCheckpointError:
        return ZeroCheckpointError(
            f"{self.tag}: the shapes of {place_or_group} ask for {wanted:,} elements, the files hold {found:,}"
        )


class _ZeRO12(_Reader):
    """One flat tensor per optimizer group, cut into equal parts; the last rank's padding is left out."""

    def masters(self, part: Mapping) -> list[Tensor]:
        return part["single_partition_of_fp32_groups"]

    def optimizer(self, part: Mapping) -> Mapping:
        base = part["base_optimizer_state"]
        if not isinstance(base, dict):
            raise ZeroCheckpointError(f"{self.tag} was saved with `elastic_checkpoint`, which is not supported")
        return base

    def places(self) -> Iterator[_Place]:
        shapes = self.models[0]["param_shapes"]
        paddings = self.parts[0].get("param_alignment_paddings") or [[0] * len(names) for names in shapes]
        for group, (names, gaps) in enumerate(zip(shapes, paddings, strict=True)):
            end, available = 0, sum(self.masters(part)[group].numel() for part in self.parts)
            for (name, shape), gap in zip(names.items(), gaps, strict=True):
                begin, end = end, end + _numel(shape)
                yield _Place(name, tuple(shape), group, begin, end)
                end += gap
            last = gaps[-1] if gaps else 0
            # What is left over is padding, to twice the number of ranks.
            if not end - last <= available < end + 2 * len(self.parts):
                raise self.misfit(f"optimizer group {group}", end, available)

    def stored(self, place: _Place, flats: list[Tensor]) -> Stored:
        size = max(flat.numel() for flat in flats)

        def parts() -> Iterator[tuple[int, Tensor]]:
            for rank, flat in enumerate(flats):
                low, high = max(place.begin, rank * size), min(place.end, (rank + 1) * size)
                if low < high:
                    yield low - place.begin, flat[low - rank * size : high - rank * size]

        return Stored(dtype=flats[0].dtype, shape=place.shape, parts=parts)

    def untrained(self, trained: Mapping[str, Stored]) -> dict[str, Stored]:
        """Frozen weights and buffers."""
        return {name: whole(value) for name, value in self.models[0]["module"].items() if name not in trained}

    def groups(self) -> Iterator[Group]:
        for group, (options, names) in enumerate(
            zip(self.optimizer(self.parts[0])["param_groups"], self.models[0]["param_shapes"], strict=True)
        ):
            scalars = self.scalars(group) or _steps(options)
            yield Group(options=options_of(options), scalars=scalars, names=list(names))


class _ZeRO3(_Reader):
    """One flat tensor per sub-group, in which each rank holds its part of every parameter; each part is padded."""

    def masters(self, part: Mapping) -> list[Tensor]:
        return part["fp32_flat_groups"]

    def optimizer(self, part: Mapping) -> Mapping:
        return part["optimizer_state_dict"]

    def places(self) -> Iterator[_Place]:
        for group, names in enumerate(self.models[0]["param_shapes"]):
            end = 0
            for name, shape in names.items():
                begin, end = end, end + -(-_numel(shape) // len(self.parts))
                yield _Place(name, tuple(shape), group, begin, end)
            for part in self.parts:
                if self.masters(part)[group].numel() != end:
                    raise self.misfit(f"sub-group {group}", end, self.masters(part)[group].numel())

    def stored(self, place: _Place, flats: list[Tensor]) -> Stored:
        return self._cut(place.shape, [flat[place.begin : place.end] for flat in flats])

    def _cut(self, shape: Sequence[int], slices: list[Tensor]) -> Stored:
        numel = _numel(shape)

        def parts() -> Iterator[tuple[int, Tensor]]:
            start = 0
            for values in slices:
                values = values.reshape(-1)[: numel - start]
                if values.numel():
                    yield start, values
                start += values.numel()

        return Stored(dtype=slices[0].dtype, shape=tuple(shape), parts=parts)

    def untrained(self, trained: Mapping[str, Stored]) -> dict[str, Stored]:
        """Frozen weights and buffers."""
        module = self.models[0]["module"]
        found = {name: whole(module[name]) for name in self.models[0].get("buffer_names") or ()}
        for name, shape in (self.models[0].get("frozen_param_shapes") or {}).items():
            slices = [model["frozen_param_fragments"][name] for model in self.models]
            if sum(values.numel() for values in slices) < _numel(shape):
                raise self.misfit(f"'{name}'", _numel(shape), sum(values.numel() for values in slices))
            found[name] = self._cut(shape, slices)
        return found

    def groups(self) -> Iterator[Group]:
        shapes = self.models[0]["param_shapes"]
        for options in self.optimizer(self.parts[0])["param_groups"]:
            names = [name for sub_group in options["params"] for name in shapes[sub_group]]
            scalars = self.scalars(options["params"][0]) if options["params"] else {}
            yield Group(options=options_of(options), scalars=scalars or _steps(options), names=names)


def _steps(options: Mapping[str, object]) -> dict[str, object]:
    """The step count that DeepSpeed's fused optimizers keep among the options of a group."""
    return {"step": described_scalar(options["step"])} if "step" in options else {}


def _in_model_order(group: Group, module: Mapping[str, object]) -> Group:
    """Round-robin partitioning shuffles the parameters of a group; the state dict has them in the model's order."""
    order = {name: number for number, name in enumerate(module)}
    names = sorted(group.names, key=lambda name: order.get(name, len(order)))
    return Group(options=group.options, scalars=group.scalars, names=names)


# -- what else a run needs --------------------------------------------------------------------------------------------


def _loss_scale(part: Mapping[str, object], dtypes: Mapping[str, torch.dtype]) -> dict[str, float] | None:
    scaler = part.get("loss_scaler")
    if torch.float16 not in dtypes.values() or not isinstance(scaler, Inert):
        return None
    state = scaler.state
    # The iteration counts begin with -1 and 0: this is the number of good steps since the last overflow.
    since = state.get("cur_iter", 0) - state.get("last_overflow_iter", -1) - 1
    return {"scale": state["cur_scale"], "tolerated": state.get("cur_hysteresis", 1), "since_overflow": since}


def _schedule(model: Mapping[str, object], groups: list[Group]) -> dict[str, object] | None:
    """The state of DeepSpeed's own learning-rate schedule as torch's schedules keep it."""
    state = model.get("lr_scheduler")
    if not isinstance(state, dict) or "last_batch_iteration" not in state:
        return None
    steps = int(state["last_batch_iteration"]) + 1
    rates = [group.options["lr"] for group in groups]
    return {"last_epoch": steps, "_step_count": steps + 1, "_last_lr": rates}
