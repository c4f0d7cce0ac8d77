"""`save_state` and `load_state` of accelerate, with the engine's part written by the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file

from hf_zero import checkpoint
from hf_zero.engine import ZeroEngine, engine_of
from hf_zero.unit import gathered_parameters


if TYPE_CHECKING:
    from hf_zero.integrations.accelerate import ZeroAccelerator


def _names(index: int) -> tuple[str, str]:
    suffix = "" if index == 0 else f"_{index}"
    return f"model{suffix}.safetensors", checkpoint.STATE_NAME.replace(".", f"{suffix}.", 1)


@contextlib.contextmanager
def _without_ours(accelerator: ZeroAccelerator, install) -> Iterator[None]:
    """Run with a pre-hook of ours, and with our optimizers out of accelerate's sight."""
    kept = accelerator._optimizers
    accelerator._optimizers = [optimizer for optimizer in kept if not getattr(optimizer, "linked", False)]
    handle = install()
    try:
        yield
    finally:
        handle.remove()
        accelerator._optimizers = kept


def saving_hook(models: list, weights: list, folder: str) -> None:
    """Write each sharded model and its training state; accelerate writes what is left in `weights`."""
    for index, (model, weight) in enumerate(zip(models, weights, strict=True)):
        engine = engine_of(model)
        if engine is None:
            continue
        model_name, state_name = _names(index)
        if weight is not None:  # the main process holds the consolidated state dict
            _save_weights(weight, Path(folder) / model_name)
        save_engine(engine, folder, state_name)
    weights[:] = [weight for model, weight in zip(models, weights, strict=True) if engine_of(model) is None]


def _save_weights(state_dict: dict, path: Path) -> None:
    from accelerate.utils import clean_state_dict_for_safetensors

    temporary = path.with_name(path.name + ".tmp")
    save_file(clean_state_dict_for_safetensors(state_dict), temporary, metadata={"format": "pt"})
    temporary.replace(path)


def loading_hook(models: list, folder: str) -> None:
    """Load each sharded model and its training state; accelerate loads what is left in `models`."""
    for index, model in enumerate(models):
        engine = engine_of(model)
        if engine is None:
            continue
        model_name, state_name = _names(index)
        load_weights(model, Path(folder) / model_name)
        load_engine(engine, folder, state_name)
    models[:] = [model for model in models if engine_of(model) is None]


def load_weights(model, path: Path) -> None:
    with gathered_parameters(model, write=True):
        model.load_state_dict(load_file(path), strict=False)


def save_engine(engine: ZeroEngine, folder: str, name: str = checkpoint.STATE_NAME) -> None:
    """Write the masters and the optimizer state of one engine; a collective."""
    checkpoint.save_state(folder, engine.buffers, engine.optimizers, engine.comm, name)


def load_engine(engine: ZeroEngine, folder: str, name: str = checkpoint.STATE_NAME) -> None:
    """Read them back, and bring the weights in line with the masters; a collective."""
    engine.schedule.reshard_all()
    checkpoint.load_state(folder, engine.buffers, engine.optimizers, name)
    engine.after_load()


def saving_state(accelerator: ZeroAccelerator):
    return _without_ours(accelerator, lambda: accelerator.register_save_state_pre_hook(saving_hook))


def loading_state(accelerator: ZeroAccelerator):
    return _without_ours(accelerator, lambda: accelerator.register_load_state_pre_hook(loading_hook))
