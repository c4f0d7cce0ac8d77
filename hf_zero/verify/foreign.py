"""Other systems that can be verified in hf_zero's place, in fp32: DistributedDataParallel, FSDP2, DeepSpeed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_zero.config import ZeroConfig
from hf_zero.errors import ZeroConfigError, ZeroLaunchError
from hf_zero.verify.systems import Named
from hf_zero.verify.task import Batch, Task


_DEEPSPEED = "deepspeed"  # hf_zero itself never needs it


class StockDDP:
    """`torch.nn.parallel.DistributedDataParallel`."""

    name = "torch DistributedDataParallel"
    loss_scale = 1.0
    clips = True  # by a call of its own, before the step
    codecs: Mapping[str, float] = MappingProxyType({})

    def __init__(self, task: Task, config: ZeroConfig) -> None:
        if config.mixed_precision != "no":
            raise ZeroConfigError(
                f"--against verifies in fp32, and mixed_precision is {config.mixed_precision!r} "
                f"({config.where('mixed_precision')}): add --mixed-precision no"
            )
        self._task, self._config = task, config
        self.model = task.build()
        self._wrapped = self._wrap()

    def _wrap(self) -> nn.Module:
        self.optimizer = self._task.make_optimizer(self.model)
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

    def computed(self) -> Named:
        return self.weights()


class StockFSDP2(StockDDP):
    """`fully_shard` of torch, on each layer and on the model."""

    name = "torch FSDP2"

    def _wrap(self) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        for module in self.model.modules():
            if isinstance(module, nn.ModuleList):
                for layer in module:
                    fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = self._task.make_optimizer(self.model)  # of what the parameters are now
        return self.model

    def _reduces(self, last: bool) -> None:
        self.model.set_requires_gradient_sync(last)


class StockDeepSpeed(StockDDP):
    """DeepSpeed at the stage of the configuration, where it is installed. It clips inside its step: not verified."""

    clips = False

    def _wrap(self) -> nn.Module:
        try:
            self._deepspeed = importlib.import_module(_DEEPSPEED)
        except ImportError as error:
            raise ZeroLaunchError("--against deepspeed needs DeepSpeed: pip install deepspeed") from error
        self.optimizer = self._task.make_optimizer(self.model)
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self._task.accumulation,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": self._config.zero_stage},
        }
        engine, *_ = self._deepspeed.initialize(model=self.model, optimizer=self.optimizer, config=settings)
        self.name = f"DeepSpeed {self._deepspeed.__version__}, stage {self._config.zero_stage}"
        return engine

    def micro_step(self, batch: Batch, weight: float, last: bool) -> float:
        loss = self._task.loss(self._wrapped, batch)
        self._wrapped.backward(loss * weight, scale_wrt_gas=False)
        if not last:
            self._wrapped.step()  # counts micro-batches
        return loss.item()

    def gradients(self) -> Named:
        read = self._deepspeed.utils.safe_get_full_grad
        found = {name: read(param) for name, param in self.model.named_parameters() if param.requires_grad}
        return {name: _whole(grad) for name, grad in found.items() if grad is not None}

    def step(self) -> None:
        self._wrapped.step()

    def weights(self) -> Named:
        read, found = self._deepspeed.utils.safe_get_full_fp32_param, {}
        for name, param in self.model.named_parameters():
            value = read(param) if param.requires_grad else None
            with self._deepspeed.zero.GatheredParameters([param]):
                found[name] = _whole(param if value is None else value).view(param.shape)
        return found


def _whole(value: Tensor) -> Tensor:
    """A plain copy; of what is sharded the whole, which is a collective."""
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).float().clone()


SYSTEMS = {"ddp": StockDDP, "fsdp2": StockFSDP2, "deepspeed": StockDeepSpeed}
