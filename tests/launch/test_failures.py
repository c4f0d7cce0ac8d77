"""What users can mend is said once, in few lines, whatever the number of ranks; bugs keep their tracebacks."""

import io
import os
import signal
import sys
import time
from datetime import timedelta

import pytest

from hf_zero.config import values
from hf_zero.errors import ZeroCheckpointError, ZeroConfigError, ZeroRuntimeError
from hf_zero.launcher import failures
from tests.support import launches
from tests.support.harness import LIMIT
from tests.support.launches import HF_ZERO, TORCHRUN


SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
import hf_zero

what, rank = sys.argv[1], os.environ["RANK"]
model = torch.nn.Linear(2, 2)
if what != "early":
    dist.init_process_group("gloo")
if what in ("alike", "early") or (what == "alone" and rank == "1"):
    hf_zero.ZeroConfig.from_any({"zero_stge": 3})
if what == "optimizer":
    hf_zero.shard(model, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), {"zero_stage": 3})
if what == "bug":
    int("seven")
if what == "sleep":
    open(f"asleep_{rank}", "w").close()
    time.sleep(3600)
dist.barrier()
"""
KEY = "unknown key 'zero_stge'; did you mean 'zero_stage'?"


@pytest.fixture
def launch(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(launcher, what, **variables):
        ranks = "--nproc_per_node" if launcher is TORCHRUN else "--num_processes"
        outputs, statuses = launches.run((*launcher, ranks, 2, script, what), folder=tmp_path, **variables)
        return outputs[0], statuses[0]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("what", ["alike", pytest.param("early", marks=pytest.mark.exhaustive)])
def test_what_all_ranks_fail_with_is_printed_once(launch, what):
    output, status = launch(HF_ZERO, what)
    assert status == 2
    assert output.count(f"hf_zero: the configuration dict: {KEY}") == 1, output
    assert "script.py:12: hf_zero.ZeroConfig.from_any" in output
    assert "Traceback" not in output, output
    assert "exit status 2" in output


@pytest.mark.slow
def test_under_torchrun_too(launch):
    output, status = launch(TORCHRUN, "optimizer")
    assert status == 1 and "exitcode  : 2 " in output  # torchrun itself ends with 1
    assert output.count("hf_zero: SGD group 0 holds a tensor") == 1, output
    assert "[rank" not in output, "a traceback of a rank"


@pytest.mark.slow
def test_a_rank_that_fails_alone_is_heard(launch):
    output, status = launch(HF_ZERO, "alone")
    assert status == 2  # of the rank that failed first, or of the one that lost it
    assert output.count(f"hf_zero: the configuration dict: {KEY}") == 1, output


@pytest.mark.slow
@pytest.mark.exhaustive
def test_bugs_keep_the_traceback_of_every_rank(launch):
    output, status = launch(HF_ZERO, "bug")
    assert status == 1
    for rank in range(2):
        assert f"[rank{rank}]: ValueError: invalid literal" in output, output


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_variable_brings_the_tracebacks_back(launch):
    output, status = launch(HF_ZERO, "alike", HF_ZERO_TRACEBACK="1")
    assert status == 2
    for rank in range(2):
        assert f"[rank{rank}]: Traceback" in output, output


@pytest.mark.slow
def test_an_interrupted_run_says_so_in_two_lines(launch, tmp_path):
    process = launches.start(*HF_ZERO, "--num_processes", 2, "script.py", "sleep", folder=tmp_path)
    try:
        deadline = time.monotonic() + LIMIT
        while len(list(tmp_path.glob("asleep_*"))) < 2:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)  # torchrun sends it on to the ranks
        output, _ = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT
    assert output.count("hf_zero: interrupted\n") == 1, output
    assert "hf_zero: ended by SIGINT" in output
    assert "Traceback" not in output, output


# -- which errors ---------------------------------------------------------------------------------------------------


def _caught(fn):
    try:
        fn()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def _raise(error, cause=None):
    raise error from cause


@pytest.mark.parametrize(
    "error, expected",
    [
        (_caught(lambda: _raise(ZeroConfigError("wrong"))), True),
        (_caught(lambda: _raise(ZeroRuntimeError("lost"), RuntimeError("connection closed"))), True),
        (_caught(lambda: _raise(ZeroCheckpointError("rank 1 failed: 'weight'"), KeyError("weight"))), False),
        (_caught(lambda: values.to_bool("perhaps")), True),  # a ValueError that hf_zero raises
        (_caught(lambda: values.to_int("1__0")), False),  # one of int(), called by hf_zero
        (_caught(lambda: failures.is_users_file(7)), False),
        (_caught(lambda: _raise(ValueError("the user's own"))), False),
        (_caught(lambda: int("seven")), False),
    ],
)
def test_only_messages_that_say_everything_go_without_a_traceback(error, expected):
    assert failures.is_for_people(error, error.__traceback__) is expected


# -- which rank -----------------------------------------------------------------------------------------------------


class Store:
    """As torch's, for one process; `wait` fails where nobody has set the key."""

    def __init__(self):
        self.values = {}

    def add(self, key, amount):
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]

    def set(self, key, value):
        self.values[key] = value

    def wait(self, keys, timeout):
        assert isinstance(timeout, timedelta)
        if not all(key in self.values for key in keys):
            raise RuntimeError("timed out")


@pytest.fixture
def printed(monkeypatch):
    monkeypatch.setattr(sys, "__stderr__", io.StringIO())
    return sys.__stderr__.getvalue


def test_each_message_is_printed_by_the_first_rank_that_has_it(monkeypatch, printed):
    store = Store()
    monkeypatch.setattr(failures, "_store", lambda: store)
    for text in ("a\n", "b\n", "a\n"):
        failures._print_once(text, topic=text)
    assert printed() == "a\nb\n"


def test_a_message_whose_rank_died_before_printing_is_not_lost(monkeypatch, printed):
    store = Store()
    monkeypatch.setattr(failures, "_store", lambda: store)
    monkeypatch.setattr(store, "set", lambda key, value: None)
    for _ in range(2):
        failures._print_once("a\n", topic="a")
    assert printed() == "a\na\n"


def test_without_a_store_every_rank_prints(monkeypatch, printed):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    failures._print_once("a\n", topic="a")
    assert printed() == "a\n"


def test_only_ranks_are_taken_over(monkeypatch):
    before = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", before)
    monkeypatch.setattr(failures, "_previous", None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    failures.install()
    assert sys.excepthook is before
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "0")
    failures.install()
    assert sys.excepthook is failures._report and failures._previous is before


def test_a_hook_that_was_put_before_ours_is_not_asked_to_call_itself(monkeypatch):
    """torch puts one there when the process group is made; arguments and trainers of later stages install again."""
    called = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: called.append(error[0]))
    monkeypatch.setattr(failures, "_previous", None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    failures.install()
    ours = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", lambda *error: ours(*error))
    failures.install()
    sys.excepthook(KeyError, KeyError("x"), None)
    assert called == [KeyError]
