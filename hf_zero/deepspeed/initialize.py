"""`initialize`: a DeepSpeed configuration, a model and whatever the JSON leaves to Python become a training engine."""

import argparse
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hf_zero.config import ZeroConfig
from hf_zero.config.builders import build_optimizer, build_scheduler
from hf_zero.config.consistency import hidden_size_of, resolve_auto
from hf_zero.deepspeed.batches import make_loader, resolve
from hf_zero.deepspeed.engine import DeepSpeedEngine
from hf_zero.errors import ZeroConfigError
from hf_zero.integrations.plain_loop import shard
from hf_zero.launcher.environment import resolve_from_environment
from hf_zero.launcher.ranks import join_ranks


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config FILE`; returns the parser.

    DeepSpeed's launcher passes `--local_rank` to the script, torchrun sets a variable: it becomes the default.
    """
    parser.add_argument("--deepspeed", action="store_true", help="train by deepspeed.initialize")
    parser.add_argument("--deepspeed_config", metavar="FILE", help="DeepSpeed JSON")
    parser.set_defaults(local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    return parser


def init_distributed(dist_backend: str | None = None) -> None:
    """Join the ranks that a launcher started, if that was not done yet; `initialize` does it, too."""
    join_ranks(dist_backend)


def initialize(
    args: argparse.Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset | None = None,
    lr_scheduler: Any = None,
    *,
    collate_fn: Callable | None = None,
    config: dict | str | ZeroConfig | None = None,
) -> tuple[DeepSpeedEngine, torch.optim.Optimizer | None, DataLoader | None, Any]:
    """Shard `model` in place for training by the returned engine; call it on all ranks.

    The configuration is `config`, or what `args.deepspeed_config` or the launcher names; optimizer and scheduler are
    the arguments, or the sections of the JSON (`optimizer` and `lr_scheduler` may be functions of the parameters and
    of the optimizer).

    Returns (engine, optimizer, data loader of `training_data` or None, scheduler or None).

    Raises:
        ZeroConfigError: with every problem of the configuration; for two of what there can be one of; for batch sizes
            that contradict each other.
        ValueError: for a model or an optimizer that `hf_zero.shard` refuses.
    """
    if model is None:
        raise TypeError("deepspeed.initialize() needs model=")
    given = _only("configuration", {"config=": config, "args": getattr(args, "deepspeed_config", None)})
    resolved = resolve_from_environment(given)
    if resolved.source == "defaults":
        raise ZeroConfigError("no configuration: pass config=, or --deepspeed_config FILE on the command line")
    init_distributed()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    world_size = max(1, ranks // resolved.config.tp_size)  # that have batches of their own
    batches = resolve(resolved.config, world_size)
    width = hidden_size_of(getattr(model, "config", None))
    config = resolve_auto(resolved.config, world_size=world_size, hidden_size=width)
    made = _only("optimizer", {"optimizer=": optimizer, config.where("optimizer"): config.optimizer})
    if made is not None and not isinstance(made, torch.optim.Optimizer):
        params = list(model.parameters() if model_parameters is None else model_parameters)
        made = optimizer(params) if optimizer is not None else build_optimizer(made, params)
    scheduler = _only("scheduler", {"lr_scheduler=": lr_scheduler, config.where("scheduler"): config.scheduler})
    if scheduler is not None and made is None:
        raise ZeroConfigError("there is a scheduler and no optimizer: pass optimizer=, or write an optimizer section")
    engine = shard(model, made, config)
    if scheduler is not None and not hasattr(scheduler, "step"):
        scheduler = build_scheduler(scheduler, made) if lr_scheduler is None else lr_scheduler(made)
    trained = DeepSpeedEngine(engine, made, scheduler, batches)
    if training_data is not None:
        trained.training_dataloader = make_loader(training_data, batches.micro, engine, collate_fn)
    return trained, made, trained.training_dataloader, scheduler


def _only(what: str, sources: dict[str, Any]) -> Any:
    """The one value that is not None, or None. Raises ZeroConfigError where there are two."""
    found = {name: value for name, value in sources.items() if value is not None}
    if len(found) > 1:
        raise ZeroConfigError(f"the {what} comes from {' and from '.join(found)}: keep one of them")
    return next(iter(found.values()), None)
