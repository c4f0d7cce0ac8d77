"""Resumes from checkpoints of the stock Trainer: torch's optimizer state, of which each rank takes its part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME

from hf_zero.checkpoint.staging import on_all_ranks
from hf_zero.checkpoint.state_checks import Groups, check_kinds, check_whole
from hf_zero.checkpoint.training_state import members_of
from hf_zero.core.binding import Binding
from hf_zero.core.engine import ZeroEngine
from hf_zero.errors import ZeroCheckpointError


# They say how a step is computed, not what: those of this run stay.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NAMES = "param_names"  # of optimizers that were given named parameters


def find(folder: Path) -> bool:
    """Whether a folder has the optimizer state of the stock Trainer.

    Raises ZeroCheckpointError where it has that of another system, which `hf-zero convert` reads.
    """
    if (folder / OPTIMIZER_NAME).is_file():
        return True
    from hf_zero.convert import deepspeed, fsdp

    system = "DeepSpeed" if deepspeed.find(folder) is not None else "FSDP" if fsdp.find(folder) else None
    if system is not None:
        raise ZeroCheckpointError(
            f"{folder} holds the training state of {system}: run `hf-zero convert {folder} DST`, and resume from DST"
        )
    return False


def load_optimizer(engine: ZeroEngine, folder: Path) -> dict[str, Any]:
    """Take over what the stock Trainer's optimizer had; a collective. Returns the state of its schedule.

    Raises ZeroCheckpointError on all ranks where it does not fit the optimizer of this run.
    """
    from hf_zero.convert.pickles import load

    schedule: dict[str, Any] = {}

    def read() -> None:
        path = folder / OPTIMIZER_NAME
        schedule.update(load(folder / SCHEDULER_NAME))
        (binding,), (members,) = engine.bindings, members_of(engine.buffers, engine.bindings)
        engine.load_optimizer_state(binding.optimizer, _by_name(load(path), binding, members, path))

    on_all_ranks(engine.comm, read)
    return schedule


def load_scaler(engine: ZeroEngine, folder: Path) -> None:
    """Take over the loss scale of torch's gradient scaler, where there is one; a collective."""
    from hf_zero.convert.pickles import load

    def read() -> None:
        saved = load(folder / SCALER_NAME)
        counts = {"scale": saved["scale"], "since_overflow": saved["_growth_tracker"]}
        engine.scaler.load_state_dict({**engine.scaler.state_dict(), **counts})

    if engine.scaler is not None:
        on_all_ranks(engine.comm, lambda: read() if (folder / SCALER_NAME).is_file() else None)


def _by_name(state: Mapping[str, Any], binding: Binding, members: Groups, path: Path) -> dict[str, Any]:
    """The state keyed by parameter name, as ours are: torch counts parameters in the order of the groups."""
    name = type(binding.optimizer).__name__
    sizes, ours = [len(group["params"]) for group in state["param_groups"]], [len(names) for names in members]
    if sizes != ours:
        raise ZeroCheckpointError(
            f"{path} has groups of {sizes} parameters, this run's {name} has groups of {ours}: build the optimizer "
            "that was saved"
        )
    values: dict[str, dict[str, object]] = {}
    groups = []
    for number, (group, names) in enumerate(zip(state["param_groups"], members, strict=True)):
        written = group.get(_NAMES, names)
        if sorted(written) != sorted(names):
            raise ZeroCheckpointError(f"{path} has other parameters than this run's {name} in group {number}")
        shapes = {name: param.shape for name, param in zip(names, binding.groups[number], strict=True)}
        options = {key: value for key, value in group.items() if key not in {*_IMPLEMENTATION, _NAMES, "params"}}
        found = set()
        whole: dict[int, set[str]] = {}  # by the number of dimensions
        for parameter, index in zip(written, group["params"], strict=True):
            kinds = state["state"].get(index, {})
            if binding.owned[number]:  # whole matrices have states of any shape
                values[parameter] = dict(kinds)
                whole.setdefault(len(shapes[parameter]), set()).update(kinds)
                continue
            values[parameter] = {k: _fitted(v, shapes[parameter], parameter, path) for k, v in kinds.items()}
            found |= {kind for kind, value in kinds.items() if isinstance(value, Tensor) and value.dim() > 0}
        check_kinds(found, binding.optimizer, options, path)
        for dims, kinds in whole.items():
            check_whole(kinds, dims, binding.optimizer, binding.optimizer.param_groups[number], path)
        groups.append({**options, "params": names})
    return {"state": values, "param_groups": groups}


def _fitted(value: object, shape: torch.Size, name: str, path: Path) -> object:
    """A state for masters, which are in fp32 at least."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.shape != shape:
        raise ZeroCheckpointError(
            f"{path} does not fit the model: '{name}' has shape {tuple(value.shape)}, the model's is {tuple(shape)}"
        )
    return value.to(torch.promote_types(value.dtype, torch.float32)) if value.is_floating_point() else value
