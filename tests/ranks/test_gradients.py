"""What a loop does to `.grad` takes effect, at every stage, as it does without hf_zero; else it is an error."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from tests.support.harness import distributed, run_ranks
from tests.support.nets import Net, batches, micro, seeded
from tests.support.reference import SGD, STAGES, average_gradients, whole_weights


# ------------------------------------------------------------------------------------------- changes that take effect


def clip_by_norm(params):
    nn.utils.clip_grad_norm_(params, 0.1)


def clip_by_value(params):
    nn.utils.clip_grad_value_(params, 0.01)


def scale_each(params):
    for p in params:
        p.grad.mul_(0.5)


def scale_all(params):
    torch._foreach_mul_([p.grad for p in params], 0.5)


def scale_detached(params):
    """As Megatron and Apex collect them; nothing else holds the tensors by then."""
    torch._foreach_mul_([p.grad.detach() for p in params], 0.5)


def scale_data(params):
    for data in [p.grad.data for p in params]:
        data.mul_(0.5)


def assign_data(params):
    for p in params:
        p.grad.data = p.grad.data.clamp(-0.01, 0.01)


def scale_and_assign(params):
    for p in params:
        p.grad *= 0.5


def assign(params):
    for p in params:
        p.grad = p.grad * 0.5


def zero_some(params):
    """In the way of an old zero_grad."""
    for p in params[::2]:
        p.grad.detach_()
        p.grad.zero_()


def write_by_numpy(params):
    for p in params:
        p.grad.numpy()[...] *= 0.5


def drop_some(params):
    for p in params[::2]:
        p.grad = None


def change_a_replaced_one(params):
    """The old tensor is its reader's own from then on; those beside it in the unit are gradients still."""
    for p, beside in zip(params[::2], params[1::2], strict=False):
        old, other = p.grad, beside.grad
        other.mul_(0.5)
        p.grad = old * 2
        old.zero_()
        other.mul_(0.5)


def exchange(params):
    first, second = params[0].grad.clone(), params[0].grad
    params[0].grad = None
    assert params[0].grad is None
    params[0].grad = first + second


CHANGES = [
    clip_by_norm,
    clip_by_value,
    scale_each,
    scale_all,
    scale_detached,
    scale_data,
    assign_data,
    scale_and_assign,
    assign,
    zero_some,
    write_by_numpy,
    drop_some,
    change_a_replaced_one,
    exchange,
]


def train_stock(change, accumulation=1, early=None):
    model = seeded(Net)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    for step in range(3):
        for number in range(accumulation):
            micro(model, batches(dist.get_rank(), step * accumulation + number), torch.Tensor.backward)
            if early is not None and number == 0:
                early(list(model.parameters()))
        average_gradients(model)
        change(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def train_zero(stage, change, accumulation=1, early=None, **config):
    model = seeded(Net)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    engine = hf_zero.shard(model, optimizer, {"zero_stage": stage, **config})
    for step in range(3):
        for number in range(accumulation):
            with engine.no_sync() if number < accumulation - 1 else contextlib.nullcontext():
                micro(model, batches(dist.get_rank(), step * accumulation + number), engine.backward)
            if early is not None and number == 0:
                early(list(model.parameters()))
        change(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return whole_weights(model)


def check(ours, stock, what, tolerance=1e-6):
    for name, weight in stock.items():
        torch.testing.assert_close(
            ours[name], weight, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{what}: {name}: {text}"
        )


def nothing(params):
    """Leaves gradients as they are."""


def _each_change():
    plain = train_stock(nothing)
    for change in CHANGES:
        stock = train_stock(change)
        assert any(not torch.equal(stock[name], plain[name]) for name in plain), f"{change.__name__} changes nothing"
        for stage in STAGES:
            check(train_zero(stage, change), stock, f"stage {stage}, {change.__name__}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_changes_after_backward_take_effect(world_size):
    run_ranks(_each_change, world_size=world_size, timeout=300)


@pytest.mark.parametrize("change", [scale_each, scale_data, assign, zero_some])
@distributed(world_size=2)
def test_changes_between_micro_batches_take_effect(change):
    stock = train_stock(nothing, accumulation=2, early=change)
    for stage in STAGES:
        check(train_zero(stage, nothing, accumulation=2, early=change), stock, f"stage {stage}")


@distributed(world_size=2)
def test_changes_to_scaled_sums_take_effect():
    """Under fp16 the sums that are not reduced yet are scaled; what `.grad` answers is not."""

    def set_to_ones(params):
        for p in params:
            assert p.grad.abs().max() < 10, "scaled"
            p.grad.fill_(1.0)

    options = {"accumulation": 2, "mixed_precision": "fp16", "initial_scale_power": 6}
    for stage in (0, 1):
        kept, changed = (train_zero(stage, nothing, early=early, **options) for early in (nothing, set_to_ones))
        assert all((kept[name].float() - weight.float()).abs().max() > 0.01 for name, weight in changed.items())


def test_reading_alone_changes_no_bit():
    run_ranks(_read_and_compare, world_size=2)


def _read_and_compare():
    def read(params):
        assert all(p.grad.isfinite().all() for p in params)

    for options in ({}, {"mixed_precision": "fp16", "loss_scale": 1000.0}, {"communication_data_type": "bf16"}):
        for stage in STAGES:
            plain, ours = (train_zero(stage, change, 2, change, **options) for change in (nothing, read))
            assert all(torch.equal(ours[name], weight) for name, weight in plain.items()), (stage, options)


def prepared(stage, **config):
    model = seeded(Net)()
    optimizer = SGD(model.parameters())
    return model, hf_zero.shard(model, optimizer, {"zero_stage": stage, **config}), optimizer


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_gradients_that_no_backward_made_are_stepped(stage):
    model, engine, optimizer = prepared(stage)
    before = whole_weights(model)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    assert engine.has_gradients and model.enter.weight.grad is None
    optimizer.step()
    after = whole_weights(model)
    torch.testing.assert_close(after["head.weight"], before["head.weight"] - 0.05)
    assert all(torch.equal(after[name], weight) for name, weight in before.items() if name != "head.weight")


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_gradients_outlive_a_new_optimizer_group(stage):
    model = seeded(Net)()
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.05)
    engine = hf_zero.shard(model, optimizer, {"zero_stage": stage})
    before = whole_weights(model)
    micro(model, batches(dist.get_rank(), 0), engine.backward)
    optimizer.add_param_group({"params": list(model.head.parameters())})
    optimizer.step()
    after = whole_weights(model)
    moved = {name for name, weight in before.items() if not torch.equal(after[name], weight)}
    assert {name.split(".")[0] for name in moved} == {"layers", "head"}, moved
