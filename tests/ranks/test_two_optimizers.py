"""Several optimizers that step one model: one decision for all of them, and each minds its own parameters."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.errors import ZeroRuntimeError
from tests.support.harness import distributed
from tests.support.nets import Net, batches, micro, seeded
from tests.support.reference import STAGES, average_gradients, whole_weights


class DeadEnd(Net):
    """Its head has a part that takes part in the loss and gets a gradient of exactly zero."""

    def __init__(self):
        super().__init__()
        self.dead = nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.route(self.enter(x))
        return self.head(hidden) + self.dead(hidden).clamp(max=-1e9) * 0


def optimizers_of(model):
    """Two that hold half of the model each, and decay what has a gradient of zero."""
    heads = [p for name, p in model.named_parameters() if name.startswith(("head", "dead"))]
    body = [p for name, p in model.named_parameters() if not name.startswith(("head", "dead"))]
    first = torch.optim.SGD(body, lr=0.05, momentum=0.9)
    return first, torch.optim.AdamW(heads, lr=1e-3, weight_decay=0.5, eps=1e-4)


def prepared(stage, **config):
    model = seeded(Net)()
    first, second = optimizers_of(model)
    engine = hf_zero.shard(model, first, {"zero_stage": stage, **config})
    engine.attach_optimizer(second)
    return model, first, second, engine


@pytest.mark.parametrize("accumulation", [1, 2])
@distributed(world_size=2)
def test_they_train_as_without_hf_zero(accumulation):
    def train(model, optimizers, backward, no_sync, finish):
        for step in range(3):
            for number in range(accumulation):
                with no_sync() if number < accumulation - 1 else contextlib.nullcontext():
                    micro(model, batches(dist.get_rank(), step * accumulation + number), backward)
            finish()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    stock = seeded(DeadEnd)()
    none = contextlib.nullcontext
    train(stock, optimizers_of(stock), torch.Tensor.backward, none, lambda: average_gradients(stock))
    for stage in STAGES:
        model = seeded(DeadEnd)()
        pair = optimizers_of(model)
        engine = hf_zero.shard(model, pair[0], {"zero_stage": stage})
        engine.attach_optimizer(pair[1])
        train(model, pair, engine.backward, engine.no_sync, lambda: None)
        ours = whole_weights(model)
        for name, weight in stock.named_parameters():
            torch.testing.assert_close(ours[name], weight.detach(), rtol=0, atol=1e-6, msg=f"stage {stage}: {name}")


def train_step(model, first, second, engine, factor=1.0):
    loss = model(batches(dist.get_rank(), 0)[0]).float().square().mean() * factor
    engine.backward(loss)
    for optimizer in (first, second):
        optimizer.step()
    skipped = engine.step_was_skipped
    for optimizer in (first, second):
        optimizer.zero_grad()
    return skipped


@pytest.mark.parametrize("stage", [0, 3])
@distributed(world_size=2)
def test_the_loss_scale_counts_a_step_once(stage):
    state = prepared(stage, mixed_precision="fp16", loss_scale_window=4, initial_scale_power=2)
    scaler = state[-1].scaler
    scales = []
    for _ in range(4):
        assert not train_step(*state)
        scales.append(scaler.scale)
    assert scales == [4, 4, 4, 8], scales


@distributed(world_size=2)
def test_an_overflow_skips_the_steps_of_all_and_is_counted_once():
    state = prepared(2, mixed_precision="fp16", initial_scale_power=4, hysteresis=1, max_consecutive_skips=3)
    engine = state[-1]
    before = whole_weights(state[0])
    for scale in (8, 4):
        assert train_step(*state, factor=float("inf")), "the second optimizer's step was skipped, too"
        assert engine.scaler.scale == scale
    after = whole_weights(state[0])
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    with pytest.raises(ZeroRuntimeError, match="3 steps in a row were skipped"):
        train_step(*state, factor=float("inf"))


@distributed(world_size=2)
def test_a_window_of_its_own_for_each_is_decided_for_each():
    """As in adversarial training: backward and step of one, then backward and step of the other."""
    model, first, second, engine = prepared(3, mixed_precision="bf16")
    for factor, optimizer in ((float("nan"), first), (1.0, second), (float("nan"), first)):
        engine.backward(model(batches(dist.get_rank(), 0)[0]).float().square().mean() * factor)
        optimizer.step()
        assert engine.step_was_skipped is (factor != factor)
        engine.zero_grad()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_zero_grad_of_one_leaves_the_gradients_of_the_other(stage):
    """Also those of micro-batches that were not reduced yet."""
    model, first, second, engine = prepared(stage)
    alike, *rest = prepared(stage)
    before = whole_weights(model)
    for state in ((model, first, second, engine), (alike, *rest)):
        with state[-1].no_sync():
            micro(state[0], batches(dist.get_rank(), 0), state[-1].backward)
    first.zero_grad()
    for optimizer in (first, second, *rest[:2]):
        optimizer.step()
    ours, wanted = whole_weights(model), whole_weights(alike)
    for name, weight in ours.items():
        kept = name.startswith("head")
        same = wanted if kept else before
        assert torch.equal(weight, same[name]), f"{name} {'lost' if kept else 'kept'} its gradient"
