"""Starts a training script and shows what its ranks measured beside what the plan says for that run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from hf_zero.planning.compare import Comparison
from hf_zero.planning.model import PlanError
from hf_zero.tools.memory import MEMORY_FOLDER


def measure(command: list[str], *, config: str | None, ranks: int) -> Comparison:
    """Run `command` (a script and its arguments) on `ranks` ranks; the script must train with a ZeRO trainer.

    Raises PlanError where the run fails or has measured nothing.
    """
    if not Path(command[0]).is_file():
        raise PlanError(f"--measure: there is no script '{command[0]}'")
    launch = [sys.executable, "-m", "hf_zero.cli", "launch", "--num_processes", str(ranks)]
    launch += ["--config_file", config] if config else []
    with tempfile.TemporaryDirectory() as folder:
        # What the script prints goes to stderr: stdout is the plan's, and may be JSON.
        status = subprocess.run([*launch, *command], env={**os.environ, MEMORY_FOLDER: folder}, stdout=2).returncode
        if status:
            raise PlanError(f"--measure: {command[0]} ended with exit status {status}")
        found = Path(folder) / "memory_comparison.json"
        if not found.is_file():
            raise PlanError(
                f"--measure: {command[0]} has measured nothing: it must train at least two steps with ZeroTrainer, "
                "ZeroSFTTrainer or another class with ZeroTrainerMixin"
            )
        return Comparison(**json.loads(found.read_text()))
