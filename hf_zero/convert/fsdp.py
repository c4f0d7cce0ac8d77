"""Reads the sharded checkpoints that accelerate writes of FSDP models (torch's distributed checkpoint format)."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_zero.convert.pickles import load_part, load_plain
from hf_zero.convert.source import Group, Source, Stored, described_scalar, options_of
from hf_zero.errors import ZeroCheckpointError


MODEL_NAME, OPTIMIZER_NAME = "pytorch_model_fsdp_0", "optimizer_0"
_METADATA = ".metadata"
_PER_RANK = re.compile(r"(pytorch_model_fsdp|optimizer)_0_rank\d+\.bin")
_WHOLE = ("pytorch_model_fsdp.bin", "optimizer.bin")
_SCALER = "scaler.pt"


def find(folder: Path) -> bool:
    """Whether `folder` is such a checkpoint. Raises ZeroCheckpointError for FSDP's other kinds."""
    if (folder / MODEL_NAME).is_dir() or (folder / OPTIMIZER_NAME).is_dir():
        return True
    for path in sorted(folder.iterdir()):
        if _PER_RANK.fullmatch(path.name):
            raise ZeroCheckpointError(
                f"{path}: FSDP checkpoints of one file per rank (use_dcp=False) are not supported"
            )
        if path.name == _WHOLE[0]:
            raise ZeroCheckpointError(
                f"{path}: FSDP's FULL_STATE_DICT checkpoints are not supported, only SHARDED_STATE_DICT"
            )
    if (folder / _METADATA).is_file():
        raise ZeroCheckpointError(f"{folder} is one half of an FSDP checkpoint: give the folder above it")
    return False


def read(folder: Path) -> Source:
    """The checkpoint in `folder`. Raises ZeroCheckpointError for what is not complete."""
    try:
        return _read(folder)
    except (KeyError, IndexError, AttributeError) as error:
        raise ZeroCheckpointError(
            f"{folder} is not laid out as accelerate's FSDP checkpoints are: {error!r}"
        ) from error


def _read(folder: Path) -> Source:
    model, optimizer = _Sharded(folder / MODEL_NAME), _Sharded(folder / OPTIMIZER_NAME)
    weights = {path[1]: model.stored(key) for key, path in model.paths.items()}
    states: dict[str, dict[str, Stored]] = {}
    steps: dict[str, dict[str, object]] = {}
    options: dict[int, dict[str, Any]] = {}
    for key, (_, section, which, kind) in optimizer.paths.items():
        if section == "param_groups":
            options.setdefault(which, {})[kind] = optimizer.value(key)
        elif which not in weights:
            raise ZeroCheckpointError(f"{folder}: '{which}' was trained and is no weight of it (adapters?)")
        elif kind != "step" and optimizer.shape(key) == weights[which].shape:
            states.setdefault(which, {})[kind] = optimizer.stored(key)
        else:
            steps.setdefault(which, {})[kind] = described_scalar(optimizer.value(key))
    groups = []
    for _, group in sorted(options.items()):
        names = list(group["params"])
        scalars = next((steps[name] for name in names if name in steps), {})
        groups.append(Group(options=options_of(group), scalars=scalars, names=names))
    ranks = len({path.name.split("_")[2] for path in (folder / MODEL_NAME).glob("__*.distcp")})
    return Source(
        what=f"a sharded FSDP checkpoint of {ranks} rank{'s' * (ranks > 1)}",
        folder=folder,
        weights=weights,
        dtypes={},  # what FSDP computes in is not in the checkpoint: its weights are the masters
        states={name: states.get(name, {}) for group in groups for name in group.names if name in steps | states},
        groups=groups,
        loss_scale=_loss_scale(folder),
        unread={MODEL_NAME, OPTIMIZER_NAME},
    )


