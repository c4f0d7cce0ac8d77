"""Builds the torch equivalents of DeepSpeed's optimizer and scheduler sections."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hf_zero.config import values
from hf_zero.config.options import OPTIMIZER_TYPES, SCHEDULER_TYPES
from hf_zero.errors import ZeroConfigError


def _betas(value: Any) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError("expected two numbers")
    return values.to_float(value[0]), values.to_float(value[1])


_ADAM: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("lr", "eps", "weight_decay"), values.to_float),
    "betas": _betas,
    **dict.fromkeys(("amsgrad", "adam_w_mode", "bias_correction", "torch_adam"), values.to_bool),
}
_SGD: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("lr", "momentum", "dampening", "weight_decay"), values.to_float),
    "nesterov": values.to_bool,
}
_OPTIMIZERS: dict[str, Mapping[str, Callable[[Any], Any]]] = {"adamw": _ADAM, "adam": _ADAM, "sgd": _SGD}

# Where an "auto" takes its value from, in the training arguments.
_ARGUMENT_OF = {
    "lr": "learning_rate",
    "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
    "warmup_max_lr": "learning_rate",
    "warmup_num_steps": "warmup_steps",
    "total_num_steps": "max_steps",
}


def build_optimizer(
    section: Mapping[str, Any],
    params: Iterable[Any],
    *,
    arguments: Mapping[str, Any] | None = None,
    where: str = "optimizer",
) -> torch.optim.Optimizer:
    """The torch optimizer that DeepSpeed's ``optimizer`` section describes.

    ``arguments`` holds training-argument values (learning_rate, adam_beta1, ...) for parameters written as "auto".
    """
    kind, found = _read(section, _OPTIMIZERS, arguments or {}, where)
    if kind == "sgd":
        return torch.optim.SGD(params, **found)
    if found.pop("bias_correction", True) is False:
        raise ZeroConfigError(f"{where}.params.bias_correction is False: torch's Adam always corrects the bias")
    found.pop("torch_adam", None)  # which implementation DeepSpeed would have taken
    # DeepSpeed's "Adam" decays weights as AdamW does, unless adam_w_mode is false.
    decoupled = found.pop("adam_w_mode", True) or kind == "adamw"
    found.setdefault("weight_decay", 0.0)
    return (torch.optim.AdamW if decoupled else torch.optim.Adam)(params, **found)


def _per_group(value: Any) -> float | list[float]:
    return [values.to_float(entry) for entry in value] if isinstance(value, (list, tuple)) else values.to_float(value)


def _warmup_type(value: Any) -> str:
    if value not in ("log", "linear"):
        raise ValueError("expected 'log' or 'linear'")
    return value


_SHARED = {
    **dict.fromkeys(("warmup_num_steps", "last_batch_iteration"), values.to_int),
    "warmup_type": _warmup_type,
}
_WARMUP = {**dict.fromkeys(("warmup_min_lr", "warmup_max_lr"), _per_group), **_SHARED}
_SCHEDULERS: dict[str, Mapping[str, Callable[[Any], Any]]] = {
    "warmuplr": _WARMUP,
    "warmupdecaylr": {**_WARMUP, "total_num_steps": values.to_int},
    "warmupcosinelr": {
        **_SHARED,
        "total_num_steps": values.to_int,
        **dict.fromkeys(("warmup_min_ratio", "cos_min_ratio"), values.to_float),
    },
}


def build_scheduler(
    section: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    *,
    arguments: Mapping[str, Any] | None = None,
    where: str = "scheduler",
) -> torch.optim.lr_scheduler.LRScheduler:
    """A torch scheduler with the learning rates of DeepSpeed's ``scheduler`` section, step by step."""
    kind, found = _read(section, _SCHEDULERS, arguments or {}, where)
    found.pop("last_batch_iteration", None)  # resuming is load_state_dict's business
    warmup = found.get("warmup_num_steps", 1000)
    if warmup < 0:
        raise ZeroConfigError(f"{where}.params.warmup_num_steps is {warmup}: expected at least 0")
    found["warmup_num_steps"] = max(2, warmup)
    if kind != "warmuplr" and found.get("total_num_steps", 0) < 1:
        raise ZeroConfigError(
            f"{where}.params.total_num_steps is {found.get('total_num_steps')}: expected the number of updates of the "
            "whole run"
        )
    count, total = len(optimizer.param_groups), found.get("total_num_steps")
    if kind == "warmupcosinelr":
        low, high, decay = [0.0] * count, None, "cosine"  # a share of the optimizer's own rates
    else:
        # DeepSpeed: WarmupLR rises to the optimizer's rate, WarmupDecayLR to 0.001.
        highest = found.get("warmup_max_lr", optimizer.param_groups[0]["lr"] if total is None else 0.001)
        low = _spread(found.get("warmup_min_lr", 0.0), count, "warmup_min_lr")
        high = _spread(highest, count, "warmup_max_lr")
        decay = "none" if total is None else "linear"
    return _Schedule(
        optimizer,
        low=low,
        high=high,
        warmup_steps=found["warmup_num_steps"],
        warmup_type=found.get("warmup_type", "log"),
        start=found.get("warmup_min_ratio", 0.0),
        decay=decay,
        total=total or 0,
        floor=found.get("cos_min_ratio", 0.0001),
    )


