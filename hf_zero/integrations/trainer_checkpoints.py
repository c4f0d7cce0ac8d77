"""Trainer's checkpoints under ZeRO: complete or absent, resumable at any world size, read and written in slices."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from hf_zero import checkpoint, committed, loading
from hf_zero.background import Later, perform
from hf_zero.comm import Communicator
from hf_zero.engine import engine_of
from hf_zero.errors import ZeroCheckpointError, ZeroError
from hf_zero.integrations import state
from hf_zero.model_folder import SavedFolder, save_folder
from hf_zero.staging import agree, naming
from hf_zero.unit import gathered_parameters


logger = logging.getLogger(__name__)


class ZeroCheckpointMixin:
    """The part of `ZeroTrainerMixin` that saves and loads."""

    _saved: SavedFolder | None = None  # of the checkpoint that is being written
    _later: Later | None = None  # what a thread is to do of it
    _under_construction = False

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
            engine.comm,
            self.args.should_save,
            lambda folder, state_dict: self._save(folder, state_dict=state_dict),
            compute_dtype=engine.config.zero3_save_16bit_model,
            later=self._later,
        )
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        engine = engine_of(self.model)
        if engine is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        saved = self._saved
        assert saved is not None, "the model is saved before the optimizer"
        saved.sums.update(
            state.save_engine(engine, output_dir, is_main=self.args.should_save, stored=saved.exact, later=self._later)
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _get_output_dir(self, trial: Any) -> str:
        run_folder = super()._get_output_dir(trial)
        return os.path.join(run_folder, committed.UNCOMMITTED) if self._under_construction else run_folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Build the checkpoint aside, and give it its name when every rank has written its part.

        With `async_save` a thread does so from a copy, and training goes on.
        """
        engine = engine_of(self.model)
        if engine is None:
            super()._save_checkpoint(model, trial)
            return
        run_name, name = super()._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        final = Path(run_name, name)
        built = final.parent / committed.UNCOMMITTED / name
        with self.accelerator.saves.save(engine.comm, self.accelerator.zero_plugin.config.async_save) as later:
            agree(
                engine.comm, lambda: shutil.rmtree(built.parent, ignore_errors=True) if self.args.should_save else None
            )
            failure = self._build_checkpoint(model, trial, later)
            best = self.state.best_model_checkpoint
            if best is not None and Path(best) == built:
                self.state.best_model_checkpoint = os.path.join(run_name, name)
            agree(engine.comm, lambda: self._finish_small_files(built, failure))
            self._commit_checkpoint(built, final, engine.comm, later)
        if self.args.push_to_hub:
            self.accelerator.saves.wait()  # an upload reads the finished folder
            super()._push_from_checkpoint(str(final))

    def _build_checkpoint(self, model: nn.Module, trial: Any, later: Later | None) -> Exception | None:
        """Have Trainer save where the checkpoint is built; returns why this rank alone could not."""
        self._under_construction, self._later = True, later
        try:
            super()._save_checkpoint(model, trial)
        except ZeroError:
            raise  # the same on all ranks
        except (OSError, RuntimeError) as error:
            return error
        finally:
            self._under_construction, self._later = False, None
        return None

    def _finish_small_files(self, built: Path, failure: Exception | None) -> None:
        with naming(built):
            if failure is not None:
                raise failure
            if self.args.should_save:  # again: the path of the best model in it may be this folder
                self.state.save_to_json(str(built / TRAINER_STATE_NAME))

    def _commit_checkpoint(self, built: Path, final: Path, comm: Communicator, later: Later | None) -> None:
        """Give the checkpoint its name, now or when it is written; what the thread needs is taken along."""
        sums, writes = self._saved.sums, self.args.should_save
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        if later is not None:
            comm, later.folder = later.comm, str(final)
        perform(lambda: agree(comm, lambda: _commit(built, final, sums, limit, best) if writes else None), later)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._under_construction:
            super()._push_from_checkpoint(checkpoint_folder)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator.saves.wait()  # Trainer now looks for the best checkpoint, and deletes others
        return super()._finalize_training(*args, **kwargs)

    # -- loading ----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`; `True` resumes from the newest checkpoint that is complete and undamaged."""
        self.accelerator.saves.wait()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(newest_committed(Path(self.args.output_dir)))
        elif isinstance(resume_from_checkpoint, str | os.PathLike):
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
            folder = Path(resume_from_checkpoint)
            if committed.is_committed(folder):
                committed.check_files(folder)
            elif folder.is_dir():
                logger.warning(f"{folder} has no {committed.MARKER} file: whether it is complete cannot be checked")
        try:
            output = super().train(resume_from_checkpoint, *args, **kwargs)
        except BaseException:
            self.accelerator.saves.finish()  # what was under way may still be completed; the error of training counts
            raise
        self.accelerator.saves.wait()
        return output

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        engine = engine_of(self.model)
        if not self._loads_slices(resume_from_checkpoint):
            if engine is None:
                super()._load_from_checkpoint(resume_from_checkpoint, model)
                return
            with gathered_parameters(self.model, write=True):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif engine is not None:
            state.load_weights(engine, self.model, resume_from_checkpoint)
        elif not self.is_in_train:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        # Otherwise the model is about to be sharded: each rank then reads its slices.

    def _loads_slices(self, folder: str) -> bool:
        """Whether the weights of a folder can be read in slices; adapters, pickles and computed weights cannot."""
        if hasattr(self.model, "peft_config") or not loading.has_weights(Path(folder)):
            return False
        return loading.can_load(self.model)

    def _load_optimizer_and_scheduler(self, checkpoint_dir: str | None) -> None:
        engine = engine_of(self.model)
        if checkpoint_dir is None or engine is None:
            super()._load_optimizer_and_scheduler(checkpoint_dir)
            return
        slices = self._loads_slices(checkpoint_dir)
        if not (Path(checkpoint_dir) / checkpoint.STATE_NAME).exists():
            logger.warning(f"{checkpoint_dir} holds weights only: optimizer and scheduler start afresh")
            if slices:
                state.load_weights(engine, self.model, checkpoint_dir)
            return
        missing = state.load_engine(engine, checkpoint_dir)
        if slices:
            state.load_rest(engine, self.model, checkpoint_dir, missing)
        else:
            engine.after_load()
        scheduler = torch.load(os.path.join(checkpoint_dir, SCHEDULER_NAME), map_location="cpu", weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)

    def _load_best_model(self) -> None:
        engine, best = engine_of(self.model), self.state.best_model_checkpoint
        if engine is not None and self._loads_slices(best):
            logger.info(f"Loading best model from {best} (score: {self.state.best_metric}).")
            state.load_weights(engine, self.model, best)
            return
        with gathered_parameters(self.model, write=True):
            super()._load_best_model()


