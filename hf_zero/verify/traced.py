"""Runs a training script, and writes what its first steps compute: `hf-zero verify` puts it in front of scripts.

Hooks that torch has for all modules and optimizers of a process note the losses and inputs of the model, and the
gradients and weights of each optimizer step. The script itself stays as it is, under any trainer or loop.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_zero.comm import dtensors
from hf_zero.core.engine import engine_of
from hf_zero.core.unit import gathered_parameters
from hf_zero.verify.probes import fingerprint
from hf_zero.verify.systems import codecs_of


FOLDER_VARIABLE, STEPS_VARIABLE = "HF_ZERO_VERIFY_FOLDER", "HF_ZERO_VERIFY_STEPS"


class Tracer:
    """Writes `STEP.safetensors` (rank 0) and `RANK.json` into `folder`, and ends the process after `steps` steps."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.rank = int(os.environ.get("RANK", "0"))
        self.model: nn.Module | None = None
        self.losses: list[tuple[int, float]] = []
        self.inputs: list[tuple[int, str]] = []
        self.options: dict[str, dict[str, float]] = {}
        self.parts = False
        self._step = 0
        self._last: Tensor | None = None
        self._values: dict[str, Tensor] = {}

    def install(self) -> None:
        register_module_forward_hook(self.after_forward, with_kwargs=True)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)

    def after_forward(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Note the loss that a model returns in training; what wraps it returns the same tensor again."""
        loss = getattr(output, "loss", None)
        trains = module.training and torch.is_grad_enabled() and hasattr(module, "save_pretrained")
        if not trains or not isinstance(loss, Tensor) or loss is self._last or loss.dim():
            return
        self._last = loss
        self.model = self.model or module
        self.parts = kwargs.get("num_items_in_batch") is not None
        given = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        whole = {name: value for name, value in given.items() if not value.is_floating_point()}
        self.losses.append((self._step, loss.item()))
        self.inputs.append((self._step, fingerprint(whole or given)))

    def _trains_model(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` steps the model that was seen: hf_zero tries optimizers out on twins of them."""
        if self.model is None:
            return False
        if engine_of(self.model) is not None:
            return "_zero_owner" in optimizer.__dict__
        known = set(self.model.parameters())
        return any(param in known for group in optimizer.param_groups for param in group["params"])

    def before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if not self._trains_model(optimizer):
            return
        for name, param in self.model.named_parameters():
            grad = param.grad if param.requires_grad else None
            if grad is not None:
                value = _copy(grad)  # on all ranks: where it is sharded or shared out, this gathers it
                self._values |= {f"gradient:{name}": value} if self.rank == 0 else {}
        self._note_options(optimizer)

    def _note_options(self, optimizer: torch.optim.Optimizer) -> None:
        names = {param: name for name, param in self.model.named_parameters()}
        engine = engine_of(self.model)
        groups = [group["params"] for group in optimizer.param_groups]
        if engine is not None:
            groups = next(binding.groups for binding in engine.bindings if binding.optimizer is optimizer)
        for params, group in zip(groups, optimizer.param_groups, strict=False):
            said = {key: float(group[key]) for key in ("lr", "weight_decay") if key in group}
            self.options |= {f"{self._step}:{names[param]}": said for param in params if param in names}

    def after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if not self._trains_model(optimizer):
            return
        with gathered_parameters(self.model):
            for name, param in self.model.named_parameters():
                if self.rank == 0 or dtensors.is_dtensor(param):  # then all ranks that share it put it together
                    self._values[f"weight:{name}"] = _copy(param)
        if self.rank == 0:
            save_file(self._values, self.folder / f"{self._step}.safetensors")
        self._values = {}
        self._step += 1
        if self._step == self.steps:
            sys.exit(0)

    def write(self) -> None:
        engine = None if self.model is None else engine_of(self.model)
        trained = {} if self.model is None else {n: p.requires_grad for n, p in self.model.named_parameters()}
        system = "stock classes" if engine is None else f"hf_zero, stage {engine.config.zero_stage}"
        found = {
            "system": system,
            "stage": None if engine is None else engine.config.zero_stage,
            "precision": "no" if engine is None else engine.config.mixed_precision,
            "codec": 0.0 if engine is None else max(codecs_of(engine).values(), default=0.0),
            "sharing": 1 if engine is None else engine.config.tp_size,  # neighbours with the same batches, and
            "cutting": 1 if engine is None else engine.config.sp_size * engine.config.cp_size,  # with parts of them
            "parts": self.parts,  # where sequences are cut: losses are shares of a sequence's, and not all of it
            "trained": trained,
            "steps": self._step,
            "losses": self.losses,
            "inputs": self.inputs,
            "options": self.options,
        }
        (self.folder / f"{self.rank}.json").write_text(json.dumps(found))


def _copy(tensor: Tensor) -> Tensor:
    return dtensors.whole(tensor).detach().float().cpu().clone().contiguous()


def main() -> None:
    words = sys.argv[1:]
    tracer = Tracer(Path(os.environ[FOLDER_VARIABLE]), int(os.environ[STEPS_VARIABLE]))
    tracer.install()
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))  # as Python does for a script
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        with contextlib.suppress(OSError):
            tracer.write()


if __name__ == "__main__":
    main()
