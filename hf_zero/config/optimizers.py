"""Every `optim` of TrainingArguments: stepped in slices or whole matrices, or refused with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hf_zero.errors import ZeroConfigError


class Stepped(Enum):
    """How masters are stepped; it is tried with each optimizer (`core/elementwise.py`), not taken from here."""

    SLICES = "slices"
    MATRICES = "whole matrices"
    REFUSED = "refused"


@dataclass(frozen=True)
class Optim:
    """One value of `optim`: the package that it needs besides torch and transformers, and what is to be known."""

    stepped: Stepped
    package: str | None = None
    note: str = ""


_SLICES, _MATRICES = Optim(Stepped.SLICES), Optim(Stepped.MATRICES)
_BNB_32 = Optim(Stepped.SLICES, "bitsandbytes", "states of 32 bit")
_BNB_8 = Optim(
    Stepped.MATRICES,
    "bitsandbytes",
    "blocks of 256 elements are those of whole matrices; embeddings keep 32 bit; compared without clipping",
)
_PAGED = "; pages exist on CUDA only, where it was not run"
_PAGED_32 = Optim(Stepped.SLICES, "bitsandbytes", _BNB_32.note + _PAGED)
_PAGED_8 = Optim(
    Stepped.MATRICES, "bitsandbytes", "blocks are those of whole matrices; compared without clipping" + _PAGED
)
_TORCHAO = Optim(Stepped.MATRICES, "torchao", "blocks are those of whole matrices; its step is compiled per shape")
_SCHEDULE_FREE = Optim(Stepped.SLICES, "schedulefree", "the model follows its mode")
_LAYERWISE = Optim(
    Stepped.REFUSED,
    None,
    "it steps each layer inside backward, before gradients are summed over ranks: take the name without _layerwise",
)
_FUSED = Optim(
    Stepped.REFUSED,
    None,
    "it steps inside backward, before gradients are summed over ranks. What it saves, gradients and states, stages 2 "
    "and 3 share out: take adamw_torch or adafactor",
)

OPTIMS: dict[str, Optim] = {
    "adamw_torch": _SLICES,
    "adamw_torch_fused": _SLICES,
    "adamw_torch_xla": Optim(Stepped.REFUSED, None, "it is for XLA devices, which hf_zero does not run on"),
    "adamw_torch_npu_fused": Optim(Stepped.REFUSED, None, "it is for NPUs, which hf_zero does not run on"),
    "adafactor": Optim(Stepped.MATRICES, None, "with relative_step too (`transformers.Adafactor` made by yourself)"),
    "adamw_anyprecision": Optim(Stepped.SLICES, "torchdistx", "not run: the package does not build for this torch"),
    "adamw_torch_4bit": _TORCHAO,
    "adamw_torch_8bit": _TORCHAO,
    "ademamix": _BNB_32,
    "sgd": _SLICES,
    "adagrad": _SLICES,
    "adamw_bnb_8bit": _BNB_8,
    "adamw_8bit": _BNB_8,
    "ademamix_8bit": _BNB_8,
    "lion_8bit": _BNB_8,
    "lion_32bit": _BNB_32,
    "paged_adamw_32bit": _PAGED_32,
    "paged_adamw_8bit": _PAGED_8,
    "paged_ademamix_32bit": _PAGED_32,
    "paged_ademamix_8bit": _PAGED_8,
    "paged_lion_32bit": _PAGED_32,
    "paged_lion_8bit": _PAGED_8,
    "rmsprop": _SLICES,
    "rmsprop_bnb": _BNB_32,
    "rmsprop_bnb_8bit": _BNB_8,
    "rmsprop_bnb_32bit": _BNB_32,
    "galore_adamw": Optim(Stepped.MATRICES, "galore_torch"),
    "galore_adamw_8bit": Optim(Stepped.MATRICES, "galore_torch", "needs CUDA, where it was not run"),
    "galore_adafactor": Optim(Stepped.MATRICES, "galore_torch"),
    "galore_adamw_layerwise": _LAYERWISE,
    "galore_adamw_8bit_layerwise": _LAYERWISE,
    "galore_adafactor_layerwise": _LAYERWISE,
    "lomo": _FUSED,
    "adalomo": _FUSED,
    "grokadamw": Optim(
        Stepped.REFUSED,
        None,
        "it clips by the norm of all tensors that it holds, of which each rank has some: take adamw_torch",
    ),
    "schedule_free_radam": _SCHEDULE_FREE,
    "schedule_free_adamw": _SCHEDULE_FREE,
    "schedule_free_sgd": _SCHEDULE_FREE,
    "apollo_adamw": Optim(Stepped.MATRICES, "apollo_torch"),
    "apollo_adamw_layerwise": _LAYERWISE,
    "stable_adamw": Optim(Stepped.MATRICES, "optimi", "installed as torch-optimi"),
}


def check_optim(name: str) -> None:
    """Raise ZeroConfigError for an optimizer of TrainingArguments that cannot run."""
    known = OPTIMS.get(name)
    if known is not None and known.stepped is Stepped.REFUSED:
        raise ZeroConfigError(f"optim='{name}' is not supported: {known.note}")
