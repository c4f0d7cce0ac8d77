"""The example for Ray Train on CPU workers: one is killed, and a later run has another number of them."""

import json
import os
import shutil
import signal
import sys
import tempfile
import time

import psutil
import pytest

from tests.support.harness import LIMIT
from tests.support.launches import ROOT, run, start


pytest.importorskip("ray", reason="pip install 'ray[train]'")
EXAMPLE = (sys.executable, ROOT / "examples/cluster/ray_train.py")
STEPS = 100


@pytest.fixture
def ray_folder(monkeypatch):
    """Ray's sockets lie there: their paths may not be long."""
    folder = tempfile.mkdtemp(dir="/tmp")
    yield {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300"}
    shutil.rmtree(folder)


def _losses(folder):
    history = json.loads((folder / f"checkpoint-{STEPS}/trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


def _worker(driver):
    """A process of Ray in which the training runs, None if it has none."""
    for process in psutil.Process(driver.pid).children(recursive=True):
        try:
            if "RayTrainWorker" in " ".join(process.cmdline()):
                return process
        except psutil.NoSuchProcess:
            continue
    return None


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_another_number_of_workers_goes_on(tmp_path, ray_folder):
    output = tmp_path / "out"
    words = ("--output", output, "--steps", STEPS, "--save_steps", 5)
    driver = start(*EXAMPLE, "--workers", 2, *words, folder=tmp_path, **ray_folder)
    try:
        until = time.monotonic() + LIMIT
        while not (output / "checkpoint-5").exists():
            assert driver.poll() is None and time.monotonic() < until, driver.communicate()[0]
            time.sleep(0.02)
        os.kill(_worker(driver).pid, signal.SIGKILL)
        said, _ = driver.communicate(timeout=2 * LIMIT)
    finally:
        if driver.poll() is None:
            driver.kill()
    assert driver.returncode == 0, said
    assert "begins" in said and "goes on from the newest complete checkpoint" in said, said
    whole = _losses(output)
    assert list(whole) == list(range(1, STEPS + 1)), "each step once"

    shutil.rmtree(output / f"checkpoint-{STEPS}")
    ((said,), (status,)) = run((*EXAMPLE, "--workers", 1, *words), folder=tmp_path, **ray_folder)
    assert status == 0 and "goes on from the newest complete checkpoint" in said and "begins" not in said, said
    assert _losses(output) == pytest.approx(whole, abs=1e-5)
