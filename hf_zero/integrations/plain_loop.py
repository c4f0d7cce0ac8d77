"""`shard`: the engine for a training loop in plain torch."""

from __future__ import annotations

import functools
import logging
import os

import torch
import torch.distributed as dist
from torch import nn

from hf_zero.checkpoint.model_folder import mixins_for
from hf_zero.comm import dtensors
from hf_zero.comm.process_groups import named_mesh
from hf_zero.config import ZeroConfig
from hf_zero.errors import ZeroConfigError, ZeroLaunchError
from hf_zero.integrations.plain_checkpoints import LoopEngine
from hf_zero.launcher.environment import lone_process
from hf_zero.parallel.tensor_parallel import follow, share_out_once


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
    current CUDA device for a model on the CPU). With `tp_size` the layers are shared out, too: neighbouring ranks, so
    many of them, are to get the same batches.

    Raises:
        ZeroLaunchError: where several ranks were started and `init_process_group` was not called.
        ZeroConfigError: for sizes that do not fit, and for `sp_size` and `cp_size`.
        ValueError: for a model that is wrapped for data parallelism or has no values, and for an optimizer that holds
            other parameters than the model's, needs a closure, or steps a tensor by what others are.
    """
    resolved = config if isinstance(config, ZeroConfig) else ZeroConfig.from_any(config or {})
    _check_joined()
    for name in ("sp_size", "cp_size"):
        if (size := getattr(resolved, name)) > 1:
            raise ZeroConfigError(
                f"{name} is {size} ({resolved.where(name)}), but a plain loop cuts its own batches: train by "
                "ZeroTrainer or ZeroAccelerator, whose dataloaders share sequences out, or set it to 1"
            )
    shared = resolved.tp_size if resolved.tp_size > 1 else len(dtensors.ranks_of(model) or (0,))
    if shared > 1:
        replaced = share_out_once(model, shared, functools.partial(_tensor_mesh, resolved, group, device))
        if optimizer is not None:
            follow(optimizer, replaced)
    engine = LoopEngine(model, resolved, group=group, device=device, mixins=mixins_for(model))
    if engine.comm.world_size == 1 and resolved.zero_stage > 0:
        logger.warning(lone_process(resolved.zero_stage))
    if optimizer is not None:
        engine.attach_optimizer(optimizer)
    return engine


def _tensor_mesh(
    config: ZeroConfig, group: dist.ProcessGroup | None, device: torch.device | None
) -> dtensors.DeviceMesh:
    size, ranks = config.tp_size, dist.get_world_size() if dist.is_initialized() else 1
    if group is not None or ranks % size:
        raise ZeroConfigError(
            f"tp_size is {size} ({config.where('tp_size')}), but there are {ranks} ranks"
            + (", of which `group` names some: leave group out" if group is not None else ": let it divide them")
        )
    kind = "cpu" if dist.get_backend() == "gloo" else torch.device(device or "cuda").type
    return named_mesh(kind, {"dp_shard": ranks // size, "tp": size})["tp"]


def _check_joined() -> None:
    """Raise ZeroLaunchError in one of several started ranks that are no process group: each would train alone."""
    started = os.environ.get("WORLD_SIZE", "1")
    if not dist.is_initialized() and started != "1":
        raise ZeroLaunchError(
            f"{started} ranks were started (WORLD_SIZE), but torch.distributed is not initialized, so each would "
            "train alone: call torch.distributed.init_process_group() before hf_zero.shard()"
        )
