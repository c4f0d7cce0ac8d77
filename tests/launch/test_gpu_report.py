"""The GPU report's own code, run on CPU."""

import subprocess
import sys

import pytest
import torch

from tests.support.harness import LIMIT


def run(*options):
    command = [sys.executable, "benchmarks/gpu_report.py", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)


def test_the_measurements_run_without_a_gpu():
    done = run(
        *["--device", "cpu", "--hidden-size", "64", "--layers", "2", "--tokens", "16", "--steps", "1", "--skip-tests"]
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:3] for line in done.stdout.splitlines() if line.startswith(("| 8", "| 64"))]
    assert [[cell.strip() for cell in row] for row in rows] == [[n, s] for n in ("8", "64") for s in "123"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = run()
    assert done.returncode == 2 and "no GPU is visible" in done.stderr and not done.stdout
