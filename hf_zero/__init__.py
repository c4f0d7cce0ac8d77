"""ZeRO-1/2/3 for transformers, accelerate and TRL."""

from __future__ import annotations

import importlib


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


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hf_zero' has no attribute '{name}'")
    importlib.import_module("hf_zero.launcher.failures").install()
    return getattr(importlib.import_module(_HOMES[name]), name)
