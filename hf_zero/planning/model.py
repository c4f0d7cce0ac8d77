"""Builds a model from its configuration alone, on the meta device, and a batch to train it with."""

from __future__ import annotations

import copy
import inspect
import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub.utils
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_zero.core import guard
from hf_zero.core.engine import engine_of
from hf_zero.errors import ZeroError


META = torch.device("meta")


class PlanError(ZeroError, ValueError):
    """A plan that cannot be made; one line that says why and what to do."""


def silence() -> None:
    """Keep the libraries from saying what our own messages say in one line: warnings, the hub's retries."""
    transformers.utils.logging.set_verbosity_error()
    huggingface_hub.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def read_config(name: str) -> PreTrainedConfig:
    """The configuration of a local folder, a config.json or a hub name. Raises PlanError where there is none."""
    path = Path(name)
    if path.is_file():
        return _from_file(path)
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise PlanError(_why_not(name, path, error)) from error


def _from_file(path: Path) -> PreTrainedConfig:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} is not a readable JSON file: {_first_line(error)}") from error
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind not in CONFIG_MAPPING:
        raise PlanError(f"{path}: model_type {kind!r} is unknown to transformers {transformers.__version__}")
    try:
        return AutoConfig.for_model(**values)
    except Exception as error:  # the values decide what a configuration class raises
        raise PlanError(f"{path}: {_first_line(error)}") from error


def _why_not(name: str, path: Path, error: Exception) -> str:
    if path.is_dir():
        return f"{name}/config.json: {_first_line(error)}"
    text = str(error)
    if "model_type" in text or "Unrecognized model" in text or "does not recognize this architecture" in text:
        return f"'{name}': its architecture is unknown to transformers {transformers.__version__}"
    if "gated" in text or "401" in text or "403" in text:
        return f"'{name}' needs a login or permission on the hub: run `hf auth login`, or give a local config.json"
    return (
        f"'{name}' is no local folder, and its configuration could not be read from the hub (is the name right, and "
        "is there a network?): give a folder or a config.json instead"
    )


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0][:200]


@dataclass(frozen=True, kw_only=True)
class Lora:
    """LoRA adapters as peft adds them; with no targets, peft's own choice for the architecture."""

    rank: int
    targets: tuple[str, ...] = ()


def build(config: PreTrainedConfig, lora: Lora | None = None) -> nn.Module:
    """The model in training mode, without a single byte of weights. Raises PlanError for what cannot be built."""
    architecture = (getattr(config, "architectures", None) or [""])[0]
    model_class = getattr(transformers, architecture, None)
    try:
        with META:
            model = (AutoModelForCausalLM.from_config if model_class is None else model_class._from_config)(config)
    except Exception as error:  # modeling code raises whatever it likes for odd values
        raise PlanError(f"model_type '{config.model_type}' cannot be built: {_first_line(error)}") from error
    model.config.use_cache = False  # as Trainer sets it
    return (_with_adapters(model, lora) if lora else model).train()


def _with_adapters(model: nn.Module, lora: Lora) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise PlanError("--lora needs peft: pip install 'hf_zero[peft]'") from error
    task = "CAUSAL_LM" if type(model).__name__.endswith("ForCausalLM") else None
    try:
        with META:
            return get_peft_model(
                model, LoraConfig(r=lora.rank, target_modules=list(lora.targets) or None, task_type=task)
            )
    except ValueError as error:
        raise PlanError(f"LoRA: {_first_line(error)}") from error


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of a prepared model on the meta device, not prepared: its modules and shapes, without a value of it.

    Raises PlanError for packed weights, which their libraries read by kernels that need values.
    """
    engine = engine_of(model)
    assert engine is not None
    dtypes = {param: buffer.original_dtype for buffer in engine.buffers for param in buffer.params}
    memo: dict[int, object] = {}
    for name, param in model.named_parameters():
        if guard.is_packed(param):
            raise PlanError(f"'{name}' is quantised ({type(param).__name__}): such models are not planned")
        bare = torch.empty(param.shape, dtype=dtypes[param], device=META)
        memo[id(param)] = nn.Parameter(bare, requires_grad=param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device=META)
    return copy.deepcopy(model, memo)


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """One micro-batch of one rank."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def make_batch(model: nn.Module, shape: BatchShape) -> dict[str, Tensor]:
    """Inputs and labels on the meta device, of the kind that this model takes."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config, takes = base.config, inspect.signature(base.forward).parameters
    ids = torch.empty(shape.rows, shape.length, dtype=torch.long, device=META)
    batch: dict[str, Tensor] = {}
    if base.main_input_name == "pixel_values":
        size, channels = config.image_size, config.num_channels
        height, width = (size, size) if isinstance(size, int) else size
        batch["pixel_values"] = torch.empty(shape.rows, channels, height, width, device=META)
    elif base.main_input_name == "input_features":
        frames = 2 * config.max_source_positions
        batch["input_features"] = torch.empty(shape.rows, config.num_mel_bins, frames, device=META)
    else:
        batch["input_ids"] = ids
        if "attention_mask" in takes:
            batch["attention_mask"] = torch.ones_like(ids)
    if "labels" in takes:
        one_per_row = "Classification" in type(base).__name__ and "Token" not in type(base).__name__
        batch["labels"] = torch.empty(shape.rows, dtype=torch.long, device=META) if one_per_row else ids
    return batch


def vocabulary(model: nn.Module) -> int:
    """Width of the logits, 0 where the model has no vocabulary."""
    text = model.config.get_text_config()
    return int(getattr(text, "vocab_size", 0) or 0)
