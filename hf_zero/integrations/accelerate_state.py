"""accelerate's `save_state` and `load_state`: sharded models and their optimizers are written and read by us."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from hf_zero.checkpoint import commit, saving, training_state
from hf_zero.checkpoint.background import SaveJob
from hf_zero.checkpoint.building import Construction, built_aside
from hf_zero.checkpoint.plan import plan_module
from hf_zero.checkpoint.staging import on_all_ranks
from hf_zero.core.engine import engine_of
from hf_zero.errors import ZeroCheckpointError
from hf_zero.integrations.engine_state import load_engine, load_rest, save_engine


if TYPE_CHECKING:
    from hf_zero.integrations.accelerate import ZeroAccelerator


_CHECKPOINTS = "checkpoints"  # where accelerate puts the checkpoints that it numbers
_ONE_FILE = 2**62  # bytes: accelerate keeps each model in one file, under the names of its state dict


def _names(index: int) -> tuple[str, str]:
    suffix = "" if index == 0 else f"_{index}"
    return f"model{suffix}.safetensors", training_state.STATE_NAME.replace(".", f"{suffix}.", 1)


def save_state(
    accelerator: ZeroAccelerator, stock: Callable[[str], object], output_dir: str | Path | None, job: SaveJob
) -> Path:
    """Have accelerate save aside, by `stock(folder)`; sharded models and their optimizers are left to us."""
    project = accelerator.project_configuration
    named_by_us = project.automatic_checkpoint_naming
    if named_by_us:
        target = Path(accelerator.project_dir, _CHECKPOINTS, f"checkpoint_{accelerator.save_iteration}")
        on_all_ranks(job.comm, lambda: _check_new(target))
        # Not beside it: accelerate takes everything in that folder for a checkpoint.
        built = Path(accelerator.project_dir, commit.UNCOMMITTED, target.name)
    elif output_dir is None:
        raise ValueError("save_state needs a folder, or ProjectConfiguration(automatic_checkpoint_naming=True)")
    else:
        target, built = Path(output_dir), None
    final = target.resolve()  # a link stays, and what it leads to is replaced
    with built_aside(final, job, built) as construction:
        with _without_ours(accelerator), contextlib.ExitStack() as stack:
            save = functools.partial(_save_models, construction, job)
            stack.callback(accelerator.register_save_state_pre_hook(save).remove)
            stack.callback(setattr, project, "automatic_checkpoint_naming", named_by_us)
            project.automatic_checkpoint_naming = False
            stock(str(construction.folder))
        if named_by_us and project.total_limit is not None:
            construction.afterwards = functools.partial(_rotate, final, project.total_limit)
    return target


def _check_new(target: Path) -> None:
    if target.exists():
        raise ZeroCheckpointError(
            f"{target} exists: set accelerator.project_configuration.iteration to the number to go on with"
        )


def _save_models(construction: Construction, job: SaveJob, models: list, weights: list, folder: str) -> None:
    for index, model in enumerate(models):
        if engine_of(model) is not None:
            construction.sums += _save_one(model, index, folder, job)
    weights[:] = [weight for model, weight in zip(models, weights, strict=True) if engine_of(model) is None]


def _rotate(newest: Path, limit: int) -> None:
    """Remove the oldest checkpoints that accelerate has numbered, but for `limit` with the newest."""
    found = ((re.fullmatch(r"checkpoint_(\d+)", path.name), path) for path in newest.parent.iterdir())
    others = sorted((int(match[1]), path) for match, path in found if match and path != newest)
    for _, path in others[: max(0, len(others) + 1 - limit)]:
        shutil.rmtree(path, ignore_errors=True)


def finish_interrupted(accelerator: ZeroAccelerator, input_dir: str | Path | None) -> None:
    """Give its name to what was complete when the run that saved it was killed; a collective."""

    def finish() -> None:
        if input_dir is not None:
            final = Path(input_dir).expanduser().resolve()
            commit.finish_interrupted(commit.aside(final), final)
        elif accelerator.project_configuration.automatic_checkpoint_naming:
            commit.finish_run(Path(accelerator.project_dir), Path(accelerator.project_dir, _CHECKPOINTS))

    on_all_ranks(accelerator._engines()[0].comm, lambda: finish() if is_main(accelerator) else None)


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


def is_main(accelerator: ZeroAccelerator) -> bool:
    """Whether this rank is to create files."""
    each_node = accelerator.project_configuration.save_on_each_node
    return accelerator.is_local_main_process if each_node else accelerator.is_main_process


def save_model(accelerator: ZeroAccelerator, model: nn.Module, folder: str | Path, max_shard_size: int | str) -> None:
    """What `Accelerator.save_model` writes; a collective."""
    engine = engine_of(model)
    dtype_of = saving.saved_dtypes(model, engine.config.zero3_save_16bit_model)
    plan = plan_module(model, dtype_of, max_shard_size=max_shard_size)
    job = SaveJob(comm=engine.comm, is_main=is_main(accelerator), sums=False)
    saving.stage_weights(model, plan, folder, job).commit()


def _save_one(model: nn.Module, index: int, folder: str, job: SaveJob) -> list[commit.Sums]:
    """Save one sharded model and its training state; returns the checksums of their tensors by file."""
    engine = engine_of(model)
    model_name, state_name = _names(index)
    dtype_of = saving.saved_dtypes(model, engine.config.zero3_save_16bit_model)
    plan = plan_module(model, dtype_of, max_shard_size=_ONE_FILE).renamed(model_name)
    staged = saving.stage_weights(model, plan, folder, job)
    job.perform(staged.commit)
    stored = saving.exact_parameters(model, plan)
    return [staged.sums, save_engine(engine, folder, job, name=state_name, stored=stored)]


def _load_models(models: list, folder: str) -> None:
    """Load each sharded model and its training state; accelerate loads what is left in `models`."""
    ours = [engine for model in models if (engine := engine_of(model)) is not None]
    if ours:
        on_all_ranks(ours[0].comm, lambda: commit.check_complete(Path(folder)))
    for index, model in enumerate(models):
        engine = engine_of(model)
        if engine is None:
            continue
        model_name, state_name = _names(index)
        missing = load_engine(engine, folder, state_name)
        plan = plan_module(model, lambda tensor: tensor.dtype, max_shard_size=_ONE_FILE)
        load_rest(engine, model, Path(folder) / model_name, missing, plan)
    models[:] = [model for model in models if engine_of(model) is None]
