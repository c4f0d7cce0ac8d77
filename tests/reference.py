"""Two training loops over the same micro-batches: DistributedDataParallel as the measure, and hf_zero.

Both return a `Trace`. Its norms are taken before clipping; the DDP loop computes them in double precision, because
the stock fp32 norm is itself inexact on CPU.
"""

import contextlib
import dataclasses
import functools
import math

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hf_zero


SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
# Where a true gradient is zero (a bias before a softmax), Adam with a tiny eps turns rounding noise into full steps.
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01, eps=1e-4)
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a loop does: optimizer steps of `accumulation` micro-batches each; a ragged last one has one fewer."""

    steps: int = 3
    accumulation: int = 1
    clip: float | None = None
    ragged: bool = False

    def windows(self):
        """The numbers of the micro-batches of each optimizer step."""
        first = 0
        for step in range(self.steps):
            size = self.accumulation - (self.ragged and step == self.steps - 1)
            yield range(first, first + size)
            first += size


@dataclasses.dataclass(kw_only=True)
class Trace:
    """What one rank saw: the loss of each micro-batch, the norm of each step, and the weights at the end."""

    losses: list = dataclasses.field(default_factory=list)
    norms: list = dataclasses.field(default_factory=list)
    weights: dict = dataclasses.field(default_factory=dict)


def model_loss(model, batch):
    return model(**batch).loss


def train_ddp(model, make_optimizer, batches, plan=None, *, loss_of=model_loss, before_step=None, **ddp_options):
    """Train under stock DDP; `batches(n)` gives this rank's n-th micro-batch, `before_step(n, model)` may meddle."""
    plan = plan or Plan()
    ddp = DistributedDataParallel(model, **ddp_options)
    optimizer = make_optimizer(model.parameters())
    trace = Trace()
    for step, window in enumerate(plan.windows()):
        if before_step is not None:
            before_step(step, model)
        for number in window:
            with ddp.no_sync() if number != window[-1] else contextlib.nullcontext():
                loss = loss_of(ddp, batches(number))
                (loss / len(window)).backward()
            trace.losses.append(loss.item())
        trace.norms.append(double_norm(model))
        if plan.clip is not None:
            clip_by_norm(model, trace.norms[-1], plan.clip)
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return trace


def train_zero(model, make_optimizer, batches, plan=None, *, config, loss_of=model_loss, before_step=None):
    """Train by hf_zero with the same arguments."""
    plan = plan or Plan()
    optimizer = make_optimizer(model.parameters())
    engine = hf_zero.shard(model, optimizer, config)
    trace = Trace()
    for step, window in enumerate(plan.windows()):
        if before_step is not None:
            before_step(step, model)
        for number in window:
            with engine.no_sync() if number != window[-1] else contextlib.nullcontext():
                loss = loss_of(model, batches(number))
                engine.backward(loss / len(window))
            trace.losses.append(loss.item())
        trace.norms.append(float(engine.clip_grad_norm_(math.inf if plan.clip is None else plan.clip)))
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = whole_weights(model)
    return trace


def whole_weights(model):
    with hf_zero.gathered_parameters(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def double_norm(model):
    """The norm of the gradients in double precision."""
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return math.sqrt(sum(squares))


def clip_by_norm(model, norm, limit):
    """Scale the gradients as `torch.nn.utils.clip_grad_norm_` does, but by the exact norm."""
    scale = min(1.0, limit / (norm + 1e-6))
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(scale)


def compare(ours, stock, what, *, exact=False, tolerance=1e-6):
    """Fail, naming `what`, unless two traces agree: bit by bit, or losses and weights to a tolerance."""
    assert ours.weights.keys() == stock.weights.keys(), f"{what}: {ours.weights.keys() ^ stock.weights.keys()}"
    for number, (mine, theirs) in enumerate(zip(ours.losses, stock.losses, strict=True)):
        near = mine == theirs if exact else abs(mine - theirs) <= tolerance * max(1.0, abs(theirs))
        assert near, f"{what}: loss of micro-batch {number} is {mine!r}, not {theirs!r}"
    for step, (mine, theirs) in enumerate(zip(ours.norms, stock.norms, strict=True)):
        assert abs(mine - theirs) <= 1e-6 * theirs, f"{what}: gradient norm of step {step} is {mine!r}, not {theirs!r}"
    for name, weight in stock.weights.items():
        mine = ours.weights[name]
        assert mine.dtype == weight.dtype and mine.shape == weight.shape, (
            f"{what}: {name} is {mine.dtype} {mine.shape}"
        )
        apart = (mine.double() - weight.double()).abs().max().item()
        near = torch.equal(mine, weight) if exact else apart <= tolerance
        assert near, f"{what}: {name} differs by {apart:.3e}"


def check_ranks_agree(trace, what):
    """Fail unless every rank ends with the same weights."""
    for name, weight in trace.weights.items():
        first = weight.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, weight), f"{what}: {name} differs between ranks"
