"""Runs a test body on fresh gloo ranks that are forked from one warm server, and reports the first rank that fails.

A rank that is started from nothing spends several seconds on imports. Here one fork server imports the slow modules
once per test session, and each test forks its ranks from it in about a tenth of a second. Every test therefore has
processes of its own, and nothing that a test leaves in a module can reach the next one.

    @distributed(world_size=2)
    def test_sum():
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 2, value

    def test_compare():
        stock, ours = run_ranks(train, "ddp", world_size=2), run_ranks(train, "zero3", world_size=2)
        assert stock[0] == ours[0]

Test bodies and their arguments travel to the ranks by name and by pickle, so a body stands at the top level of a
module under `tests/`, and pytest is started from the root of the repository. pytest does not rewrite `assert` inside
the ranks: give assertions a message or use `torch.testing.assert_close`.
"""

import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import pytest


PRELOAD = (
    "pytest",
    "torch.distributed",
    "transformers.trainer",
    "accelerate",
    "hf_zero.core.engine",
    "hf_zero.trl",
    "tests.support.harness",
    "tests.support.zoo",
)
LIMIT = 600.0  # seconds; whatever a test waits for comes long before, on a busy machine too, unless something hangs
GOODBYE = 60.0  # seconds that ranks get to leave on their own after every one of them has reported


def distributed(world_size=2, timeout=LIMIT):
    """Make a pytest function run on `world_size` ranks; fixtures and parameters work as usual if they pickle."""

    def decorate(test):
        @functools.wraps(test)
        def wrapper(*args, **kwargs):
            _launch(_name_of(test), args, kwargs, world_size, timeout)

        return wrapper

    return decorate


def run_ranks(fn, *args, world_size=2, timeout=LIMIT, **kwargs):
    """Call `fn(*args, **kwargs)` on every rank and return what the ranks returned, in rank order."""
    return _launch(_name_of(fn), args, kwargs, world_size, timeout)


def _name_of(fn):
    if "<" in fn.__qualname__:
        raise ValueError(
            f"{fn.__module__}.{fn.__qualname__} cannot be found by name in another process: "
            "move it to the top level of its module."
        )
    return fn.__module__, fn.__qualname__


@functools.cache
def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


# ----------------------------------------- the parent's side


def _launch(name, args, kwargs, world_size, timeout):
    folder = tempfile.mkdtemp(prefix="ranks-")
    pipes, processes = [], []
    try:
        for rank in range(world_size):
            ours, theirs = _context().Pipe()
            job = (rank, world_size, folder, timeout, dict(os.environ), name, args, kwargs)
            process = _context().Process(target=_rank_main, args=(theirs, pickle.dumps(job)))
            process.start()
            # The rank must hold the only other end, so that its death reads as the end of the pipe.
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        results = _collect(name, pipes, processes, folder, timeout)
        _say_goodbye(name, pipes, processes)
        return results
    finally:
        _clean_up(pipes, processes)
        shutil.rmtree(folder, ignore_errors=True)


def _collect(name, pipes, processes, folder, timeout):
    """Wait until every rank has returned a value; the first failure, death or the time limit fails the test."""
    world_size, results, errors, deadline = len(pipes), {}, {}, time.monotonic() + timeout
    while len(results) + len(errors) < world_size:
        silent = [rank for rank in range(world_size) if rank not in results and rank not in errors]
        ready = wait([pipes[rank] for rank in silent], max(0.0, deadline - time.monotonic()))
        if not ready and not errors:
            _fail_silent(name, silent, processes, folder, timeout)
        # When one rank fails, its peers fail a moment later with a broken connection: look at all that have arrived
        # and blame the earliest. A death comes before the errors that it causes.
        for rank in silent:
            if pipes[rank] not in ready:
                continue
            try:
                moment, failure, payload = pickle.loads(pipes[rank].recv_bytes())
            except (EOFError, ConnectionError):
                moment, failure, payload = 0.0, None, None
            if payload is not None:
                results[rank] = pickle.loads(payload)
            else:
                errors[rank] = moment, failure
        if errors and (not ready or not all(_blames_a_peer(failure) for _, failure in errors.values())):
            break
        if errors:  # a rank that dies closes its connections first: the one to blame is on its way
            deadline = min(deadline, time.monotonic() + GOODBYE)
    if errors:
        rank = min(errors, key=lambda rank: errors[rank][0])
        _fail_rank(name, rank, errors[rank][1], processes)
    return [results[rank] for rank in range(world_size)]


