"""Adds the reports to a Trainer: what a step did goes into its logs, what memory holds into files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hf_zero.integrations.callbacks import ZeroMemoryCallback, ZeroStepReport
from hf_zero.planning.measure import MEMORY_FOLDER


class ZeroReportMixin:
    """Stands before a Trainer class; see `ZeroTrainerMixin`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.accelerator.zero_plugin.config
        self.zero_step_report = ZeroStepReport(
            details=bool(config.steps_per_print or config.wall_clock_breakdown),
            times=config.wall_clock_breakdown,
            steps_per_print=config.steps_per_print,
        )
        self.add_callback(self.zero_step_report)
        folder = os.environ.get(MEMORY_FOLDER)
        if folder is None and getattr(self.args, "zero_memory_report", False):
            folder = str(Path(self.args.output_dir) / "zero_memory")
        if folder is not None:
            self.add_callback(ZeroMemoryCallback(folder))

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        self.zero_step_report.count_tokens(inputs)
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs.update(self.zero_step_report.logs())
        super().log(logs, *args, **kwargs)
