"""TRL's trainers under ZeRO: `ZeroSFTConfig` and `ZeroSFTTrainer`."""

from __future__ import annotations

from dataclasses import dataclass

from trl import SFTConfig, SFTTrainer

from hf_zero.integrations.transformers import ZeroArgumentsMixin, ZeroTrainerMixin


__all__ = ["ZeroSFTConfig", "ZeroSFTTrainer"]


@dataclass
class ZeroSFTConfig(ZeroArgumentsMixin, SFTConfig):
    """`trl.SFTConfig` with hf_zero's fields."""


class ZeroSFTTrainer(ZeroTrainerMixin, SFTTrainer):
    """`trl.SFTTrainer` under ZeRO."""