def _commit(built: Path, final: Path, sums: committed.Sums, limit: int | None, best: str | None) -> None:
    """Mark a folder as complete, give it its name, and remove checkpoints beyond the limit."""
    with naming(built):
        committed.write_marker(built, sums)
    committed.place(built, final)
    built.parent.rmdir()
    rotate_checkpoints(
        output_dir=str(final.parent), save_total_limit=limit, best_model_checkpoint=best, use_mtime=True
    )


def newest_committed(run_folder: Path) -> Path:
    """The newest checkpoint that is complete and undamaged; a collective. Names the ones that are skipped.

    Raises ZeroCheckpointError where there is none.
    """
    comm = Communicator()
    if comm.rank == 0:
        committed.finish_interrupted(run_folder)
    comm.barrier()
    skipped = [f"{folder} (torn: the run ended while it was written)" for folder in committed.torn_folders(run_folder)]
    found = None
    for folder in committed.step_folders(run_folder):
        try:
            agree(comm, lambda folder=folder: _check(folder, comm))
        except ZeroCheckpointError as error:
            skipped.append(f"{folder} ({error})")
        else:
            found = folder
            break
    if comm.rank == 0:
        for line in skipped:
            logger.warning(f"skipped {line}")
    if found is None:
        raise ZeroCheckpointError(
            f"no complete checkpoint in {run_folder}" + "".join(f"; skipped {line}" for line in skipped)
        )
    return found


def _check(folder: Path, comm: Communicator) -> None:
    if not committed.is_committed(folder):
        raise ZeroCheckpointError(f"torn, or not written by hf_zero: it has no {committed.MARKER} file")
    committed.check_files(folder)
    committed.check_tensors(folder, comm.rank, comm.world_size)
