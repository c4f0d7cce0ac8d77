"""The systems that train in a verification: the one that is verified, and the reference that is written out here."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hf_zero.comm.communicator import Communicator
from hf_zero.config import ZeroConfig
from hf_zero.core.build import DTYPES, make_scaler
from hf_zero.core.engine import ZeroEngine
from hf_zero.core.hooks import Hook
from hf_zero.core.master import MASTER
from hf_zero.core.precision import Precision, meet_weight
from hf_zero.core.rebuild import gather_states
from hf_zero.core.unit import gathered_parameters
from hf_zero.integrations.plain_loop import shard
from hf_zero.verify.task import Batch, Task


Named = dict[str, Tensor]

_FROZEN = 0.05  # relative error of frozen weights in 8 bits, at most


def quantises_weights(config: ZeroConfig) -> bool:
    """Whether what is computed with are not the masters, but what a codec has made of them."""
    return config.zero_quantized_weights or config.zero_quantized_nontrainable_weights


def codecs_of(engine: ZeroEngine) -> dict[str, float]:
    """The largest relative error (2-norm) that quantised "weights" and "gradients" may have."""
    found = {each.kind: each.limit for each in engine.mesh.quantised}
    return found if engine.mesh.frozen is None else {"weights": _FROZEN, **found}


class System(Protocol):
    """What is verified: asked, step by step, for what it computes. All calls are made on all ranks."""

    name: str
    model: nn.Module
    clips: bool  # by `clip`; otherwise it is not asked to
    codecs: Mapping[str, float]  # relative error (2-norm) of quantised "weights" and "gradients", at most

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with before backward, and gradients divided by after it."""

    def micro_step(self, batch: Batch, weight: float, last: bool) -> float:
        """Forward and backward of `weight` times the loss; returns the loss. `last` in its optimizer step."""

    def gradients(self) -> Named:
        """The mean over ranks, as the optimizer would take it now: whole, in fp32, copies."""

    def clip(self, limit: float) -> float:
        """Clip the gradients; returns their norm before."""

    def step(self) -> None:
        """Step the optimizer and forget the gradients."""

    def weights(self) -> Named:
        """What the optimizer has made, whole, in fp32, copies."""

    def computed(self) -> Named:
        """What the model computes with, whole, in fp32, copies: where weights are quantised, what is decoded."""


class ZeroSystem:
    """hf_zero with a configuration."""

    clips = True

    def __init__(self, task: Task, config: ZeroConfig) -> None:
        self.name = f"hf_zero, stage {config.zero_stage}"
        self._task = task
        self.model = task.build()
        self.optimizer = task.make_optimizer(self.model)
        # `param_access: raise` is for scripts that must not read what is sharded; here gradients are read on purpose.
        self.engine = shard(self.model, self.optimizer, config.replace(param_access="gather"))
        self.codecs = codecs_of(self.engine)

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.engine.scaler is None else self.engine.scaler.scale

    def micro_step(self, batch: Batch, weight: float, last: bool) -> float:
        with contextlib.nullcontext() if last else self.engine.no_sync():
            loss = self._task.loss(self.model, batch)
            self.engine.backward(loss * weight)
        return loss.item()

    def gradients(self) -> Named:
        read = ((name, param.grad) for name, param in self.model.named_parameters())
        return {name: grad.detach().float().clone() for name, grad in read if grad is not None}

    def clip(self, limit: float) -> float:
        return self.engine.clip_grad_norm_(limit).item()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> Named:
        masters = gather_states(self.engine.buffers, self.engine.bindings)
        found = {}
        # Trained parameters are left alone: opening them would bring back values that have got lost.
        with gathered_parameters(param for param in self.model.parameters() if param not in masters):
            for name, param in self.model.named_parameters():
                value = masters[param][MASTER] if param in masters else param.detach()
                found[name] = value.detach().float().clone().view(param.shape)
        return found

    def computed(self) -> Named:
        with gathered_parameters(self.model):
            return {name: param.detach().float().clone() for name, param in self.model.named_parameters()}

    def save(self, folder: str) -> None:
        self.engine.save_checkpoint(folder)

    def load(self, folder: str) -> None:
        self.engine.load_checkpoint(folder)


