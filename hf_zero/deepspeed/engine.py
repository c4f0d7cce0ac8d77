"""The engine that `initialize` returns: the calls of DeepSpeed's loop, carried out by hf_zero's engine."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from hf_zero.checkpoint.staging import on_all_ranks
from hf_zero.config import values
from hf_zero.deepspeed import missing
from hf_zero.deepspeed.batches import BatchSizes
from hf_zero.errors import ZeroRuntimeError
from hf_zero.integrations.plain_checkpoints import LoopEngine


_COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")


class DeepSpeedEngine:
    """`loss = engine(batch)`, `engine.backward(loss)`, `engine.step()`: the engine counts micro-batches itself.

    What it does not have is looked up in the model (`engine.parameters()`, `engine.generate`).

    Attributes:
        module: the model, the same object as before, never wrapped.
        optimizer, lr_scheduler, training_dataloader: as `initialize` returns them; each may be None.
        global_steps, micro_steps, skipped_steps, global_samples: counted since the start, over resumed runs too.
    """

    def __init__(self, engine: LoopEngine, optimizer: Any, lr_scheduler: Any, batches: BatchSizes) -> None:
        self._engine, self._batches = engine, batches
        self.module, self.device = engine.model, engine.device
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.training_dataloader: DataLoader | None = None
        self.global_rank, self.world_size = engine.comm.rank, engine.comm.world_size
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self._norm, self._syncs = None, True

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(self.module, name):
            return getattr(self.module, name)
        raise AttributeError(f"neither hf_zero's engine nor {type(self.module).__name__} has '{name}': {missing.DOCS}")

    # -- the training loop ----------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the model."""
        with self._window():
            return self.module(*args, **kwargs)

    forward = __call__

    def backward(self, loss: Tensor, **options: Any) -> Tensor:
        """Backward of `loss` divided by the micro-batches of a step; returns the quotient.

        `options` are those of `Tensor.backward`. Raises ZeroRuntimeError for an engine without optimizer.
        """
        if self.optimizer is None:
            raise ZeroRuntimeError("an engine without optimizer evaluates only: give initialize() an optimizer")
        scaled = loss / self._batches.accumulation
        with self._window():
            self._engine.backward(scaled, **options)
        return scaled

    def step(self) -> None:
        """Count a micro-batch; at the end of a window clip, step optimizer and scheduler, and zero gradients."""
        if not self._syncs:
            raise ZeroRuntimeError("engine.step() inside engine.no_sync(): leave no_sync() for the last micro-batch")
        if self.is_gradient_accumulation_boundary():
            self._update()
        self.micro_steps += 1

    def _update(self) -> None:
        if not self._engine.has_gradients:
            raise ZeroRuntimeError("engine.step() without gradients: call engine.backward(loss) for each micro-batch")
        limit = self._engine.config.gradient_clipping
        self._norm = self._engine.clip_grad_norm_(math.inf if values.is_auto(limit) or not limit else limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.global_steps += 1
        self.global_samples += self._batches.total
        if self._engine.step_was_skipped:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step()
        every = self._engine.config.steps_per_print
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            print(f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}", flush=True)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last one of its step."""
        return (self.micro_steps + 1) % self._batches.accumulation == 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients accumulate; `step` comes after it."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def _window(self) -> contextlib.AbstractContextManager:
        """What a micro-batch runs in: only the last one of a step has its gradients reduced, below stage 2."""
        reduces = self._syncs and self.is_gradient_accumulation_boundary()
        return contextlib.nullcontext() if reduces else self._engine.no_sync()

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        self.module.train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        return self.train(False)

    # -- what loops ask for ---------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Samples of a step, over all ranks."""
        return self._batches.total

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batches.micro

    def gradient_accumulation_steps(self) -> int:
        return self._batches.accumulation

    def get_lr(self) -> list[float]:
        """The learning rate of each group of the optimizer."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm over all ranks before clipping, of the last step; None before the first."""
        return None if self._norm is None else self._norm.item()

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save_checkpoint(self, save_dir: str, tag: str | None = None, client_state: Mapping | None = None) -> bool:
        """Write `save_dir/tag` (default: `global_stepN`), a whole Hugging Face folder to go on from; on all ranks.

        `client_state` is what the loop itself needs, of rank 0, as `hf_zero`'s `save_checkpoint` takes it. The file
        `latest` names the tag when the checkpoint is complete, so this waits for it with `async_save`, too.

        Raises ZeroRuntimeError naming the ranks that do not call it, ZeroCheckpointError where it cannot be written.
        """
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        counters, scheduler = {counter: getattr(self, counter) for counter in _COUNTERS}, self.lr_scheduler
        state = {"counters": counters, "client": client_state or {}}
        state["lr_scheduler"] = None if scheduler is None else scheduler.state_dict()
        self._engine.save_checkpoint(Path(save_dir) / name, state)
        self._engine.wait_for_checkpoint()
        on_all_ranks(self._engine.comm, lambda: self.global_rank or _name_latest(Path(save_dir), name))
        return True

    def load_checkpoint(self, load_dir: str, tag: str | None = None) -> tuple[str | None, dict | None]:
        """Go on from `load_dir/tag` (default: what `latest` names), at any number of ranks and stage; on all ranks.

        Returns the folder and the client state; (None, None) where there is no `latest`, as in DeepSpeed.

        Raises ZeroCheckpointError where the folder is not complete, or of another model or optimizer.
        """
        if tag is None:
            latest = Path(load_dir) / "latest"
            found = latest.read_text(encoding="utf-8").strip() if latest.is_file() else None
            tag = self._engine.comm.all_gather_object(found)[0]
            if tag is None:
                logging.getLogger(__name__).warning("nothing was loaded: %s does not exist; name a tag=", latest)
                return None, None
        folder = Path(load_dir) / str(tag)
        state = self._engine.load_checkpoint(folder)
        for counter, count in state.get("counters", {}).items():
            setattr(self, counter, count)
        if self.lr_scheduler is not None and state.get("lr_scheduler"):
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        return str(folder), state.get("client", {})

    def save_16bit_model(self, save_dir: str | os.PathLike) -> bool:
        """Write the weights in the dtype that the model computes in, as safetensors; on all ranks."""
        self._engine.save_model(save_dir)
        return True


def _name_latest(folder: Path, tag: str) -> None:
    """Have `latest` name the tag, at once: it is never seen half-written."""
    (folder / ".latest.tmp").write_text(tag, encoding="utf-8")
    os.replace(folder / ".latest.tmp", folder / "latest")
