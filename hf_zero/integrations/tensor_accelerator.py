"""Tensor parallelism in `ZeroAccelerator` and `ZeroTrainer`: models are shared out when they are prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn

from hf_zero.parallel.tensor_parallel import follow, share_out_once


if TYPE_CHECKING:
    from hf_zero.integrations.accelerate import ZeroAccelerator, ZeroPlugin


class TensorAccelerator(Accelerator):
    """What `ZeroAccelerator` does differently where several ranks share the computation of a layer."""

    zero_plugin: ZeroPlugin

    def _share_out(self, model: nn.Module) -> None:
        """Have the ranks share a model out that is not, as the configuration says."""
        replaced = share_out_once(model, self.zero_plugin.config.tp_size, lambda: self.state.device_mesh["tp"])
        self._parts().update(replaced)

    def _parts(self) -> dict[nn.Parameter, nn.Parameter]:
        """The parameters that have taken the place of others, by these."""
        return self.__dict__.setdefault("_replaced_parameters", {})

    def _follow_parts(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer that was made of a model's parameters hold those that it has now."""
        follow(optimizer, self._parts())

    def _prepare_tp(self, *args: Any) -> tuple:
        """Everything is prepared as ever: models are shared out by `prepare_model`."""
        return args


class TensorTrainerMixin:
    """Trainer takes models whose weights are DTensors for its own, and neither saves nor resumes their training."""

    accelerator: ZeroAccelerator

    def get_tp_size(self) -> int:
        """How many ranks have the same samples because they share the model's layers."""
        return self.accelerator.zero_plugin.config.tp_size

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """False: the engine keeps and saves such models."""
        return False

    @is_distributed_loading_by_transformers.setter
    def is_distributed_loading_by_transformers(self, value: bool) -> None:
        """Trainer notes here what it has found in the model."""
