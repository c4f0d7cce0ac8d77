"""The task of the command: a model from a folder, a hub name or a small one of its own, with made-up micro-batches."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from hf_zero.config import ZeroConfig, values
from hf_zero.config.builders import build_optimizer
from hf_zero.config.consistency import hidden_size_of
from hf_zero.planning.model import BatchShape, PlanError, make_batch, read_config, vocabulary
from hf_zero.planning.model import build as build_on_meta
from hf_zero.verify.task import IGNORED, Batch, Task, grouped


ROWS, LENGTH = 2, 32
RATE, DECAY = 1e-3, 0.01
# Small, and with all that can go wrong in it: tied embeddings, dropout, biases, norms and a frozen parameter.
_OWN = {
    "vocab_size": 128,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OWN_FROZEN = "transformer.wpe.weight"


def make_task(model: str | None, config: ZeroConfig, device: torch.device, *, steps: int, seed: int) -> Task:
    """The task of `hf-zero verify`. Raises PlanError for a model that is not found or has no loss of its own."""
    accumulation, clip = config.gradient_accumulation_steps, config.gradient_clipping

    def build() -> nn.Module:
        return _build(model, seed).to(device).float().train()

    template = build()
    limit = getattr(template.config.get_text_config(), "max_position_embeddings", None)
    shapes = make_batch(template, BatchShape(rows=ROWS, length=min(LENGTH, limit or LENGTH)))
    if "labels" not in shapes:
        raise PlanError(f"{type(template).__name__} takes no labels, so it has no loss of its own to train with")
    fill = {"vocabulary": vocabulary(template), "classes": int(getattr(template.config, "num_labels", 2) or 2)}

    def batch(rank: int, step: int, number: int) -> Batch:
        draw = torch.Generator().manual_seed(((seed * 1009 + rank) * 1009 + step) * 1009 + number)
        return {name: tensor.to(device) for name, tensor in _filled(shapes, draw, **fill).items()}

    def make_optimizer(made: nn.Module) -> torch.optim.Optimizer:
        if config.optimizer is None:
            return torch.optim.AdamW(grouped(made, RATE, DECAY))
        written = config.optimizer.get("params") or {}
        rate, decay = (written.get(key) for key in ("lr", "weight_decay"))
        groups = grouped(made, _number(rate, RATE), _number(decay, DECAY))
        return build_optimizer(
            {**config.optimizer, "params": {k: v for k, v in written.items() if not values.is_auto(v)}}, groups
        )

    return Task(
        build=build,
        make_optimizer=make_optimizer,
        batch=batch,
        loss=lambda made, batch: made(**batch).loss,
        steps=steps,
        accumulation=2 if values.is_auto(accumulation) else accumulation,
        clip="half" if values.is_auto(clip) else (clip or None),
        numel=sum(param.numel() for param in template.parameters()),
        width=hidden_size_of(template.config),
    )


def _number(written: object, default: float) -> float:
    return default if written is None or values.is_auto(written) else values.to_float(written)


def _build(name: str | None, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name is None:
            made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**_OWN))
            made.get_parameter(_OWN_FROZEN).requires_grad_(False)
        else:
            config = read_config(name)
            made_class = type(build_on_meta(config))
            weights = list(Path(name).glob("*.safetensors")) if Path(name).is_dir() else not Path(name).is_file()
            made = made_class.from_pretrained(name, dtype=torch.float32) if weights else made_class(config)
    made.config.use_cache = False
    return made


def _filled(shapes: dict[str, Tensor], draw: torch.Generator, vocabulary: int, classes: int) -> dict[str, Tensor]:
    """Random values of the kinds that the names mean; labels count from another place on in each row."""
    found = {}
    for name, shape in shapes.items():
        size = tuple(shape.shape)
        if shape.is_floating_point():
            found[name] = torch.randn(size, generator=draw)
        elif name == "attention_mask":
            found[name] = torch.ones(size, dtype=torch.long)
        elif name == "labels" and len(size) == 1:
            found[name] = torch.randint(classes, size, generator=draw)
        else:
            found[name] = torch.randint(vocabulary or classes, size, generator=draw)
    labels = found.get("labels")
    if labels is not None and labels.dim() == 2:
        first = torch.randint(labels.shape[1] - 2, (labels.shape[0], 1), generator=draw)
        found["labels"] = labels.masked_fill(torch.arange(labels.shape[1]) < first, IGNORED)
    return found
