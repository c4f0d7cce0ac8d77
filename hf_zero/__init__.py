"""ZeRO-1/2/3 for transformers, accelerate and TRL."""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING


if TYPE_CHECKING:  # what type checkers and editors see of the names below
    from hf_zero.config import ZeroConfig as ZeroConfig
    from hf_zero.core.engine import ZeroEngine as ZeroEngine
    from hf_zero.core.unit import gathered_parameters as gathered_parameters
    from hf_zero.integrations.accelerate import ZeroAccelerator as ZeroAccelerator
    from hf_zero.integrations.accelerate import ZeroPlugin as ZeroPlugin
    from hf_zero.integrations.plain_loop import shard as shard
    from hf_zero.integrations.transformers import ZeroTrainer as ZeroTrainer
    from hf_zero.integrations.transformers import ZeroTrainerMixin as ZeroTrainerMixin
    from hf_zero.integrations.transformers import ZeroTrainingArguments as ZeroTrainingArguments
    from hf_zero.integrations.zero_init import zero_init as zero_init
    from hf_zero.tools.memory import memory_report as memory_report
    from hf_zero.tools.profiler import profiling as profiling

__version__ = "0.1.0"

# Imported on first use: the launcher and the command line must not pay for torch and transformers.
_HOMES = {
    "ZeroConfig": "hf_zero.config",
    "ZeroEngine": "hf_zero.core.engine",
    "shard": "hf_zero.integrations.plain_loop",
    "gathered_parameters": "hf_zero.core.unit",
    "memory_report": "hf_zero.tools.memory",
    "profiling": "hf_zero.tools.profiler",
    "ZeroPlugin": "hf_zero.integrations.accelerate",
    "ZeroAccelerator": "hf_zero.integrations.accelerate",
    "ZeroTrainingArguments": "hf_zero.integrations.transformers",
    "ZeroTrainerMixin": "hf_zero.integrations.transformers",
    "ZeroTrainer": "hf_zero.integrations.transformers",
    "zero_init": "hf_zero.integrations.zero_init",
}
__all__ = ["__version__", *_HOMES]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hf_zero' has no attribute '{name}'")
    collects = gc.isenabled()
    gc.disable()  # imports leave no garbage, and searching for it takes as long as all modules of ours do
    try:
        importlib.import_module("hf_zero.launcher.failures").install()
        return getattr(importlib.import_module(_HOMES[name]), name)
    finally:
        if collects:
            gc.enable()
