"""The checks of a configuration's values, alone and in pairs; every finding names value and fix."""

import math
import os

from hf_zero.config.declare import is_whole
from hf_zero.config.options import OPTIONS, Options


def problems_of(config: Options) -> list[str]:
    """Everything that makes ``config`` unusable; an empty list when it can run."""
    problems: list[str] = []
    for name, option in OPTIONS.items():
        value = getattr(config, name)
        expected = None if value is None and config.default(name) is None else option.kind.problem(value)
        if expected is not None:
            place = f" ({config.where(name)})" if config.is_set(name) else ""
            problems.append(f"{name} is {value!r}{place}: {expected}")
    return problems + _pair_problems(config)


def _pair_problems(config: Options) -> list[str]:
    """Values that are fine alone and make no sense together."""
    problems = []
    if config.offload_param_device != "none" and config.zero_stage in (0, 1, 2):
        problems.append(
            f"offload_param_device is {config.offload_param_device!r} ({config.where('offload_param_device')}) but "
            f"zero_stage is {config.zero_stage}: weights are whole on every rank below stage 3; set zero_stage to 3 "
            'or offload_param_device to "none"'
        )
    shared = [name for name in ("tp_size", "sp_size", "cp_size") if getattr(config, name) > 1]
    if len(shared) > 1:
        written = " and ".join(f"{name} is {getattr(config, name)} ({config.where(name)})" for name in shared)
        problems.append(f"{written}: they are not available together; set all but one of them to 1")
    for kind in ("optimizer", "param", "activations"):
        if getattr(config, f"offload_{kind}_device") == "nvme":
            problems += _folder_problem(config, f"offload_{kind}_nvme_path", f"offload_{kind}_device")
    sizes = (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
    total = config.train_batch_size
    if is_whole(total) and total >= 1:
        product = math.prod(size for size in sizes if is_whole(size) and size >= 1)
        if total % product:
            problems.append(
                f"train_batch_size is {total} ({config.where('train_batch_size')}), which is no "
                f"multiple of micro-batch x accumulation = {product}: set train_batch_size to "
                '"auto", or to micro-batch x accumulation x number of ranks'
            )
    return problems


def _folder_problem(config: Options, name: str, device: str) -> list[str]:
    path = getattr(config, name)
    if path is None:
        return [f"{device} is 'nvme' ({config.where(device)}) without {name}: name a folder on a local disk"]
    if not os.path.isdir(path):
        return [f"{name} is {path!r} ({config.where(name)}): there is no such folder; create it or name another"]
    if not os.access(path, os.W_OK):
        return [f"{name} is {path!r} ({config.where(name)}): the folder cannot be written to"]
    return []


def advice(config: Options) -> list[str]:
    """Settings that do no harm and have no effect in this configuration."""
    notes = []
    for name, option in OPTIONS.items():
        if option.needs is None or not config.is_set(name) or getattr(config, name) is False:
            continue
        needed, value = option.needs
        actual = getattr(config, needed)
        allowed = value if isinstance(value, tuple) else (value,)
        still_open = OPTIONS[needed].shared and not config.is_set(needed)  # the arguments may say it later
        if actual not in allowed and not still_open:
            notes.append(f"{config.where(name)}: {name} has no effect with {needed} {actual!r}")
    return notes
