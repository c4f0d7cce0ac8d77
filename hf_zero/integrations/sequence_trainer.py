"""The part of `ZeroTrainerMixin` for sequences that several ranks share: what is counted, reported and evaluated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from hf_zero.errors import ZeroConfigError
from hf_zero.parallel.ulysses import with_value


if TYPE_CHECKING:
    from hf_zero.integrations.accelerate import ZeroAccelerator


class SequenceTrainerMixin:
    """Trainer takes each rank's batch for whole samples of its own; here is where that matters."""

    accelerator: ZeroAccelerator
    args: TrainingArguments

    def get_sp_size(self) -> int:
        """1: Trainer corrects by it for DeepSpeed's loaders, which are longer and count differently."""
        return 1

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return super().get_total_train_batch_size(args) // self.accelerator.zero_plugin.config.sp_size

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor | int | None:
        """Tokens on all ranks, or what a rank has of its sequences on average where ranks are not averaged by tokens.

        Divided by them, the parts of a sequence weigh as much as their tokens.
        """
        items = super()._get_num_items_in_batch(batch_samples, device)
        size = self.accelerator.zero_plugin.config.sp_size
        if size == 1 or items is None:
            return items
        return self.accelerator.mean_over_sequence(torch.as_tensor(items, device=device)).float()

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """As Trainer's; the value is the mean over the parts of a sequence, on all of their ranks."""
        if self.accelerator.ranks_of_a_sequence == 1:
            return super().compute_loss(model, inputs, return_outputs, *args, **kwargs)
        self._check_loss()
        loss, outputs = super().compute_loss(model, inputs, True, *args, **kwargs)
        loss = with_value(loss, self.accelerator.mean_over_sequence(loss))
        return (loss, outputs) if return_outputs else loss

    def _check_loss(self) -> None:
        given = None
        if self.args.label_smoothing_factor > 0:
            given = "label_smoothing_factor"
        elif self.compute_loss_func is not None:
            given = "compute_loss_func"
        if given is not None:
            raise ZeroConfigError(
                f"{given} computes a loss of whole sequences, of which each rank has a part (sp_size, cp_size): leave "
                "it out, so that the model computes its loss, or set both sizes to 1"
            )

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, Any, Any]:
        """As Trainer's, with the results of whole sequences on all ranks that share them."""
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        if self.accelerator.zero_plugin.config.cp_size > 1 and logits is not None:
            raise ZeroConfigError(
                "compute_metrics and predict need the logits of whole sequences, and torch's ring attention leaves "
                "each rank two pieces of them (cp_size): set prediction_loss_only, or sp_size instead of cp_size"
            )
        if self.accelerator.zero_plugin.config.sp_size > 1:
            logits, labels = (
                self.accelerator.whole_sequences(found) if isinstance(found, Tensor) and found.dim() > 1 else found
                for found in (logits, labels)
            )
        return loss, logits, labels
