"""The engine's part of every checkpoint: masters, optimizer states and loss scale, beside the model's own files."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from hf_zero.checkpoint import loading, training_state
from hf_zero.checkpoint.background import SaveJob
from hf_zero.checkpoint.held import logical_state
from hf_zero.checkpoint.plan import SavePlan
from hf_zero.core import drift
from hf_zero.core.engine import ZeroEngine


def save_engine(
    engine: ZeroEngine,
    folder: str | Path,
    job: SaveJob,
    *,
    name: str = training_state.STATE_NAME,
    stored: frozenset[int] = frozenset(),
) -> dict[str, dict[str, int]]:
    """Write optimizer state and masters (but for those `stored` in the model's files); returns checksums by file."""
    drift.mend(engine)
    extra: dict[str, object] = {} if engine.scaler is None else {"loss_scale": engine.scaler.state_dict()}
    if engine.homes.optimizer.courier.crosses:
        extra["offload_step"] = engine.homes.step_place.name
    engine.settle()
    sums = training_state.save_state(folder, engine.buffers, engine.bindings, job, name, stored, extra)
    engine.anchor()
    return {name: sums}


def load_engine(engine: ZeroEngine, folder: str | Path, name: str = training_state.STATE_NAME) -> set[str]:
    """Read them back; a collective. Returns the names of the parameters whose masters are in the model's files."""
    engine.before_load()
    missing, extra = training_state.load_state(folder, engine.buffers, engine.bindings, engine.comm, name)
    if engine.scaler is not None and "loss_scale" in extra:
        engine.scaler.load_state_dict(extra["loss_scale"])
    if engine.homes.optimizer.courier.crosses and "offload_step" in extra:
        engine.homes.step_place.resume(extra["offload_step"], warns=engine.comm.rank == 0)
    return missing


def forget_states(engine: ZeroEngine) -> None:
    """Have optimizers keep nothing but their options, as before the first step; a collective."""
    members = training_state.members_of(engine.buffers, engine.bindings)
    for binding, groups in zip(engine.bindings, members, strict=True):
        named = [{"params": names} for names in groups]
        engine.load_optimizer_state(binding.optimizer, {"state": {}, "param_groups": named})


def load_rest(
    engine: ZeroEngine,
    model: nn.Module,
    folder: str | Path,
    missing: set[str],
    plan: SavePlan | None = None,
    verify: bool = False,
) -> None:
    """Read from the model's files what the training state lacks: frozen weights, buffers, `missing` masters.

    With `verify`, everything else in them is read to be compared.
    """
    mastered = {
        id(param)
        for buffer in engine.buffers
        if buffer.trainable
        for name, param in zip(buffer.names, buffer.params, strict=True)
        if name not in missing
    }
    logical = logical_state(model)
    loading.load_weights(model, folder, engine.comm, lambda name: id(logical[name]) not in mastered, plan, verify)
    engine.after_load()


def load_weights(engine: ZeroEngine, model: nn.Module, folder: str | Path) -> None:
    """Read all weights from the model's files; a collective."""
    engine.before_load()
    loading.load_weights(model, folder, engine.comm)
    engine.after_load()
