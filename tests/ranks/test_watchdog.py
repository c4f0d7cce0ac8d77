"""Ranks that diverge are named and ended; values of different units never mix; a busy rank is only waited for."""

import logging
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.comm import watchdog
from hf_zero.comm.watchdog import Watchdog
from hf_zero.errors import ZeroRuntimeError
from tests.support.harness import LIMIT, distributed, run_ranks


def prepared(**config):
    """A model whose ranks compare soon where they are, and then wait for each other's answers as long as it takes."""
    watchdog._ANSWER_S = LIMIT
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
    model.forward = lambda x, order: _run(model, x, order)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hf_zero.shard(model, optimizer, {"zero_stage": 3, "hang_timeout_s": 1.0, **config})


def _run(model, x, order):
    for index in order:
        x = model[index](x)
    return x


def end_with_report(folder, engine, ranks):
    """Have this rank write its report in place of printing it, and end when all of `ranks` have written theirs."""

    def note(report):
        mine = Path(folder) / f"report_{dist.get_rank()}"
        mine.with_suffix(".part").write_text(report)
        mine.with_suffix(".part").rename(mine)
        while not all((Path(folder) / f"report_{rank}").exists() for rank in ranks):
            time.sleep(0.05)
        os._exit(7)

    engine.comm.watchdog._abort = note


def diverge(folder):
    model, engine = prepared()
    rank = dist.get_rank()
    end_with_report(folder, engine, ranks=(0, 1))
    model(torch.ones(1, 8), [0, 1] if rank == 0 else [0, 2])


def test_ranks_that_call_different_modules_are_named_on_every_rank(tmp_path):
    with pytest.raises(pytest.fail.Exception, match="died without a report|exit"):
        run_ranks(diverge, str(tmp_path), world_size=2)
    for rank in range(2):
        report = (tmp_path / f"report_{rank}").read_text()
        assert "rank 0: waits for all-gather of 1" in report, report
        assert "rank 1: waits for all-gather of 2" in report, report
        assert "same modules" in report


class Branching(torch.nn.Module):
    """A layer whose ranks take different ways."""

    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return (self.left if dist.get_rank() == 0 else self.right)(x)


def branch(folder, unit_size):
    watchdog._ANSWER_S = LIMIT
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Branching() for _ in range(2)))
    config = {"zero_stage": 3, "hang_timeout_s": 1.0, "unit_size": unit_size}
    engine = hf_zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    end_with_report(folder, engine, ranks=(0, 1))
    engine.backward(model(torch.ones(1, 8)).sum())


def test_a_branch_inside_a_layer_that_is_gathered_in_parts_is_named(tmp_path):
    run_ranks(branch, str(tmp_path), 0, world_size=2)  # a whole layer is the same on all ranks, whatever they call
    with pytest.raises(pytest.fail.Exception, match="died without a report|exit"):
        run_ranks(branch, str(tmp_path), 80, world_size=2)
    for rank in range(2):
        report = (tmp_path / f"report_{rank}").read_text()
        assert "rank 0: waits for all-gather of 0.left" in report, report
        assert "rank 1: waits for all-gather of 0.right" in report, report
        assert "with unit_size, inside of layers too" in report


def wait_for_a_barrier(folder):
    model, engine = prepared()
    end_with_report(folder, engine, ranks=(0,))
    if dist.get_rank() == 0:
        model(torch.ones(1, 8), [0])
    else:
        dist.barrier()


def test_a_rank_in_a_collective_of_its_own_is_named(tmp_path):
    with pytest.raises(pytest.fail.Exception, match="died without a report|exit"):
        run_ranks(wait_for_a_barrier, str(tmp_path), world_size=2)
    report = (tmp_path / "report_0").read_text()
    assert "rank 0: waits for all-gather of 0" in report, report
    assert "waits for a collective of its own at" in report and "in wait_for_a_barrier" in report, report


@distributed(world_size=2)
def test_a_slow_rank_is_waited_for_and_named(tmp_path):
    """Rank 1 does not come before rank 0 has warned of it."""

    def note(record):
        line = record.getMessage()
        if "rank 0: waits for all-gather of 0" in line and f"{Path(__file__).name}" in line:
            (tmp_path / "warned").touch()

    handler = logging.Handler()
    handler.emit = note
    if dist.get_rank() == 0:
        logging.getLogger("hf_zero.comm.watchdog").addHandler(handler)
    model, engine = prepared()
    while dist.get_rank() == 1 and not (tmp_path / "warned").exists():
        time.sleep(0.05)
    out = model(torch.ones(1, 8), [0, 1, 2])
    assert out.isfinite().all()


@distributed(world_size=2)
def test_modules_in_another_order_on_each_rank_still_get_their_own_values():
    model, engine = prepared(overlap_comm=False)
    expected = [layer.weight.detach().clone() for layer in model]
    engine.schedule.reshard_all()
    first, second = (0, 1) if dist.get_rank() == 0 else (1, 0)
    units = {unit.name: unit for unit in engine.units}
    units[str(first)].begin_unshard()
    units[str(second)].begin_unshard()
    for index in (0, 1):
        assert torch.equal(model[index].weight, expected[index])


def test_a_lost_peer_is_said_to_be_lost():
    class NoStore:
        def check(self, keys):
            return False

    def fail():
        raise RuntimeError("Connection closed by peer")

    monitor = Watchdog(NoStore(), name="x", rank=0, world_size=2, timeout_s=60.0)
    with pytest.raises(
        ZeroRuntimeError, match="rank 0 lost its peers in all-gather of 0: Connection.*first traceback"
    ):
        monitor.wait("all-gather of 0", fail)
    monitor.stop()


def test_a_monitor_stops_while_it_waits_for_an_answer():
    """At the end of a process: a thread that came back from the store later would abort it."""
    comparing = threading.Event()

    class SilentStore:
        def check(self, keys):
            asked = keys[0].endswith("/asked")
            if not asked:
                comparing.set()
            return asked

        def set(self, key, value):
            pass

    monitor = Watchdog(SilentStore(), name="x", rank=0, world_size=2, timeout_s=1.0)
    assert comparing.wait(LIMIT)
    monitor.stop()
    assert not monitor._thread.is_alive()


def test_no_thread_is_in_the_store_when_a_monitor_has_stopped():
    asked, inside = threading.Event(), []

    class SlowStore:
        def check(self, keys):
            inside.append("in")
            asked.set()
            time.sleep(0.3)
            inside.append("out")
            return False

    monitor = Watchdog(SlowStore(), name="x", rank=0, world_size=2, timeout_s=1.0)
    assert asked.wait(LIMIT)
    monitor.stop()
    assert inside.count("in") == inside.count("out"), inside
