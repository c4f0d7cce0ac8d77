"""The harness reports failures, deaths and hangs of ranks by name, and leaves no process and no file behind."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.harness import distributed, run_ranks


@distributed(world_size=2)
def test_ranks_meet_and_are_set_up_alike():
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value)
    assert value.item() == 3, value
    assert torch.get_num_threads() == 1, torch.get_num_threads()
    assert os.environ["RANK"] == str(dist.get_rank()) == os.environ["LOCAL_RANK"], os.environ["RANK"]
    assert os.environ["WORLD_SIZE"] == "2", os.environ["WORLD_SIZE"]
    assert os.environ["ACCELERATE_USE_CPU"] == "true", "accelerate would look for a device"
    draws = [torch.empty(3) for _ in range(2)]
    dist.all_gather(draws, torch.rand(3))
    assert torch.equal(*draws), draws


@pytest.mark.parametrize("scale", [2, 5])
@distributed(world_size=3)
def test_parameters_and_fixtures_reach_the_ranks(tmp_path, scale):
    (tmp_path / str(dist.get_rank())).write_text(str(scale))
    dist.barrier()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "2"], list(tmp_path.iterdir())


def _rank_times(factor):
    return dist.get_rank() * factor, torch.full((1000,), float(dist.get_rank()))


def test_values_come_back_in_rank_order():
    results = run_ranks(_rank_times, 10, world_size=4)
    assert [number for number, _ in results] == [0, 10, 20, 30]
    assert all(tensor.eq(rank).all() for rank, (_, tensor) in enumerate(results))


_TOUCHED = []


def _touch():
    _TOUCHED.append(1)
    return len(_TOUCHED), os.environ.get("HARNESS_TEST")


def test_each_run_has_fresh_processes_with_the_environment_of_now(monkeypatch):
    monkeypatch.setenv("HARNESS_TEST", "first")
    assert run_ranks(_touch, world_size=1) == [(1, "first")]
    monkeypatch.setenv("HARNESS_TEST", "second")
    assert run_ranks(_touch, world_size=1) == [(1, "second")]


def _register(folder):
    """Start a process that outlives its rank, and write down both."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(folder, f"{dist.get_rank()}").write_text(f"{os.getpid()} {child.pid}")
    dist.barrier()


def _fail(folder):
    _register(folder)
    if dist.get_rank() == 1:
        raise ArithmeticError("seven is not eight")
    dist.all_reduce(torch.ones(1))


def _die(folder):
    _register(folder)
    if dist.get_rank() == 1:
        os._exit(17)
    dist.all_reduce(torch.ones(1))


def _sleepy_corner():
    time.sleep(60)


def _hang(folder):
    _register(folder)
    if dist.get_rank() == 1:
        _sleepy_corner()


def _return_what_cannot_travel(folder):
    _register(folder)
    if dist.get_rank() == 1:
        return lambda: None
    return None


@pytest.mark.parametrize(
    "body, limit, words",
    [
        (_fail, 30, ["rank 1 of 2 failed", "ArithmeticError: seven is not eight", "in _fail"]),
        (_die, 30, ["rank 1 of 2 died without a report", "exit code 17"]),
        (_hang, 2, ["no report within 2 s from rank(s) 1 of 2", "in _sleepy_corner"]),
        (_return_what_cannot_travel, 30, ["rank 1 of 2 failed", "pickle"]),
    ],
)
def test_trouble_is_named_and_nothing_is_left_behind(tmp_path, monkeypatch, body, limit, words):
    stores = tmp_path / "stores"
    pids = tmp_path / "pids"
    stores.mkdir()
    pids.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(stores))
    with pytest.raises(pytest.fail.Exception) as caught:
        run_ranks(body, str(pids), world_size=2, timeout=limit)
    for word in words:
        assert word in str(caught.value)
    assert list(stores.iterdir()) == []
    written = [int(pid) for file in pids.iterdir() for pid in file.read_text().split()]
    assert len(written) == 4
    assert not [pid for pid in written if _lives(pid)]


def _lives(pid):
    """Whether a process still runs; one that was killed may need a moment to go."""
    for _ in range(100):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            return False
        time.sleep(0.02)
    return True


def test_a_run_that_passes_leaves_nothing_behind(tmp_path):
    run_ranks(_register, str(tmp_path), world_size=2)
    written = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(written) == 4
    assert not [pid for pid in written if _lives(pid)]


@distributed(world_size=2)
def _decorated_failure():
    raise ArithmeticError(f"wrong on {dist.get_rank()}")


def test_a_decorated_test_fails_when_its_ranks_fail():
    with pytest.raises(pytest.fail.Exception, match="ArithmeticError: wrong on"):
        _decorated_failure()


def test_a_body_without_a_name_is_refused():
    def inner():
        pass

    with pytest.raises(ValueError, match="top level of its module"):
        run_ranks(inner, world_size=2)
