"""What accelerate's and Trainer's checkpoints have in common: the engine's part of them, written by the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from hf_zero import checkpoint, committed, loading, saving
from hf_zero.background import Later, perform
from hf_zero.engine import ZeroEngine, engine_of
from hf_zero.errors import ZeroCheckpointError
from hf_zero.saving_plan import SavePlan, logical_state, plan_module
from hf_zero.staging import agree


if TYPE_CHECKING:
    from hf_zero.integrations.accelerate import ZeroAccelerator


def save_engine(
    engine: ZeroEngine,
    folder: str | Path,
    *,
    name: str = checkpoint.STATE_NAME,
    is_main: bool,
    stored: frozenset[int] = frozenset(),
    later: Later | None = None,
) -> dict[str, dict[str, int]]:
    """Write optimizer state and masters (but for those `stored` in the model's files); returns checksums by file."""
    extra = {} if engine.scaler is None else {"loss_scale": engine.scaler.state_dict()}
    sums = checkpoint.save_state(
        folder, engine.buffers, engine.bindings, engine.comm, name, is_main, stored, extra, later
    )
    return {name: sums}


def load_engine(engine: ZeroEngine, folder: str | Path, name: str = checkpoint.STATE_NAME) -> set[str]:
    """Read them back; a collective. Returns the names of the parameters whose masters are in the model's files."""
    engine.before_load()
    missing, extra = checkpoint.load_state(folder, engine.buffers, engine.bindings, engine.comm, name)
    if engine.scaler is not None and "loss_scale" in extra:
        engine.scaler.load_state_dict(extra["loss_scale"])
    return missing


def load_rest(
    engine: ZeroEngine, model: nn.Module, folder: str | Path, missing: set[str], plan: SavePlan | None = None
) -> None:
    """Read from the model's files what the training state lacks: frozen weights, buffers, `missing` masters."""
    mastered = {
        id(param)
        for buffer in engine.buffers
        if buffer.trainable
        for name, param in zip(buffer.names, buffer.params, strict=True)
        if name not in missing
    }
    logical = logical_state(model)
    loading.load_weights(model, folder, engine.comm, lambda name: id(logical[name]) not in mastered, plan)
    engine.after_load()


def load_weights(engine: ZeroEngine, model: nn.Module, folder: str | Path) -> None:
    """Read all weights from the model's files; a collective."""
    engine.before_load()
    loading.load_weights(model, folder, engine.comm)
    engine.after_load()


# -- accelerate's save_state and load_state ---------------------------------------------------------------------------


_ONE_FILE = 2**62  # bytes: accelerate keeps each model in one file, under the names of its state dict


def _names(index: int) -> tuple[str, str]:
    suffix = "" if index == 0 else f"_{index}"
    return f"model{suffix}.safetensors", checkpoint.STATE_NAME.replace(".", f"{suffix}.", 1)


@contextlib.contextmanager
def saving_state(accelerator: ZeroAccelerator, later: Later | None) -> Iterator[Callable[[str], None]]:
    """Inside, accelerate leaves sharded models and their optimizers to us; the value marks a folder as complete."""
    sums: dict[str, dict[str, int]] = {}

    def save(models: list, weights: list, folder: str) -> None:
        if _is_main(accelerator):
            (Path(folder) / committed.MARKER).unlink(missing_ok=True)
        accelerator.wait_for_everyone()
        for index, model in enumerate(models):
            if engine_of(model) is not None:
                _save_one(accelerator, model, index, folder, sums, later)
        weights[:] = [weight for model, weight in zip(models, weights, strict=True) if engine_of(model) is None]

    def commit(folder: str) -> None:
        is_main = _is_main(accelerator)
        comm = accelerator._engines()[0].comm if later is None else later.comm
        accelerator.wait_for_everyone()

        def finish() -> None:
            agree(comm, lambda: committed.write_marker(Path(folder), sums) if is_main else None)

        perform(finish, later)
        if later is not None:
            later.folder = folder

    with _without_ours(accelerator), contextlib.ExitStack() as stack:
        stack.callback(accelerator.register_save_state_pre_hook(save).remove)
        yield commit


@contextlib.contextmanager
def loading_state(accelerator: ZeroAccelerator) -> Iterator[None]:
    """Inside, accelerate leaves sharded models and their optimizers to us."""
    with _without_ours(accelerator), contextlib.ExitStack() as stack:
        stack.callback(accelerator.register_load_state_pre_hook(_load_models).remove)
        yield


@contextlib.contextmanager
def _without_ours(accelerator: ZeroAccelerator) -> Iterator[None]:
    kept = accelerator._optimizers
    accelerator._optimizers = [optimizer for optimizer in kept if not getattr(optimizer, "linked", False)]
    accelerator.leaves_out_state_dicts = True
    try:
        yield
    finally:
        accelerator._optimizers = kept
        accelerator.leaves_out_state_dicts = False


def _is_main(accelerator: ZeroAccelerator) -> bool:
    """Whether this rank is to create files."""
    each_node = accelerator.project_configuration.save_on_each_node
    return accelerator.is_local_main_process if each_node else accelerator.is_main_process


def save_model(accelerator: ZeroAccelerator, model: nn.Module, folder: str | Path, max_shard_size: int | str) -> None:
    """What `Accelerator.save_model` writes; a collective."""
    engine = engine_of(model)
    dtype_of = saving.saved_dtypes(model, engine.config.zero3_save_16bit_model)
    plan = plan_module(model, dtype_of, max_shard_size=max_shard_size)
    saving.stage_weights(model, plan, folder, engine.comm, _is_main(accelerator)).commit()


def _save_one(
    accelerator: ZeroAccelerator,
    model: nn.Module,
    index: int,
    folder: str,
    sums: dict[str, dict[str, int]],
    later: Later | None,
) -> None:
    engine, is_main = engine_of(model), _is_main(accelerator)
    model_name, state_name = _names(index)
    dtype_of = saving.saved_dtypes(model, engine.config.zero3_save_16bit_model)
    plan = plan_module(model, dtype_of, max_shard_size=_ONE_FILE).renamed(model_name)
    staged = saving.stage_weights(model, plan, folder, engine.comm, is_main, later).staged

    def finish() -> None:
        staged.commit()
        sums.update(plan.by_file(staged.sums))

    perform(finish, later)
    stored = saving.exact_parameters(model, plan)
    sums.update(save_engine(engine, folder, name=state_name, is_main=is_main, stored=stored, later=later))


def _load_models(models: list, folder: str) -> None:
    """Load each sharded model and its training state; accelerate loads what is left in `models`."""
    ours = [model for model in models if engine_of(model) is not None]
    if ours and not committed.is_committed(Path(folder)):
        raise ZeroCheckpointError(f"{folder} was not saved completely (it has no {committed.MARKER} file)")
    for index, model in enumerate(models):
        engine = engine_of(model)
        if engine is None:
            continue
        model_name, state_name = _names(index)
        missing = load_engine(engine, folder, state_name)
        plan = plan_module(model, lambda tensor: tensor.dtype, max_shard_size=_ONE_FILE)
        load_rest(engine, model, Path(folder) / model_name, missing, plan)
    models[:] = [model for model in models if engine_of(model) is None]
