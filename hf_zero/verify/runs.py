"""Whole runs beside the audit: stock DistributedDataParallel, one process, and a run that is saved and resumed."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_zero.comm.communicator import Communicator
from hf_zero.errors import ZeroLaunchError
from hf_zero.verify.audit import Audit
from hf_zero.verify.measures import KERNEL, ROUNDING, Measure
from hf_zero.verify.probes import set_random_state
from hf_zero.verify.systems import Named, ZeroSystem
from hf_zero.verify.task import Task


_DRIFT = 4 * KERNEL  # of a loss, for each step: roundings grow as training goes on


@dataclass(kw_only=True)
class Trace:
    """The losses of a run's micro-batches (of one rank) and its weights at the end."""

    losses: list[float]
    weights: Named


def train_ddp(task: Task, audit: Audit, comm: Communicator, precision: str) -> Trace:
    """Train with the stock class, from the first weights on, with the random numbers of the audited run."""
    model = task.build()
    optimizer = task.make_optimizer(model)
    device = next(model.parameters()).device
    wrapped = DistributedDataParallel(model, find_unused_parameters=audit.leaves_out) if comm.shares else model
    losses, states = [], iter(audit.random)
    for step in range(task.steps):
        weights = task.weights(comm.world_size, step)[comm.rank]
        for number, weight in enumerate(weights):
            set_random_state(next(states), device)
            wrapped.require_backward_grad_sync = number == len(weights) - 1
            with autocast(device, precision):
                loss = task.loss(wrapped, task.batch(comm.rank, step, number))
            (loss * weight).backward()
            losses.append(loss.item())
        _clip_and_step(model, optimizer, audit.limit)
    return Trace(losses=losses, weights=_weights(model))


def train_alone(
    task: Task, states: Sequence[Sequence[tuple[Tensor, ...]]], limit: float, world_size: int, precision: str
) -> Trace:
    """Train in this process alone on the micro-batches of all ranks; `states` are their random numbers, by rank."""
    model = task.build()
    optimizer = task.make_optimizer(model)
    device = next(model.parameters()).device
    losses = []
    for step in range(task.steps):
        for rank, weights in enumerate(task.weights(world_size, step)):
            for number, weight in enumerate(weights):
                set_random_state(states[rank][step * task.accumulation + number], device)
                with autocast(device, precision):
                    loss = task.loss(model, task.batch(rank, step, number))
                (loss * weight / world_size).backward()
                losses += [loss.item()] if rank == 0 else []
        _clip_and_step(model, optimizer, limit)
    return Trace(losses=losses, weights=_weights(model))


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """What stock classes compute in: fp32 weights, cast in each operation."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


def _clip_and_step(model: nn.Module, optimizer: torch.optim.Optimizer, limit: float) -> None:
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
    for grad in grads:
        grad.mul_(min(1.0, limit / (norm + 1e-6)))
    optimizer.step()
    optimizer.zero_grad()


def _weights(model: nn.Module) -> Named:
    return {name: param.detach().float().clone() for name, param in model.named_parameters()}


def compare_runs(promise: str, audit: Audit, mine: Named, run: Trace, rates: float, precision: str) -> Measure:
    """The audited run beside another one; `rates` is the sum of the learning rates of its steps.

    Where a gradient is nothing but rounding, Adam makes a whole step of it, in either direction: that bounds weights.
    """
    reasons = ["order of sums"]
    reasons += ["what is rounded to bf16, here weights and here and there activations"] * (precision == "bf16")
    reasons += ["what ranks round when they send"] * bool(audit.wire) + ["the codec's error"] * bool(audit.codec)
    measure = Measure(promise=promise, explained=f"{', '.join(reasons)}; it grows from step to step")
    rounding = max(_DRIFT, ROUNDING[precision]) + audit.wire + audit.codec
    per_step = max(1, len(run.losses) // max(1, len(audit.norms)))
    for number, (loss, right) in enumerate(zip(audit.losses, run.losses, strict=True)):
        bound = rounding * (1 + number // per_step) * max(1.0, abs(right))
        measure.numbers(loss, right, bound, f"loss of micro-batch {number}")
    measure.tensors(mine, run.weights, dict.fromkeys(run.weights, 2 * rates))
    return measure


def resume(
    make: Callable[[], ZeroSystem], system: ZeroSystem, task: Task, limit: float, comm: Communicator
) -> Measure:
    """Save, go on for one step; and again in a new system that has loaded: the same bits."""
    measure = Measure(promise="resume", explained="bitwise: the same state goes through the same arithmetic")
    folder = comm.all_gather_object(tempfile.mkdtemp(prefix="hf-zero-verify-"))[0]
    try:
        system.save(f"{folder}/checkpoint")
        kept = _next_step(system, task, limit, comm)
        system.engine.wait_for_checkpoint()  # with `async_save` it was written under that step
        system.engine.undo()
        resumed = make()
        torch.manual_seed(task.steps + 1)  # nothing may come from the generators of this process
        resumed.load(f"{folder}/checkpoint")
        again = _next_step(resumed, task, limit, comm)
        resumed.engine.undo()
    finally:
        comm.barrier()
        shutil.rmtree(folder, ignore_errors=True)
    for number, (loss, right) in enumerate(zip(again.losses, kept.losses, strict=True)):
        measure.numbers(loss, right, 0.0, f"loss of micro-batch {number}")
    measure.tensors(again.weights, kept.weights, {})
    return measure


def _next_step(system: ZeroSystem, task: Task, limit: float, comm: Communicator) -> Trace:
    weights = task.weights(comm.world_size, task.steps)[comm.rank]
    losses = [
        system.micro_step(task.batch(comm.rank, task.steps, number), weight, number == len(weights) - 1)
        for number, weight in enumerate(weights)
    ]
    system.clip(limit)
    system.step()
    return Trace(losses=losses, weights=system.weights())


def check_room(numel: int, device: torch.device, comm: Communicator) -> None:
    """Raise ZeroLaunchError where a model of `numel` elements does not fit on each rank, twice; a collective.

    In fp32: weights, gradients and Adam's moments of the reference, what the sums and sizes of gradients take, and as
    much again at worst for the system beside it.
    """
    needed = 40 * numel
    free = psutil.virtual_memory().available // comm.world_size
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    free = min(comm.all_gather_object(free))
    if needed > free:
        raise ZeroLaunchError(
            f"the reference holds the whole model on each rank: that needs {needed / 1e9:.1f} GB of it, and "
            f"{free / 1e9:.1f} GB are free. Give --model a config.json of the same architecture with fewer layers"
        )
