"""The harness reports failures, deaths and hangs of ranks by name, and leaves no process and no file behind."""

import multiprocessing.util
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.support import harness
from tests.support.harness import LIMIT, distributed, run_ranks


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
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
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


def _die_slowly(folder):
    """The connections of a process may close before its pipe does."""
    _register(folder)
    if dist.get_rank() == 0:
        raise RuntimeError("Connection closed by peer")
    time.sleep(0.5)
    os._exit(17)


def _sleepy_corner(folder):
    Path(folder, "asleep").touch()
    time.sleep(3600)


def _hang(folder):
    _register(folder)
    if dist.get_rank() == 1:
        _sleepy_corner(folder)
    while not Path(folder, "asleep").exists():
        time.sleep(0.02)


def _return_what_cannot_travel(folder):
    _register(folder)
    if dist.get_rank() == 1:
        return lambda: None
    return None


@pytest.fixture
def trouble(tmp_path, monkeypatch):
    """Runs a body that fails; returns the message, after a look at what is left behind."""

    def run(body):
        stores, pids = (Path(tempfile.mkdtemp(dir=tmp_path)) for _ in range(2))
        monkeypatch.setattr(tempfile, "tempdir", str(stores))
        with pytest.raises(pytest.fail.Exception) as caught:
            run_ranks(body, str(pids), world_size=2)
        assert list(stores.glob("ranks-*")) == []
        written = [int(pid) for file in pids.iterdir() for pid in file.read_text().split()]
        assert len(written) == 4
        assert not [pid for pid in written if _lives(pid)]
        return str(caught.value)

    return run


@pytest.mark.parametrize(
    "body, words",
    [
        (_fail, ["rank 1 of 2 failed", "ArithmeticError: seven is not eight", "in _fail"]),
        (_die, ["rank 1 of 2 died without a report", "exit code 17"]),
        (_die_slowly, ["rank 1 of 2 died without a report", "exit code 17"]),
        (_return_what_cannot_travel, ["rank 1 of 2 failed", "pickle"]),
    ],
)
def test_trouble_is_named_and_nothing_is_left_behind(trouble, body, words):
    message = trouble(body)
    for word in words:
        assert word in message


def test_a_hang_is_named_with_its_place(trouble, monkeypatch):
    """The limit is over, as far as the harness can see, as soon as only the rank that hangs is left."""
    monkeypatch.setattr(harness, "wait", lambda pipes, _: wait(pipes) if len(pipes) == 2 else [])
    message = trouble(_hang)
    assert f"no report within {LIMIT:g} s from rank(s) 1 of 2" in message and "in _sleepy_corner" in message, message


def _lives(pid):
    """Whether a process still runs; one that was killed may need a moment to go."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
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


def _abort_at_the_end():
    if dist.get_rank() == 1:
        multiprocessing.util.Finalize(None, os.abort, exitpriority=1)


def test_a_rank_that_aborts_while_it_ends_fails_the_test():
    with pytest.raises(pytest.fail.Exception, match="rank 1 of 2 ended with exit code -6 after it had passed"):
        run_ranks(_abort_at_the_end, world_size=2)


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
