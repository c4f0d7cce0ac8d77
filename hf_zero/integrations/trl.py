"""TRL's trainers under ZeRO: SFT and GRPO ready-made, `ZeroTRLMixin` for DPO, KTO, RLOO and reward modelling."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from torch import nn
from transformers import TrainingArguments
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.trainer.callbacks import SyncRefModelCallback

from hf_zero.core import guard
from hf_zero.core.engine import ZeroEngine, engine_of
from hf_zero.core.unit import Unit, gathered_parameters
from hf_zero.errors import ZeroConfigError
from hf_zero.integrations.transformers import ZeroArgumentsMixin, ZeroTrainerMixin, resolved_plugin
from hf_zero.integrations.zero_init import zero_init
from hf_zero.tools.requirements import check_release


try:
    from trl.distributed import DistributedBackend
except ImportError:  # an older release: say which ones there are
    check_release("trl", extra="trl")
    raise


__all__ = [
    "ZeroDistributedBackend",
    "ZeroGRPOConfig",
    "ZeroGRPOTrainer",
    "ZeroSFTConfig",
    "ZeroSFTTrainer",
    "ZeroTRLMixin",
]

GATHER_CHOICES = ("auto", "all", "none")
# `auto` leaves the other half of the free memory to the key-value cache and the activations of generation.
_SHARE_OF_FREE_MEMORY = 0.5
# Heads that reward modelling puts on a language model whose files do not have them.
_NEW_HEADS = (r"(^|\.)(score|classifier)\.",)
# The loss of these trainers multiplies the teacher's hidden states by its head outside of any forward pass.
_REFUSED = {"DistillationTrainer", "GKDTrainer", "GOLDTrainer", "MiniLLMTrainer"}


class ZeroDistributedBackend(DistributedBackend):
    """TRL's door to sharded parameters: whole models for generation, single weights for a push to vLLM.

    Args:
        accelerator: the trainer's.
        gather: how much of the model `summon_full_params` makes whole: `all`, `none`, or as much as fits (`auto`).
    """

    def __init__(self, accelerator: Accelerator, gather: str = "auto") -> None:
        for name in ("tp_size", "sp_size", "cp_size"):
            if getattr(accelerator.zero_plugin.config, name) > 1:
                raise ZeroConfigError(
                    f"{name}: trainers that generate need ranks with batches of their own: set it to 1"
                )
        super().__init__(accelerator)
        self.gather = gather
        self._streamed: Unit | None = None

    @contextlib.contextmanager
    def gather_params(self, params: Iterable[nn.Parameter]) -> Iterator[None]:
        """Make `params` readable; what is written to them inside is dropped. Call it on all ranks."""
        params = list(params)
        if len(params) == 1 and guard.is_prepared(params[0]):
            self._stream(guard.owner_of(params[0]))
            yield
            return
        with gathered_parameters(params):
            yield

    def _stream(self, unit: Unit) -> None:
        """One parameter after another is asked for: gather each unit once, and keep one at a time."""
        last, self._streamed = self._streamed, unit
        if last is not None and last is not unit and not last.pins:
            last.reshard()
        unit.unshard()
        unit.accessed = unit.accessed or unit.sharded  # until the next unit, or the next pass through the model

    @contextlib.contextmanager
    def summon_full_params(self, module: nn.Module, **kwargs: Any) -> Iterator[None]:
        """Keep whole parameters at hand while `module` generates; ranks may stop at different lengths."""
        engine = engine_of(module)
        sharded = [unit for unit in engine.units if unit.sharded] if engine is not None else []
        if not sharded:
            yield
            return
        resident = _resident_units(engine, sharded, self.gather)
        with gathered_parameters([unit.params[0] for unit in resident]):
            # transformers' switch for lockstep: needed only while some layer is gathered by all ranks together.
            module._is_fsdp_managed_module = len(resident) < len(sharded)
            try:
                yield
            finally:
                module._is_fsdp_managed_module = True


def _resident_units(engine: ZeroEngine, units: list[Unit], gather: str) -> list[Unit]:
    """The units to keep whole; the same ones on every rank."""
    if gather != "auto":
        return units if gather == "all" else []
    budget = _SHARE_OF_FREE_MEMORY * _free_bytes(engine.device)
    # In negative numbers the largest over ranks is the smallest budget.
    budget = -engine.comm.all_reduce_scalars(
        torch.tensor([-budget], dtype=torch.float64, device=engine.device), largest=True
    ).item()
    resident = []
    for unit in units:
        budget -= sum(buffer.unsharded.numel() * buffer.unsharded.itemsize for buffer in unit.buffers)
        if budget < 0:
            break
        resident.append(unit)
    return resident


def _free_bytes(device: torch.device) -> float:
    """What this rank may still allocate."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class ZeroSyncRefModelCallback(SyncRefModelCallback):
    """Moves a sharded reference model towards the policy, each rank its own shards: nothing is gathered."""

    @staticmethod
    def sync_target_model(model: nn.Module, target_model: nn.Module, alpha: float) -> None:
        policy, reference = engine_of(model), engine_of(target_model)
        if policy is None or reference is None:
            SyncRefModelCallback.sync_target_model(model, target_model, alpha)
            return
        reference.before_load()
        for mine, theirs in zip(policy.units, reference.units, strict=True):
            if _ranges(mine) == _ranges(theirs):
                _mix_shards(mine, theirs, alpha)
            else:
                # Frozen weights of the policy lie in a buffer of their own, those of the reference do not; or a rank
                # keeps more of what is frozen (`zero_hpz_partition_size`).
                _mix_gathered(mine, theirs, alpha)