def _read(
    section: Mapping[str, Any], known: Mapping[str, Mapping[str, Callable]], arguments: Mapping[str, Any], where: str
) -> tuple[str, dict[str, Any]]:
    """The lower-case type and the parsed parameters; "auto" is looked up in ``arguments``."""
    written = section.get("type")
    kind = str(written).lower()
    if kind not in known:
        choices = ", ".join(name for name in (*OPTIMIZER_TYPES, *SCHEDULER_TYPES) if name.lower() in known)
        raise ZeroConfigError(
            f"{where}.type is {written!r}: expected one of {choices}; or remove the section and build it in Python"
        )
    params, problems = {}, []
    for name, value in (section.get("params") or {}).items():
        if name not in known[kind]:
            problems.append(
                f"{where}.params.{name}: {written} has no such parameter (known: {', '.join(known[kind])})"
            )
            continue
        if values.is_auto(value):
            value = _automatic(name, arguments)
            if value is None:
                problems.append(
                    f'{where}.params.{name} is "auto", but the training arguments give no value for it: write a number'
                )
                continue
        try:
            params[name] = known[kind][name](value)
        except ValueError as error:
            problems.append(f"{where}.params.{name} is {value!r}: {error}")
    if problems:
        raise ZeroConfigError(problems)
    return kind, params


def _automatic(name: str, arguments: Mapping[str, Any]) -> Any:
    if name == "betas":
        found = arguments.get("adam_beta1"), arguments.get("adam_beta2")
        return None if None in found else found
    if name in ("warmup_min_lr", "warmup_min_ratio"):
        return 0.0
    return arguments.get(_ARGUMENT_OF.get(name, name))


def _share(
    iteration: int, *, warmup_steps: int, warmup_type: str, start: float, decay: str, total: int, floor: float
) -> float:
    """How much of the way from low to high: a rise, then flat ("none"), "linear" down or a half "cosine" down.

    `start` and `floor` are the shares at which the rise begins and the cosine ends.
    """
    if iteration < 0:
        return 0.0
    if iteration < warmup_steps:
        linear = warmup_type == "linear"
        risen = iteration / warmup_steps if linear else math.log(iteration + 1) / math.log(warmup_steps)
        return start + (1.0 - start) * risen
    if decay == "none":
        return 1.0
    left = max(1, total - warmup_steps)
    if decay == "linear":
        return (total - iteration) / left
    progress = min(1.0, (iteration - warmup_steps + 1) / left)
    return floor + (1.0 - floor) * (1 + math.cos(math.pi * progress)) / 2


class _Schedule(torch.optim.lr_scheduler.LRScheduler):
    """From `low` up to `high` (None: the optimizer's rates), by group, and down again along a `curve`; see `_share`.

    DeepSpeed counts from -1: its first update runs at the low value, and so does its second.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, low: list[float], high: list[float] | None, **curve: Any
    ) -> None:
        self._low, self._high, self._curve = low, high, curve
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        share = max(0.0, _share(self.last_epoch - 1, **self._curve))
        highest = self.base_lrs if self._high is None else self._high
        return [low + (high - low) * share for low, high in zip(self._low, highest, strict=True)]


def _spread(value: float | list[float], count: int, name: str) -> list[float]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ZeroConfigError(f"scheduler.params.{name} has {len(value)} values for {count} optimizer groups")
    return value
