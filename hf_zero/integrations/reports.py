"""Adds the reports to a Trainer: what a step did goes into its logs, what memory holds into files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hf_zero.integrations.callbacks import ZeroMemoryCallback, ZeroStepReport
from hf_zero.integrations.run_report import ZeroRunReport
from hf_zero.tools.memory import MEMORY_FOLDER


class ZeroReportMixin:
    """Stands before a Trainer class; see `ZeroTrainerMixin`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.accelerator.zero_plugin.config
        memory = os.environ.get(MEMORY_FOLDER)
        if memory is None and (getattr(self.args, "zero_memory_report", False) or config.report):
            memory = str(Path(self.args.output_dir) / "zero_memory")
        page = ZeroRunReport(config, Path(memory)) if config.report else None
        self.zero_step_report = ZeroStepReport(
            details=bool(config.steps_per_print or config.wall_clock_breakdown or config.report),
            times=config.wall_clock_breakdown or config.report,
            steps_per_print=config.steps_per_print,
            each=None if page is None else page.add,
        )
        self.add_callback(self.zero_step_report)
        machine = config.report_machine if config.report else None
        self.zero_memory = None if memory is None else ZeroMemoryCallback(memory, machine)
        for callback in (self.zero_memory, page):
            if callback is not None:
                self.add_callback(callback)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        self.zero_step_report.count_tokens(inputs)
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs.update(self.zero_step_report.logs())
            if self.accelerator.zero_plugin.config.report:
                logs.update(
                    {f"zero_memory/{kind}": count for kind, count in self.zero_memory.categories.items() if count}
                )
        super().log(logs, *args, **kwargs)
