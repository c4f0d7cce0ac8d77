"""`shard`: the engine for a training loop in plain torch."""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist
from torch import nn

from hf_zero.checkpoint.model_folder import mixins_for
from hf_zero.config import ZeroConfig
from hf_zero.errors import ZeroLaunchError
from hf_zero.integrations.plain_checkpoints import LoopEngine


logger = logging.getLogger(__name__)


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: ZeroConfig | dict | str | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> LoopEngine:
    """Shard `model` in place, and the state of `optimizer`, for a plain torch loop.

    The loop stays as it is but for `engine.backward(loss)` and `engine.clip_grad_norm_(max_norm)`; `optimizer.step()`
    and `optimizer.zero_grad()` are called on the user's own optimizer. `engine.save_checkpoint(folder)` and
    `engine.load_checkpoint(folder)` end and resume it. Call it on every rank, after
    `torch.distributed.init_process_group`. `device` is the one to train on (default: the model's; with NCCL, the
    current CUDA device for a model on the CPU).

    Raises:
        ZeroLaunchError: where several ranks were started and `init_process_group` was not called.
        ValueError: for a model that is wrapped for data parallelism or has no values, and for an optimizer that holds
            other parameters than the model's or is not elementwise.
    """
    resolved = config if isinstance(config, ZeroConfig) else ZeroConfig.from_any(config or {})
    _check_joined()
    engine = LoopEngine(model, resolved, group=group, device=device, mixins=mixins_for(model))
    if engine.comm.world_size == 1 and resolved.zero_stage > 0:
        logger.warning(lone_process(resolved.zero_stage))
    if optimizer is not None:
        engine.attach_optimizer(optimizer)
    return engine


def _check_joined() -> None:
    """Raise ZeroLaunchError in one of several started ranks that are no process group: each would train alone."""
    started = os.environ.get("WORLD_SIZE", "1")
    if not dist.is_initialized() and started != "1":
        raise ZeroLaunchError(
            f"{started} ranks were started (WORLD_SIZE), but torch.distributed is not initialized, so each would "
            "train alone: call torch.distributed.init_process_group() before hf_zero.shard()"
        )


def lone_process(stage: int) -> str:
    """What to say where a stage above 0 has nobody to share with."""
    return (
        f"hf_zero: one process, so stage {stage} shards nothing. To start more: `hf-zero launch --num_processes N` or "
        "`torchrun --nproc_per_node N`"
    )
