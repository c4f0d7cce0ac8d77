"""DeepSpeed's `zero`: building a model sharded, and reading and changing sharded parameters."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.core.unit import gathered_parameters
from hf_zero.deepspeed import missing
from hf_zero.integrations.zero_init import zero_init


def Init(config_dict_or_path: Any = None, config: Any = None, enabled: bool = True) -> AbstractContextManager:
    """Inside, models are built without their weights; `initialize` gives each rank its slices (`zero_init`).

    `config` is the JSON that `initialize` will be given (default: stage 3).
    """
    given = config_dict_or_path if config is None else config
    chosen = ZeroConfig(zero_stage=3) if given is None else ZeroConfig.from_any(given)
    return zero_init(chosen) if enabled else nullcontext()


def GatheredParameters(
    params: nn.Module | nn.Parameter | Iterable[nn.Parameter], modifier_rank: int | None = None, enabled: bool = True
) -> AbstractContextManager:
    """Inside, sharded parameters can be read; with `modifier_rank=0`, what rank 0 leaves behind holds for all ranks.

    Call it on all ranks. Raises ValueError for another modifier rank.
    """
    if modifier_rank not in (None, 0):
        raise ValueError(f"modifier_rank={modifier_rank}: the values of rank 0 are the ones that are kept: pass 0")
    return gathered_parameters(params, write=modifier_rank == 0) if enabled else nullcontext()


def __getattr__(name: str) -> object:
    raise AttributeError(missing.explain(f"{__name__}.{name}"))