class Reference:
    """Plain data parallelism, written out: fp32 masters, compute in the precision asked for, sums in fp32.

    With `mixed_precision: no` this is what DistributedDataParallel computes. `sizes` are the sums of the absolute
    values of everything that a gradient is the sum of: what its rounding is measured by.
    """

    def __init__(self, task: Task, config: ZeroConfig, comm: Communicator) -> None:
        self._task, self._comm = task, comm
        self.masters = task.build()
        self.optimizer = task.make_optimizer(self.masters)
        dtype = DTYPES.get(config.mixed_precision)
        self.model = self.masters if dtype is None and not quantises_weights(config) else task.build()
        self.scaler = make_scaler(config)
        device = next(self.model.parameters()).device
        self._precision = Precision(self.model, dtype, device)
        for module in self._precision.layers_to_hook(self.model):
            module.register_forward_pre_hook(Hook(meet_weight))
        for param in self.model.parameters():
            param.data = param.data.to(self._precision.of(param))
        self._sums: Named = {}
        self._sizes: Named = {}
        self.leaves_out = False  # whether a trained parameter got no gradient, here
        self.used: set[str] = set()  # what has got one in this step, on any rank

    def loss(self, batch: Batch) -> Tensor:
        with self._precision.autocast():
            return self._task.loss(self.model, batch)

    def micro_step(self, batch: Batch, weight: float) -> float:
        loss = self.loss(batch)
        for name, grad in self._backward(loss * weight).items():
            self._sums[name] = self._sums[name].add_(grad) if name in self._sums else grad
            size = grad.abs()
            self._sizes[name] = self._sizes[name].add_(size) if name in self._sizes else size
        return loss.item()

    def contribution(self, batch: Batch) -> Named:
        """The gradient of one micro-batch of this rank alone."""
        return self._backward(self.loss(batch))

    def _backward(self, loss: Tensor) -> Named:
        scale = 1.0 if self.scaler is None else self.scaler.scale
        (loss * scale).backward()
        found = {}
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                found[name] = param.grad.float() / scale
                param.grad = None
        return found

    def gradients(self) -> tuple[Named, Named]:
        """The means over ranks of the gradients and of their sizes; without those that no rank has."""
        trained = {name: param for name, param in self.masters.named_parameters() if param.requires_grad}
        used = torch.tensor([float(name in self._sums) for name in trained], device=self._comm.device)
        self.leaves_out = self.leaves_out or not used.all()
        self._comm.all_reduce_scalars(used)
        self.used = {name for name, count in zip(trained, used.tolist(), strict=True) if count}
        means: tuple[Named, Named] = {}, {}
        for name in sorted(self.used):
            param = trained[name]
            for mean, mine in zip(means, (self._sums, self._sizes), strict=True):
                total = mine.get(name, torch.zeros_like(param, requires_grad=False)).to(self._comm.device)
                self._comm.all_reduce_scalars(total)
                mean[name] = (total / self._comm.world_size).to(param.device)
        self._sums, self._sizes = {}, {}
        return means

    def step(self, gradients: Named) -> None:
        """Step the masters by gradients that are given; where one is not finite, leave them, as fp16 does."""
        finite = all(grad.isfinite().all() for grad in gradients.values())
        if self.scaler is not None:
            self.scaler.update(not finite)
        if finite:
            for name, param in self.masters.named_parameters():
                param.grad = gradients.get(name)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.cast()

    def weights(self) -> Named:
        return {name: param.detach().float().clone() for name, param in self.masters.named_parameters()}

    @torch.no_grad()
    def take(self, weights: Named) -> None:
        """Go on from these weights."""
        for name, param in self.masters.named_parameters():
            param.copy_(weights[name])
        self.cast()

    @torch.no_grad()
    def cast(self) -> None:
        """Make what is computed with of the masters."""
        if self.model is not self.masters:
            for param, master in zip(self.model.parameters(), self.masters.parameters(), strict=True):
                param.copy_(master)

    @torch.no_grad()
    def compute_with(self, weights: Named) -> None:
        """Take these in place of the masters, until they change."""
        for name, param in self.model.named_parameters():
            param.copy_(weights[name])

    def options(self) -> dict[str, dict[str, Any]]:
        """By parameter: its optimizer group's number, rate and so on, and its own state."""
        names = {param: name for name, param in self.masters.named_parameters()}
        return {
            names[param]: {**group, "group": number, "state": self.optimizer.state.get(param, {})}
            for number, group in enumerate(self.optimizer.param_groups)
            for param in group["params"]
        }
