"""Two training loops over the same micro-batches, stock and hf_zero, and the comparison of what they did.

The stock loop is DistributedDataParallel, or (where DDP itself cannot run a shape) a plain model whose gradients are
averaged over ranks before each step, which is the same arithmetic. Its norms are computed in double precision,
because the stock fp32 norm is itself inexact on CPU.
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
STAGES = (0, 1, 2, 3)


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

    def exact(self, stage):
        """Whether sums have one order only: two ranks, no clipping, micro-batches added before ranks."""
        return dist.get_world_size() == 2 and self.clip is None and (self.accumulation == 1 or stage < 2)


@dataclasses.dataclass(kw_only=True)
class Trace:
    """What one rank saw: the loss of each micro-batch, the norm before each clipping, the weights at the end."""

    losses: list = dataclasses.field(default_factory=list)
    norms: list = dataclasses.field(default_factory=list)
    weights: dict = dataclasses.field(default_factory=dict)


def plain_micro(model, batch, backward):
    """One micro-batch of a Hugging Face model; other shapes bring a function like this one."""
    loss = model(**batch).loss
    backward(loss)
    return loss


def no_change(step, model):
    """What happens before a step, where nothing does."""


def _backward_of_mean(backward, size, loss, **options):
    backward(loss / size, **options)


def train_stock(model, make_optimizer, batches, plan, *, ddp=None, micro=plain_micro, before_step=no_change):
    """Train without hf_zero; `ddp` holds options of DistributedDataParallel, None means averaging by hand."""
    wrapped = model if ddp is None else DistributedDataParallel(model, **ddp)
    optimizer = make_optimizer(model.parameters())
    trace = Trace()
    for step, window in enumerate(plan.windows()):
        before_step(step, model)
        backward = functools.partial(_backward_of_mean, torch.Tensor.backward, len(window))
        for number in window:
            local = ddp is not None and number != window[-1]
            with wrapped.no_sync() if local else contextlib.nullcontext():
                loss = micro(wrapped, batches(number), backward)
            trace.losses.append(loss.item())
        if ddp is None:
            average_gradients(model)
        trace.norms.append(double_norm(model))
        if plan.clip is not None:
            clip_by_norm(model, trace.norms[-1], plan.clip)
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = {name: _copy_of(param) for name, param in model.named_parameters()}
    return trace


def train_zero(model, make_optimizer, batches, plan, *, config, micro=plain_micro, before_step=no_change):
    """Train by hf_zero with the same arguments."""
    optimizer = make_optimizer(model.parameters())
    engine = hf_zero.shard(model, optimizer, config)
    trace = Trace()
    for step, window in enumerate(plan.windows()):
        before_step(step, model)
        backward = functools.partial(_backward_of_mean, engine.backward, len(window))
        for number in window:
            with engine.no_sync() if number != window[-1] else contextlib.nullcontext():
                loss = micro(model, batches(number), backward)
            trace.losses.append(loss.item())
        trace.norms.append(float(engine.clip_grad_norm_(math.inf if plan.clip is None else plan.clip)))
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = whole_weights(model)
    return trace


def whole_weights(model):
    with hf_zero.gathered_parameters(model):
        return {name: _copy_of(param) for name, param in model.named_parameters()}


def _copy_of(param):
    """Its values, also where it is made of other tensors."""
    return param.detach().dequantize().clone() if hasattr(param, "__tensor_flatten__") else param.detach().clone()


def average_gradients(model):
    """The mean over ranks; a parameter that only some ranks used counts as zero on the others."""
    for p in model.parameters():
        used = torch.tensor(float(p.grad is not None))
        dist.all_reduce(used)
        if used > 0:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def double_norm(model):
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return math.sqrt(sum(squares))


def clip_by_norm(model, norm, limit):
    """Scale the gradients as `torch.nn.utils.clip_grad_norm_` does, but by the exact norm."""
    scale = min(1.0, limit / (norm + 1e-6))
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(scale)


def compare(ours, stock, what, *, exact=False, tolerance=1e-6, norm_tolerance=1e-6):
    """Fail, naming `what`, unless two traces agree; return the largest differences of losses, norms and weights."""
    worst = {"loss": 0.0, "norm": 0.0, "weight": 0.0}
    for number, (mine, theirs) in enumerate(zip(ours.losses, stock.losses, strict=True)):
        worst["loss"] = max(worst["loss"], abs(mine - theirs))
        near = mine == theirs if exact else abs(mine - theirs) <= tolerance * max(1.0, abs(theirs))
        assert near, f"{what}: loss of micro-batch {number} is {mine!r}, not {theirs!r}"
    for step, (mine, theirs) in enumerate(zip(ours.norms, stock.norms, strict=True)):
        worst["norm"] = max(worst["norm"], abs(mine - theirs) / max(theirs, 1e-12))
        near = abs(mine - theirs) <= norm_tolerance * theirs
        assert near, f"{what}: gradient norm of step {step} is {mine!r}, not {theirs!r}"
    assert ours.weights.keys() == stock.weights.keys(), f"{what}: {ours.weights.keys() ^ stock.weights.keys()}"
    for name, weight in stock.weights.items():
        mine = ours.weights[name]
        kinds = (mine.dtype, mine.shape), (weight.dtype, weight.shape)
        assert kinds[0] == kinds[1], f"{what}: {name} is {kinds[0]}, not {kinds[1]}"
        apart = (mine.double() - weight.double()).abs().max().item() if weight.numel() else 0.0
        worst["weight"] = max(worst["weight"], apart)
        near = torch.equal(mine, weight) if exact else apart <= tolerance
        assert near, f"{what}: {name} differs by {apart:.3e}"
    return worst


def check_ranks_agree(weights, what):
    """Fail unless every rank ends with the same weights."""
    mine = torch.cat([weight.double().reshape(-1) for weight in weights.values()])
    first = mine.clone()
    dist.broadcast(first, 0)
    pairs = (flat.split([weight.numel() for weight in weights.values()]) for flat in (mine, first))
    differing = [name for name, a, b in zip(weights, *pairs, strict=True) if not torch.equal(a, b)]
    assert not differing, f"{what}: rank {dist.get_rank()} and rank 0 differ in {differing}"


def check_stages(
    build,
    batches,
    plan=None,
    *,
    optimizer=SGD,
    stages=STAGES,
    exact=None,
    tolerance=1e-6,
    ddp=None,
    config=None,
    micro=plain_micro,
    before_step=no_change,
):
    """Inside ranks: train one model under the stock loop and at each stage; return each stage's largest differences.

    `build()` makes the same model every time and `batches(rank, number)` gives a rank's micro-batch.
    """
    plan = plan or Plan()
    mine = functools.partial(batches, dist.get_rank())
    shape = {"micro": micro, "before_step": before_step}
    stock = train_stock(build(), optimizer, mine, plan, ddp=ddp, **shape)
    assert all(norm > 0 for norm in stock.norms), f"the reference does not train: norms {stock.norms}"
    worst = {}
    for stage in stages:
        zero = hf_zero.ZeroConfig(zero_stage=stage, **(config or {}))
        ours = train_zero(build(), optimizer, mine, plan, config=zero, **shape)
        bitwise = plan.exact(stage) if exact is None else exact
        worst[stage] = compare(ours, stock, f"stage {stage}", exact=bitwise, tolerance=tolerance)
        check_ranks_agree(ours.weights, f"stage {stage}")
    return worst