@dataclass(frozen=True)
class _Sharded:
    """One folder of the format: `.metadata` says which bytes of which file hold which part of which tensor."""

    folder: Path

    @cached_property
    def _metadata(self) -> Mapping[str, Any]:
        state = load_plain(self.folder / _METADATA).state
        if not isinstance(state, dict) or "state_dict_metadata" not in state or "storage_data" not in state:
            raise ZeroCheckpointError(f"{self.folder / _METADATA} describes no checkpoint")
        return state

    @cached_property
    def paths(self) -> dict[str, tuple]:
        """The place of every entry in the nested dictionary that was saved."""
        return {key: tuple(path) for key, path in self._metadata["planner_data"].items()}

    @cached_property
    def _places(self) -> dict[str, list[tuple[tuple[int, ...], Mapping[str, Any]]]]:
        """(first index, place in the files) of all parts, by entry."""
        found: dict[str, list] = {}
        for index, info in self._metadata["storage_data"].items():
            offset = index.state.get("offset") or ()  # an entry that is no tensor has none
            found.setdefault(index.state["fqn"], []).append((tuple(offset), info.state))
        for parts in found.values():
            for _, info in parts:
                path = self.folder / info["relative_path"]
                if path.parent != self.folder:
                    raise ZeroCheckpointError(f"{self.folder / _METADATA} points to {path}, outside its folder")
                if not path.is_file():
                    raise ZeroCheckpointError(f"{path} is missing: the checkpoint is incomplete")
                if path.stat().st_size < info["offset"] + info["length"]:
                    raise ZeroCheckpointError(f"{path} is cut off: it has only {path.stat().st_size:,} bytes")
                if info.get("transform_descriptors"):
                    raise ZeroCheckpointError(f"{path}: compressed checkpoints are not supported")
        return found

    def _load(self, info: Mapping[str, Any]) -> Any:
        path = self.folder / info["relative_path"]
        with path.open("rb") as file:
            file.seek(info["offset"])
            return load_part(io.BytesIO(file.read(info["length"])), path)

    def shape(self, key: str) -> tuple[int, ...] | None:
        """The shape of a tensor; None for anything else."""
        described = self._metadata["state_dict_metadata"][key].state or {}
        return tuple(described["size"]) if "size" in described else None

    def value(self, key: str) -> Any:
        """An entry that one rank has written."""
        return self._load(self._places[key][0][1])

    def stored(self, key: str) -> Stored:
        """A tensor, put together when it is read."""
        described = self._metadata["state_dict_metadata"][key].state
        shape, places = tuple(described["size"]), self._places.get(key, [])
        present = sum(
            torch.Size(chunk.state["sizes"]).numel()
            for chunk in described["chunks"]
            if tuple(chunk.state["offsets"]) in {offset for offset, _ in places}
        )
        if present != torch.Size(shape).numel():
            raise ZeroCheckpointError(f"{self.folder}: parts of '{key}' are missing")

        def parts() -> Iterator[tuple[int, Tensor]]:
            found = torch.empty(shape, dtype=dtype)
            for offset, info in places:
                part = self._load(info)
                place = tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))
                found[place] = part
            yield 0, found.reshape(-1)

        dtype = _dtype(described["properties"])
        return Stored(dtype=dtype, shape=shape, parts=parts)


def _dtype(properties: Any) -> torch.dtype:
    """The dtype among a tensor's properties, whose other members are of no interest here."""
    members = properties.state.values() if isinstance(properties.state, dict) else properties.state
    return next(value for value in members if isinstance(value, torch.dtype))


def _loss_scale(folder: Path) -> dict[str, float] | None:
    """torch's gradient scaler halves at the first overflow: it has no tolerance to count down."""
    if not (folder / _SCALER).is_file():
        return None
    state = load_part(io.BytesIO((folder / _SCALER).read_bytes()), folder / _SCALER)
    return {"scale": state["scale"], "tolerated": 1, "since_overflow": state["_growth_tracker"]} if state else None
