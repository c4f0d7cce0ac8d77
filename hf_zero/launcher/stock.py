"""Refuses stock classes in ranks of a run for ZeRO that must not make ours of them: nothing would be sharded."""

from __future__ import annotations

import functools
import os
from types import ModuleType

from hf_zero.errors import ZeroLaunchError
from hf_zero.launcher.environment import resolve_from_environment


TRAINER, TRL_TRAINER, ACCELERATOR = "hf_zero.ZeroTrainerMixin", "hf_zero.trl.ZeroTRLMixin", "hf_zero.ZeroAccelerator"


def refuse_trainers(module: ModuleType) -> None:
    """Have `module.Trainer` and its subclasses raise ZeroLaunchError when one is created that is not hf_zero's."""

    def create(cls, *args, **kwargs):
        _refuse(cls, TRL_TRAINER if "trl" in _packages(cls) else TRAINER)
        return object.__new__(cls)

    module.Trainer.__new__ = create


def refuse_accelerators(module: ModuleType) -> None:
    """Have `module.Accelerator` raise ZeroLaunchError when it is given a model; it may be used for anything else."""
    prepare_model = module.Accelerator.prepare_model

    @functools.wraps(prepare_model)
    def prepare(self, *args, **kwargs):
        _refuse(type(self), ACCELERATOR)
        return prepare_model(self, *args, **kwargs)

    module.Accelerator.prepare_model = prepare


def _packages(cls: type) -> list[str]:
    return [base.__module__.partition(".")[0] for base in cls.__mro__]


def _refuse(cls: type, ours: str) -> None:
    if "hf_zero" in _packages(cls):
        return
    stage = resolve_from_environment().config.zero_stage
    if stage == 0 or "WORLD_SIZE" not in os.environ:
        return  # plain data parallelism is what was asked for, or there is none
    raise ZeroLaunchError(
        f"this run was started for ZeRO stage {stage}, but {_packages(cls)[0]}.{cls.__name__} would train under DDP, "
        "with nothing sharded, as HF_ZERO_ADOPT=0 has it stay what it is. Leave that out, or put hf_zero's class in "
        f"front of it and use the result:\n    class Sharded{cls.__name__}({ours}, {cls.__name__}): pass\n"
        "If DDP is what you want, start the run with --zero_stage 0"
    )
