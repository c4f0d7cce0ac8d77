"""The checks of single values and of pairs of values in a ``ZeroConfig``; every finding names value and fix."""

import os
from typing import TYPE_CHECKING, Any

from hf_zero.config import values


if TYPE_CHECKING:
    from hf_zero.config.schema import ZeroConfig


CHOICES: dict[str, tuple[str, ...]] = {
    "mixed_precision": ("no", "bf16", "fp16"),
    "communication_data_type": ("fp32", "bf16", "fp16"),
    "grad_accum_dtype": ("fp32",),
    "param_access": ("gather", "raise"),
    "no_sync": ("reduce", "local"),
    "offload_optimizer_device": ("none", "cpu", "nvme"),
    "offload_param_device": ("none", "cpu", "nvme"),
}
OPTIMIZER_TYPES = ("AdamW", "Adam", "SGD")
SCHEDULER_TYPES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_BOOLEANS = (
    "zero3_init_flag",
    "zero3_save_16bit_model",
    "overlap_comm",
    "deterministic_reduce",
    "peer_memory",
    "async_save",
    "consecutive_hysteresis",
    "check_grad_overflow",
    "wall_clock_breakdown",
)
# field -> (smallest value, whether "auto" is allowed)
_INTEGERS: dict[str, tuple[int, bool]] = {
    "gradient_accumulation_steps": (1, True),
    "train_micro_batch_size_per_gpu": (1, True),
    "train_batch_size": (1, True),
    "stage3_model_persistence_threshold": (0, False),
    "stage3_max_live_parameters": (0, False),
    "stage3_max_reuse_distance": (0, False),
    "initial_scale_power": (0, False),
    "loss_scale_window": (1, False),
    "hysteresis": (1, False),
    "max_consecutive_skips": (1, False),
    "steps_per_print": (1, False),
}
# Sizes that may be "auto": where nobody knows the model's width, they become the field's default.
SIZES: dict[str, int] = {
    "reduce_bucket_size": 1,
    "allgather_bucket_size": 1,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
}
WHOLE_NUMBERS = (*_INTEGERS, *SIZES)
_OPTIONAL = (
    "stage3_model_persistence_threshold",
    "steps_per_print",
    "optimizer",
    "scheduler",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def _value_problem(name: str, value: Any) -> str | None:
    """What is wrong with one value, as "expected ...", or None."""
    if name in _OPTIONAL and value is None:
        return None
    if name in CHOICES and value not in CHOICES[name]:
        return "expected " + " or ".join(repr(choice) for choice in CHOICES[name])
    if name in _BOOLEANS and not isinstance(value, bool):
        return "expected True or False"
    if name in _INTEGERS:
        smallest, auto_allowed = _INTEGERS[name]
        if not (auto_allowed and values.is_auto(value)) and not (_is_int(value) and value >= smallest):
            return f"expected a whole number of at least {smallest}" + (' or "auto"' if auto_allowed else "")
    if name in SIZES and not values.is_auto(value):
        count = values.byte_size(value) if isinstance(value, str) else value
        if not (_is_int(count) and count >= SIZES[name]):
            return f'expected a count of elements of at least {SIZES[name]}, a byte size such as "25MB", or "auto"'
    return None


def field_problems(config: "ZeroConfig") -> list[str]:
    """Everything that makes ``config`` unusable; an empty list when it can run."""
    problems: list[str] = []

    def report(name: str, expected: str) -> None:
        place = f" ({config.where(name)})" if config.is_set(name) else ""
        problems.append(f"{name} is {getattr(config, name)!r}{place}: {expected}")

    if not (_is_int(config.zero_stage) and 0 <= config.zero_stage <= 3):
        report(
            "zero_stage",
            "expected 0 (nothing sharded), 1 (optimizer states), 2 (+ gradients) or 3 (+ parameters)",
        )
    for name in (*CHOICES, *_BOOLEANS, *_INTEGERS, *SIZES):
        expected = _value_problem(name, getattr(config, name))
        if expected is not None:
            report(name, expected)
    clipping = config.gradient_clipping
    if not values.is_auto(clipping) and not (_is_number(clipping) and clipping >= 0):
        report("gradient_clipping", 'expected a norm of at least 0 (0 switches clipping off) or "auto"')
    if not (_is_number(config.hang_timeout_s) and config.hang_timeout_s > 0):
        report("hang_timeout_s", "expected a number of seconds above 0")
    if not (_is_number(config.loss_scale) and config.loss_scale >= 0):
        report("loss_scale", "expected 0 (dynamic) or a fixed scale above 0")
    if not (_is_number(config.min_loss_scale) and config.min_loss_scale > 0):
        report("min_loss_scale", "expected a number above 0")
    for name, types in (("optimizer", OPTIMIZER_TYPES), ("scheduler", SCHEDULER_TYPES)):
        section = getattr(config, name)
        if section is not None and not (isinstance(section, dict) and isinstance(section.get("type"), str)):
            report(name, 'expected {"type": <name>, "params": {...}}')
        elif section is not None and section["type"].lower() not in (known.lower() for known in types):
            report(name, f"the type must be one of {', '.join(types)}; or remove the section and build it in Python")
    return problems + _pair_problems(config) + _unavailable(config)


def _pair_problems(config: "ZeroConfig") -> list[str]:
    """Values that are fine alone and make no sense together."""
    problems = []
    if config.offload_param_device != "none" and config.zero_stage in (0, 1, 2):
        problems.append(
            f"offload_param_device is {config.offload_param_device!r} ({config.where('offload_param_device')}) but "
            f"zero_stage is {config.zero_stage}: weights are whole on every rank below stage 3; set zero_stage to 3 "
            'or offload_param_device to "none"'
        )
    for kind in ("optimizer", "param"):
        if getattr(config, f"offload_{kind}_device") == "nvme":
            problems += _folder_problem(config, f"offload_{kind}_nvme_path", f"offload_{kind}_device")
    sizes = (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
    if _is_int(config.train_batch_size) and config.train_batch_size >= 1:
        factors = [size for size in sizes[1:] if _is_int(size) and size >= 1]
        product = factors[0] * factors[-1] if len(factors) == 2 else (factors or [1])[0]
        if config.train_batch_size % product:
            problems.append(
                f"train_batch_size is {config.train_batch_size} ({config.where('train_batch_size')}), which is no "
                f"multiple of micro-batch x accumulation = {product}: set train_batch_size to "
                '"auto", or to micro-batch x accumulation x number of ranks'
            )
    return problems


def _folder_problem(config: "ZeroConfig", name: str, device: str) -> list[str]:
    path = getattr(config, name)
    if path is None:
        return [f"{device} is 'nvme' ({config.where(device)}) without {name}: name a folder on a local disk"]
    if not os.path.isdir(path):
        return [f"{name} is {path!r} ({config.where(name)}): there is no such folder; create it or name another"]
    if not os.access(path, os.W_OK):
        return [f"{name} is {path!r} ({config.where(name)}): the folder cannot be written to"]
    return []


def _unavailable(config: "ZeroConfig") -> list[str]:
    """Settings that are understood but that this version cannot carry out."""
    problems = []
    for name in ("offload_optimizer_device", "offload_param_device"):
        if getattr(config, name) in ("cpu", "nvme"):
            problems.append(
                f"{name} is {getattr(config, name)!r} ({config.where(name)}): offload is not available yet; set "
                f'{name} to "none" and use zero_stage 3, more ranks or gradient checkpointing to save memory'
            )
    return problems


_STAGE3_ONLY = (
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)
_FP16_ONLY = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")


def advice(config: "ZeroConfig") -> list[str]:
    """Settings that do no harm and have no effect in this configuration."""
    notes = []
    if config.zero_stage != 3:
        notes += [
            f"{config.where(name)}: {name} has no effect at zero_stage {config.zero_stage}"
            for name in _STAGE3_ONLY
            if config.is_set(name)
        ]
        if config.is_set("zero3_init_flag") and config.zero3_init_flag:
            notes.append(
                f"{config.where('zero3_init_flag')}: zero3_init_flag has no effect at zero_stage {config.zero_stage}"
            )
    if config.is_set("mixed_precision") and config.mixed_precision != "fp16":
        notes += [
            f"{config.where(name)}: {name} has no effect with mixed_precision {config.mixed_precision!r}"
            for name in _FP16_ONLY
            if config.is_set(name)
        ]
    return notes
