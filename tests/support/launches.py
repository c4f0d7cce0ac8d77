"""Starts real launch commands, as a user would type them, and waits for their end."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from tests.support.harness import LIMIT


ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes/accelerate_configs"
HOOKS = {"hf_zero": "hf_zero.launcher.hook:install", "hf_zero_adopt": "hf_zero.adopt:install"}

HF_ZERO = (sys.executable, "-m", "hf_zero.cli", "launch")
ACCELERATE = (Path(sys.executable).parent / "accelerate", "launch")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


def environment(folder):
    """Variables for a launch that sees this checkout, no GPU and no settings of the caller's own."""
    paths = [str(ROOT)]
    known = {entry.value for entry in importlib.metadata.entry_points(group="torch.backends")}
    missing = [f"{name} = {value}\n" for name, value in HOOKS.items() if value not in known]
    if missing:  # hf_zero is not installed here: give torch the same entry points from a folder on the path
        info = folder / "site/hf_zero_hook-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hf_zero_hook\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[torch.backends]\n" + "".join(missing))
        paths.append(str(info.parent))
    foreign = ("ACCELERATE_", "HF_ZERO_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    paths = {"PYTHONPATH": os.pathsep.join(paths), "HF_HOME": str(folder / "home")}
    return {**kept, **paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def start(*command, folder, **variables):
    return subprocess.Popen(
        [str(word) for word in command],
        env=environment(folder) | variables,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(*commands, folder, **variables):
    """Start commands at the same time; returns their outputs (both streams) and their exit statuses.

    torchrun starts its ranks unbuffered: a print of several values is several writes, between which another rank may
    write. A script whose output is compared therefore prints one string.
    """
    started = []
    try:
        started += [start(*command, folder=folder, **variables) for command in commands]
        outputs = [process.communicate(timeout=LIMIT)[0] for process in started]
        return outputs, [process.returncode for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