def _ranges(unit: Unit) -> list[tuple[list[str], int, int]]:
    """What this rank keeps of a unit."""
    return [(buffer.names, buffer.begin, buffer.end) for buffer in unit.buffers]


def _mix_shards(policy: Unit, reference: Unit, alpha: float) -> None:
    for mine, theirs in zip(policy.buffers, reference.buffers, strict=True):
        values = torch.cat([part.to(mine.device, copy=True) for _, _, part in mine.exact()])
        for start, stop, target in theirs.exact(write=True):
            target.mul_(1.0 - alpha).add_(values[start:stop].to(target), alpha=alpha)


def _mix_gathered(policy: Unit, reference: Unit, alpha: float) -> None:
    values = dict(policy.named_parameters())
    with gathered_parameters(policy.params[:1]), gathered_parameters(reference.params[:1], write=True):
        with torch.no_grad():
            for name, target in reference.named_parameters():
                target.mul_(1.0 - alpha).add_(values[name].to(target.dtype), alpha=alpha)


class ZeroTRLMixin(ZeroTrainerMixin):
    """Put before a TRL trainer, it trains that class's models under ZeRO: `class T(ZeroTRLMixin, DPOTrainer)`.

    A reference model is sharded where the policy is (stage 3), and models that are given by name are never whole on a
    rank there. Raises ZeroConfigError for trainers whose loss reads a
    teacher's weights outside of the teacher's forward pass.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refused = _REFUSED & {base.__name__ for base in type(self).__mro__}
        if refused:
            raise ZeroConfigError(
                f"{refused.pop()} is not supported: its loss multiplies by the teacher's output head outside of the "
                "teacher's forward pass, where sharded weights are not at hand. Train on the teacher's replies "
                "instead (ZeroSFTTrainer), or run it under plain DDP"
            )
        given = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, TrainingArguments)), None)
        # Models given by name, the reference model among them: each rank reads its slices only.
        with zero_init(None if given is None else resolved_plugin(given), allow_missing=_NEW_HEADS):
            super().__init__(*args, **kwargs)
        if hasattr(self, "_dist"):
            self._dist = ZeroDistributedBackend(self.accelerator, _gather_choice(self.args))
        if hasattr(self, "vllm_generation"):
            self.vllm_generation._dist = self._dist

    def add_callback(self, callback: Any) -> None:
        if type(callback) is SyncRefModelCallback:
            callback = ZeroSyncRefModelCallback(callback.ref_model, callback.accelerator)
        super().add_callback(callback)


def _gather_choice(args: Any) -> str:
    """`gather_for_generation`, else what TRL's own boolean says."""
    given = getattr(args, "gather_for_generation", None)
    return given or ("auto" if getattr(args, "ds3_gather_for_generation", True) else "none")


@dataclass
class ZeroSFTConfig(ZeroArgumentsMixin, SFTConfig):
    """`trl.SFTConfig` with hf_zero's fields."""


class ZeroSFTTrainer(ZeroTRLMixin, SFTTrainer):
    """`trl.SFTTrainer` under ZeRO."""


@dataclass
class ZeroGRPOConfig(ZeroArgumentsMixin, GRPOConfig):
    """`trl.GRPOConfig` with hf_zero's fields."""

    gather_for_generation: str | None = field(
        default=None,
        metadata={
            "help": "How much of a model sharded at stage 3 is whole on every rank while it generates: 'all' (fast), "
            "'none' (layer by layer, ranks in lockstep) or 'auto' (as much as fits). Default: 'auto', or 'none' with "
            "ds3_gather_for_generation=False."
        },
    )

    def __post_init__(self) -> None:
        choice = self.gather_for_generation
        if choice is not None and choice not in GATHER_CHOICES:
            raise ZeroConfigError(f"gather_for_generation is {choice!r}: choose one of {', '.join(GATHER_CHOICES)}")
        if choice not in (None, "none") and not self.ds3_gather_for_generation:
            raise ZeroConfigError(
                f"gather_for_generation is {choice!r}, but ds3_gather_for_generation is false: leave the latter out"
            )
        super().__post_init__()


class ZeroGRPOTrainer(ZeroTRLMixin, GRPOTrainer):
    """`trl.GRPOTrainer` under ZeRO."""
