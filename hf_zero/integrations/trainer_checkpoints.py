"""Trainer's checkpoints under ZeRO: complete or absent, resumable at any world size, read and written in slices."""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

from hf_zero.checkpoint import commit, loading, training_state
from hf_zero.checkpoint.background import SaveJob
from hf_zero.checkpoint.building import built_aside
from hf_zero.checkpoint.model_folder import SavedFolder, save_folder
from hf_zero.checkpoint.staging import on_all_ranks
from hf_zero.comm.communicator import Communicator
from hf_zero.core.engine import ZeroEngine, engine_of
from hf_zero.core.unit import gathered_parameters
from hf_zero.errors import ZeroCheckpointError, ZeroDamageError
from hf_zero.integrations import engine_state, stock_checkpoints


logger = logging.getLogger(__name__)


class ZeroCheckpointMixin:
    """The part of `ZeroTrainerMixin` that saves and loads."""

    _saved: SavedFolder | None = None  # of the checkpoint that is being written
    _job: SaveJob | None = None  # what writes it
    _damaged: dict[Path, str] | None = None  # what proved so as it was loaded, where the newest checkpoint is searched

    # -- saving -----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as a Hugging Face folder; call it on all ranks, as Trainer itself does."""
        engine = engine_of(self.model)
        if engine is None:
            super().save_model(output_dir, _internal_call)
            return
        self._saved = save_folder(
            self.model,
            output_dir or self.args.output_dir,
            self._job or SaveJob(comm=engine.comm, is_main=self.args.should_save, sums=False),
            lambda folder, state_dict: self._save(folder, state_dict=state_dict),
            compute_dtype=engine.config.zero3_save_16bit_model,
        )
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        engine = engine_of(self.model)
        if engine is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        saved, job = self._saved, self._job
        assert saved is not None and job is not None, "the model is saved before the optimizer"
        saved.sums.update(engine_state.save_engine(engine, output_dir, job, stored=saved.exact))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _get_output_dir(self, trial: Any) -> str:
        run_folder = super()._get_output_dir(trial)
        return os.path.join(run_folder, commit.UNCOMMITTED) if self._job is not None else run_folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Build the checkpoint aside, and give it its name when every rank has written its part.

        With `async_save` a thread does so from a copy, and training goes on.
        """
        engine = engine_of(self.model)
        if engine is None:
            super()._save_checkpoint(model, trial)
            return
        run_folder = super()._get_output_dir(trial)
        final = commit.step_folder(Path(run_folder), self.state.global_step)
        writes = self.args.should_save
        asynchronous = self.accelerator.zero_plugin.config.async_save
        with self.accelerator.saves.save(engine.comm, writes, asynchronous) as job:
            on_all_ranks(engine.comm, lambda: _clear(final.parent) if writes else None)
            with built_aside(final, job) as construction:
                self._build_checkpoint(model, trial, job)
                best = self.state.best_model_checkpoint
                if best is not None and Path(best) == construction.folder:
                    self.state.best_model_checkpoint = os.path.join(run_folder, final.name)
                if writes:  # again, as the path of the best model in it may be this folder
                    self.state.save_to_json(str(construction.folder / TRAINER_STATE_NAME))
                construction.sums.append(self._saved.sums)
                construction.afterwards = functools.partial(
                    rotate_checkpoints,
                    output_dir=str(final.parent),
                    save_total_limit=self.args.save_total_limit,
                    best_model_checkpoint=self.state.best_model_checkpoint,
                    use_mtime=True,
                )
        if self.args.push_to_hub:
            self.accelerator.saves.wait()  # an upload reads the finished folder
            super()._push_from_checkpoint(str(final))

    def _build_checkpoint(self, model: nn.Module, trial: Any, job: SaveJob) -> None:
        """Have Trainer save where the checkpoint is built."""
        self._job = job
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._job = None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._job is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator.saves.wait()  # Trainer now looks for the best checkpoint, and deletes others
        return super()._finalize_training(*args, **kwargs)

    # -- loading ----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`; `True` resumes from the newest checkpoint that is complete and undamaged."""
        self.accelerator.saves.wait()
        self._damaged = {} if resume_from_checkpoint is True else None
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest()
        elif isinstance(resume_from_checkpoint, str | os.PathLike):
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
            folder = Path(resume_from_checkpoint)
            on_all_ranks(Communicator.connect(peer_memory=False), lambda: _check_given(folder))
        try:
            output = super().train(resume_from_checkpoint, *args, **kwargs)
        except BaseException:
            self.accelerator.saves.finish()  # what was under way may still be completed; the error of training counts
            raise
        self.accelerator.saves.wait()
        return output

    def _newest(self) -> str:
        """The newest checkpoint but for those that proved damaged as they were loaded; a collective."""
        each_node, damaged = self.args.save_on_each_node, self._damaged or {}

        def check(folder: Path, share: int, shares: int) -> None:
            commit.check_complete(folder)
            if each_node:  # a node reads all of its own files
                share, shares = self.args.local_process_index, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            if each_node or not self._loads_slices(folder):  # otherwise tensors are compared as they are loaded
                commit.check_tensors(folder, share, shares, but=() if each_node else {training_state.STATE_NAME})
            if damaged and not (folder / training_state.STATE_NAME).exists():
                raise ZeroCheckpointError("options of a damaged one would stay, it holds none: resume from its path")

        return str(newest_committed(Path(self.args.output_dir), self.args.should_save, check, damaged))

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; where the newest checkpoint proves damaged as it is loaded, the one before it is taken."""
        while True:
            try:
                return super()._inner_training_loop(*args, **kwargs)
            except _LoadedDamageError:
                kwargs["resume_from_checkpoint"] = self._newest()
                self._load_from_checkpoint(kwargs["resume_from_checkpoint"])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        engine = engine_of(self.model)
        if not self._loads_slices(resume_from_checkpoint):
            if engine is None:
                super()._load_from_checkpoint(resume_from_checkpoint, model)
                return
            with gathered_parameters(self.model, write=True):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif self.is_in_train:
            return  # each rank reads its slices when the model is sharded and the optimizer is there
        elif engine is not None:
            engine_state.load_weights(engine, self.model, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _loads_slices(self, folder: str | Path) -> bool:
        """Whether the weights of a folder can be read in slices; adapters, pickles and computed weights cannot."""
        if hasattr(self.model, "peft_config") or not loading.has_weights(Path(folder)):
            return False
        return loading.can_load(self.model)

    def _load_optimizer_and_scheduler(self, checkpoint_dir: str | None) -> None:
        engine = engine_of(self.model)
        if checkpoint_dir is None or engine is None:
            super()._load_optimizer_and_scheduler(checkpoint_dir)
            return
        try:
            self._load_training_state(engine, checkpoint_dir)
        except ZeroDamageError as error:
            if self._damaged is None:
                raise
            engine_state.forget_states(engine)  # what is loaded in their place may have fewer
            self._damaged[Path(checkpoint_dir)] = str(error)
            raise _LoadedDamageError from error

    def _load_training_state(self, engine: ZeroEngine, checkpoint_dir: str) -> None:
        slices, folder = self._loads_slices(checkpoint_dir), Path(checkpoint_dir)
        if not (folder / training_state.STATE_NAME).exists():
            is_stock = stock_checkpoints.find(folder)
            if slices:
                engine_state.load_weights(engine, self.model, checkpoint_dir)
            if is_stock:
                self.lr_scheduler.load_state_dict(stock_checkpoints.load_optimizer(engine, folder))
            else:
                logger.warning(f"{checkpoint_dir} holds no optimizer state: optimizer and scheduler start afresh")
            return
        missing = engine_state.load_engine(engine, checkpoint_dir)
        if slices:
            engine_state.load_rest(engine, self.model, checkpoint_dir, missing, verify=self._damaged is not None)
        else:
            engine.after_load()
        on_all_ranks(engine.comm, lambda: self._load_schedule(folder / SCHEDULER_NAME))

    def _load_schedule(self, path: Path) -> None:
        self.lr_scheduler.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))

    def _load_scaler(self, checkpoint: str | None) -> None:
        engine = engine_of(self.model)
        if checkpoint is None or engine is None:
            super()._load_scaler(checkpoint)
        else:  # there is no gradient scaler: the engine keeps the loss scale
            stock_checkpoints.load_scaler(engine, Path(checkpoint))

    def _load_best_model(self) -> None:
        engine, best = engine_of(self.model), self.state.best_model_checkpoint
        if engine is not None and self._loads_slices(best):
            logger.info(f"Loading best model from {best} (score: {self.state.best_metric}).")
            engine_state.load_weights(engine, self.model, best)
            return
        with gathered_parameters(self.model, write=True):
            super()._load_best_model()


class _LoadedDamageError(ZeroDamageError):
    """The checkpoint that training was about to go on from is damaged."""


def _clear(run_folder: Path) -> None:
    """Give what an earlier run has completed its name, and remove what it has left torn."""
    commit.finish_run(run_folder)
    for folder in commit.torn_folders(run_folder):
        shutil.rmtree(folder, ignore_errors=True)


def newest_committed(
    run_folder: Path, is_main: bool, check: Callable[[Path, int, int], None], damaged: Mapping[Path, str]
) -> Path:
    """The newest checkpoint that is complete and undamaged on all ranks; a collective. Names the ones it skips.

    `is_main` says that this rank may rename what was complete when a run was killed; `check(folder, rank, ranks)` does
    a rank's part of the check, and `damaged` need none. Raises ZeroCheckpointError where there is none.
    """
    comm = Communicator.connect(peer_memory=False)
    found: list[int] = []
    on_all_ranks(comm, lambda: commit.finish_run(run_folder) if is_main else None)
    on_all_ranks(comm, lambda: found.extend(commit.steps_in(run_folder)))
    skipped = dict.fromkeys(commit.torn_folders(run_folder), "torn: the run ended while it was written") | damaged
    steps = comm.all_gather_object(found)
    newest = None
    for step in sorted(set().union(*steps), reverse=True):
        folder = commit.step_folder(run_folder, step)
        lacking = [rank for rank, theirs in enumerate(steps) if step not in theirs]
        try:
            if lacking:
                raise ZeroCheckpointError(f"rank(s) {lacking} of {comm.world_size} do not have it")
            if folder not in damaged:
                on_all_ranks(comm, functools.partial(check, folder, comm.rank, comm.world_size))
                newest = folder
                break
        except ZeroCheckpointError as error:
            skipped[folder] = str(error)
    lines = [f"skipped {folder} ({why})" for folder, why in skipped.items()]
    for line in lines if comm.rank == 0 else ():
        logger.warning(line)
    if newest is None:
        raise ZeroCheckpointError("; ".join([f"no complete checkpoint in {run_folder}", *lines]))
    return newest


def _check_given(folder: Path) -> None:
    if commit.is_committed(folder):
        commit.check_files(folder)
    elif folder.is_dir():
        stock_checkpoints.find(folder)  # another system's is refused before anything is loaded
        logger.warning(f"{folder} has no {commit.MARKER} file: whether it is complete cannot be checked")
    else:
        raise ZeroCheckpointError(f"{folder} does not exist")
