"""Other systems that can be verified in hf_zero's place: stock DistributedDataParallel and FSDP2, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_zero.config import ZeroConfig
from hf_zero.errors import ZeroConfigError
from hf_zero.verify.systems import Named
from hf_zero.verify.task import Batch, Task


class StockDDP:
    """`torch.nn.parallel.DistributedDataParallel`."""

    name = "torch DistributedDataParallel"
    loss_scale = 1.0

    def __init__(self, task: Task, config: ZeroConfig) -> None:
        if config.mixed_precision != "no":
            raise ZeroConfigError(
                f"--against verifies in fp32, and mixed_precision is {config.mixed_precision!r} "
                f"({config.where('mixed_precision')}): add --mixed-precision no"
            )
        self._task = task
        self.model = task.build()
        self._wrapped = self._wrap()
        self.optimizer = task.make_optimizer(self.model)

    def _wrap(self) -> nn.Module:
        return DistributedDataParallel(self.model, find_unused_parameters=True)

    def _reduces(self, last: bool) -> None:
        self._wrapped.require_backward_grad_sync = last

    def micro_step(self, batch: Batch, weight: float, last: bool) -> float:
        self._reduces(last)
        loss = self._task.loss(self._wrapped, batch)
        (loss * weight).backward()
        return loss.item()

    def gradients(self) -> Named:
        found = {name: param.grad for name, param in self.model.named_parameters()}
        return {name: _whole(grad) for name, grad in found.items() if grad is not None}

    def clip(self, limit: float) -> float:
        return _whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)).item()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> Named:
        return {name: _whole(param) for name, param in self.model.named_parameters()}


class StockFSDP2(StockDDP):
    """`fully_shard` of torch, on each layer and on the model."""

    name = "torch FSDP2"

    def _wrap(self) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        for module in self.model.modules():
            if isinstance(module, nn.ModuleList):
                for layer in module:
                    fully_shard(layer)
        return fully_shard(self.model)

    def _reduces(self, last: bool) -> None:
        self.model.set_requires_gradient_sync(last)


def _whole(value: Tensor) -> Tensor:
    """A plain copy; of what is sharded the whole, which is a collective."""
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).float().clone()


SYSTEMS = {"ddp": StockDDP, "fsdp2": StockFSDP2}