def _blames_a_peer(failure):
    return failure is not None and "peer" in failure.strip().splitlines()[-1]


def _fail_rank(name, rank, failure, processes):
    where = f"{'.'.join(name)}: rank {rank} of {len(processes)}"
    if failure is None:
        processes[rank].join(GOODBYE)
        pytest.fail(f"{where} died without a report (exit code {processes[rank].exitcode})", pytrace=False)
    pytest.fail(f"{where} failed\n\n{failure}", pytrace=False)


def _fail_silent(name, silent, processes, folder, timeout):
    """Name the ranks that did not report in time, and show where each of them stands."""
    for rank in silent:
        with suppress(ProcessLookupError):
            os.kill(processes[rank].pid, signal.SIGUSR1)
    stacks = [f"rank {rank} stands at:\n{_written(_stack_file(folder, rank))}" for rank in silent]
    numbers = ", ".join(map(str, silent))
    head = f"{'.'.join(name)}: no report within {timeout:g} s from rank(s) {numbers} of {len(processes)}"
    pytest.fail("\n\n".join([head, *stacks]), pytrace=False)


def _written(file):
    """The text of a file that a signal handler is writing; what there is where it does not come."""
    text, deadline = "", time.monotonic() + GOODBYE
    while time.monotonic() < deadline:
        time.sleep(0.3)
        before, text = text, file.read_text()
        if text and text == before:
            break
    return text


def _say_goodbye(name, pipes, processes):
    """Let the ranks leave in order: none closes its connections before all have finished their collectives.

    What a test leaves behind may hang or abort a process that ends; that fails the test.
    """
    for pipe in pipes:
        with suppress(OSError):
            pipe.send_bytes(b"leave")
    deadline = time.monotonic() + GOODBYE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for rank, process in enumerate(processes):
        if process.exitcode != 0:
            how = "did not end" if process.exitcode is None else f"ended with exit code {process.exitcode}"
            where = f"{'.'.join(name)}: rank {rank} of {len(processes)}"
            pytest.fail(f"{where} {how} after it had passed", pytrace=False)


def _clean_up(pipes, processes):
    """Kill what is left of the ranks and of the processes that they started (each rank leads a process group)."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    for process in processes:
        process.join()
        process.close()
    for pipe in pipes:
        pipe.close()


# ------------------------------------------- the rank's side


def _stack_file(folder, rank):
    return Path(folder) / f"stack_{rank}.txt"


def _rank_main(pipe, job):
    os.setpgid(0, 0)
    rank, world_size, folder, timeout, environment, name, args, kwargs = pickle.loads(job)
    with open(_stack_file(folder, rank), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        # If the parent is killed, nobody is left to end this rank.
        faulthandler.dump_traceback_later(timeout + 2 * GOODBYE, exit=True, file=stack)
        try:
            _set_up(rank, world_size, folder, timeout, environment)
            report = (time.monotonic(), None, pickle.dumps(_find(name)(*args, **kwargs)))
        except BaseException:
            report = (time.monotonic(), traceback.format_exc(), None)
        sys.stdout.flush()
        sys.stderr.flush()
        with suppress(OSError, EOFError):
            pipe.send_bytes(pickle.dumps(report))
            pipe.recv_bytes()
        _tear_down()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGUSR1)


def _set_up(rank, world_size, folder, timeout, environment):
    import numpy as np
    import torch
    import torch.distributed as dist

    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",  # never bound: the ranks meet in a file
        ACCELERATE_USE_CPU="true",
    )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    # The time limit of the test speaks first; this one only ends a rank that nobody waits for.
    limit = timedelta(seconds=timeout + GOODBYE)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=limit)


def _tear_down():
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _find(name):
    module, path = name
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return inspect.unwrap(found)
