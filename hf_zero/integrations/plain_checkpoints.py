"""The engine of a plain torch loop, with checkpoints of the whole training."""

from __future__ import annotations

import functools
import logging
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_zero.checkpoint import commit, loading
from hf_zero.checkpoint.background import BackgroundSaves, SaveJob
from hf_zero.checkpoint.building import built_aside
from hf_zero.checkpoint.held import logical_state
from hf_zero.checkpoint.model_folder import save_folder
from hf_zero.checkpoint.staging import on_all_ranks
from hf_zero.comm.communicator import MEETING_SECONDS
from hf_zero.core.engine import ZeroEngine
from hf_zero.errors import ZeroCheckpointError
from hf_zero.integrations import engine_state, plain_values


logger = logging.getLogger(__name__)

CLIENT_STATE_NAME, RANDOM_STATES_NAME = "client_state.safetensors", "random_states.safetensors"


class LoopEngine(ZeroEngine):
    """What `shard` makes: an engine that also writes and reads checkpoints of its training."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._saves = BackgroundSaves()

    def save_checkpoint(self, folder: str | os.PathLike, client_state: Mapping[str, Any] | None = None) -> None:
        """Write everything that the training needs to go on; a collective, to be called between optimizer steps.

        `folder` becomes a Hugging Face folder (of a model that is not transformers' or PEFT's: its weights as
        safetensors) with masters, optimizer states, loss scale and the states of all random generators. A folder that
        exists is replaced when the new one is complete. `client_state` is what the loop itself needs, of rank 0:
        numbers, strings, tensors, and dicts, lists and tuples of them, such as `{"step": 100, "scheduler":
        scheduler.state_dict()}`. With `async_save` the values are copied, and a thread writes them meanwhile.

        Raises ZeroCheckpointError on all ranks where one cannot write, and then the old folder is as it was, and
        ZeroRuntimeError that names the ranks where some do not call it.
        """
        self.comm.meet("save_checkpoint", MEETING_SECONDS)
        final, is_main = Path(folder).resolve(), self.comm.rank == 0
        self._check_readable()
        # Before the first byte, and on all ranks.
        on_all_ranks(
            self.comm, lambda: plain_values.check(dict(client_state or {}), "client_state") if is_main else None
        )
        width = self.comm.world_size // self.mesh.world.world_size  # tensor-parallel ranks draw the same numbers
        generators = self.comm.all_gather_object(_random_states(self.device))[::width]
        with self._saves.save(self.comm, is_main, self.config.async_save) as job:
            with built_aside(final, job) as construction:
                built = construction.folder
                saved = save_folder(
                    self.model,
                    built,
                    job,
                    functools.partial(_write_rest, self.model),
                    compute_dtype=self.config.zero3_save_16bit_model,
                )
                state = engine_state.save_engine(self, built, job, stored=saved.exact)
                construction.sums += [saved.sums, state]
                if is_main:
                    plain_values.write(built / RANDOM_STATES_NAME, generators)
                    plain_values.write(built / CLIENT_STATE_NAME, dict(client_state or {}))

    def save_model(self, folder: str | os.PathLike) -> None:
        """Write the weights in the dtype that the model computes in, with its configuration; a collective.

        The folder is what `save_pretrained` would write (of a model that is not transformers' or PEFT's: safetensors).
        """
        job = SaveJob(comm=self.comm, is_main=self.comm.rank == 0, sums=False)
        save_folder(self.model, folder, job, functools.partial(_write_rest, self.model))

    def _check_readable(self) -> None:
        """Raise where a weight has no master, and `load_checkpoint` could not read it from the model's files."""
        trained = {id(param) for buffer in self.buffers if buffer.trainable for param in buffer.params}
        weights = logical_state(self.model)
        lost = sorted(name for name in loading.computed_weights(self.model) if id(weights[name]) not in trained)
        if lost and not _has_adapters(self.model):
            raise ZeroCheckpointError(
                f"'{lost[0]}' is not trained, and the files of {type(self.model).__name__} hold something computed "
                "from it, which cannot be read back: use ZeroAccelerator, whose save_state writes weights as they are"
            )

    def load_checkpoint(self, folder: str | os.PathLike) -> dict[str, Any]:
        """Go on from what `save_checkpoint` wrote, at any number of ranks and stage; a collective.

        The model and the optimizer must be built as they were. Returns the `client_state`, its mappings as dicts.
        Ranks that the saved run did not have keep their random generators as they are.

        Raises ZeroCheckpointError on all ranks where the folder is not complete and undamaged, or is of another model
        or optimizer.
        """
        final = Path(folder).resolve()
        self.wait_for_checkpoint()
        on_all_ranks(
            self.comm,
            lambda: commit.finish_interrupted(commit.aside(final), final) if self.comm.rank == 0 else None,
        )
        found: dict[str, Any] = {}

        def check() -> None:
            commit.check_complete(final)
            for name in (CLIENT_STATE_NAME, RANDOM_STATES_NAME):
                if (final / name).exists():
                    found[name] = plain_values.read(final / name)

        on_all_ranks(self.comm, check)
        missing = engine_state.load_engine(self, final)
        if _has_adapters(self.model):  # all that is trained has masters, and the rest is what the adapters are put on
            self.after_load()
        else:
            engine_state.load_rest(self, self.model, final, missing)
        generators = found.get(RANDOM_STATES_NAME, [])
        rank = self.mesh.world.rank
        if rank < len(generators):
            _restore_random_states(generators[rank], self.device)
        else:
            logger.warning(f"{final} has no random state of rank {rank}: its generators stay as they are")
        return found.get(CLIENT_STATE_NAME, {})

    def wait_for_checkpoint(self) -> None:
        """Wait for a checkpoint that a thread writes. Raises ZeroCheckpointError on all ranks where that failed."""
        self._saves.wait()


def _has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False)


def _write_rest(model: nn.Module, folder: str, state_dict: dict[str, torch.Tensor]) -> None:
    """The configuration and the like of a model of transformers or PEFT."""
    if hasattr(model, "_keys_to_ignore_on_save") or _has_adapters(model):
        model.save_pretrained(folder, state_dict=state_dict)


def _random_states(device: torch.device) -> dict[str, Any]:
    """The generators of Python, numpy and torch, and that of the device."""
    import numpy

    version, words, gauss = random.getstate()
    name, key, *rest = numpy.random.get_state()
    states = {
        "python": (version, torch.tensor(words), gauss),
        "numpy": (name, torch.from_numpy(key.astype("int64")), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device.type).get_rng_state(device)
    return states


def _restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    import numpy

    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, key, *rest = states["numpy"]
    numpy.random.set_state((name, key.numpy().astype("uint32"), *rest))
    torch.set_rng_state(states["torch"])
    if device.type in states:
        torch.get_device_module(device.type).set_rng_state(states[device.type], device)
