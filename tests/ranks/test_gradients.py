"""What a loop does to `.grad` takes effect, at every stage, as it does without hf_zero; else it is an error."""

import contextlib
import copy
import functools
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.errors import ZeroAccessError
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


# ------------------------------------------------------------------------------------------- what cannot take effect


def prepared(stage, **config):
    model = seeded(Net)()
    optimizer = SGD(model.parameters())
    return model, hf_zero.shard(model, optimizer, {"zero_stage": stage, **config}), optimizer


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_a_change_to_an_outdated_gradient_is_an_error(stage):
    for outdate in ("clip", "backward", "step"):
        model, engine, optimizer = prepared(stage)
        micro(model, batches(dist.get_rank(), 0), engine.backward)
        held, other = model.head.weight.grad, model.enter.weight.grad
        assert held.abs().sum() > 0 and other.abs().sum() > 0
        if outdate == "clip":
            engine.clip_grad_norm_(0.1)
        elif outdate == "step":
            optimizer.step()
        else:
            micro(model, batches(dist.get_rank(), 1), engine.backward)
        held.detach().mul_(2)
        with pytest.raises(ZeroAccessError, match=r"unit 'head' was read.*read `\.grad` again"):
            optimizer.step()
        optimizer.step()  # was told


@distributed(world_size=2)
def test_an_old_gradient_may_be_changed_in_a_new_window():
    model, engine, optimizer = prepared(2)
    for number in range(2):
        micro(model, batches(dist.get_rank(), number), engine.backward)
        if number:
            before.mul_(2)  # noqa: F821
        before = model.head.weight.grad
        before.add_(1)
        optimizer.step()
        optimizer.zero_grad()


@distributed(world_size=2)
def test_a_gradient_that_was_dropped_before_its_first_use_is_an_error():
    model, engine, optimizer = prepared(3)
    micro(model, batches(dist.get_rank(), 0), engine.backward)
    grad = model.head.weight.grad
    optimizer.zero_grad()
    assert model.head.weight.grad is None
    with pytest.raises(ZeroAccessError, match="dropped"):
        grad.norm()


@distributed(world_size=2)
def test_gradients_that_nothing_would_step_are_refused():
    model, engine, optimizer = prepared(3)
    with pytest.raises(ValueError, match=r"shape \(2, 2\) cannot be that of 'head.weight'.*\(3, 8\)"):
        model.head.weight.grad = torch.ones(2, 2)
    frozen = seeded(Net)()
    frozen.head.requires_grad_(False)
    hf_zero.shard(frozen, None, {"zero_stage": 3})
    frozen.head.weight.grad = None
    with pytest.raises(ValueError, match="'head.weight' is not trained"):
        frozen.head.weight.grad = torch.ones(3, 8)


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_nan_written_to_a_gradient_skips_the_step(stage):
    model, engine, optimizer = prepared(stage, mixed_precision="bf16")
    before = whole_weights(model)
    x, _ = batches(dist.get_rank(), 0)
    engine.backward(model(x).float().sum())
    engine.clip_grad_norm_(1.0)  # its norm is finite
    model.head.bias.grad[0] = float("nan")
    optimizer.step()
    assert engine.step_was_skipped and engine.control.first_bad == "head.bias"
    assert all(torch.equal(weight, before[name]) for name, weight in whole_weights(model).items())


@distributed(world_size=2)
def test_gradients_written_without_a_backward_pass_are_checked_too():
    model, engine, optimizer = prepared(2, mixed_precision="bf16")
    engine.backward(model(batches(dist.get_rank(), 0)[0]).float().sum())
    optimizer.step()
    before = whole_weights(model)
    model.head.bias.grad.fill_(float("nan"))
    optimizer.step()
    assert engine.step_was_skipped
    model.head.bias.grad = torch.full_like(model.head.bias, float("nan"))
    optimizer.step()
    assert engine.step_was_skipped
    model.head.bias.grad = torch.ones_like(model.head.bias)
    optimizer.step()
    assert not engine.step_was_skipped
    moved = {name for name, weight in whole_weights(model).items() if not torch.equal(weight, before[name])}
    assert moved == {"head.bias"}, moved


# ------------------------------------------------------------------------------------------------------- what it costs


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_ranks_may_keep_different_gradients(stage):
    """What a rank keeps decides what is freed, which no rank may do alone: reading again is a collective."""
    model, engine, optimizer = prepared(stage)
    micro(model, batches(dist.get_rank(), 0), engine.backward)
    params, kept = list(model.parameters()), []
    for _ in range(2):
        for number, p in enumerate(params):
            p.grad.mul_(0.5)
            if number == 5 and dist.get_rank() == 0:  # of the first layer
                kept.append(p.grad)
    norms = [None, None]
    dist.all_gather_object(norms, float(torch.nn.utils.get_total_norm([p.grad for p in params])))
    assert norms[0] == norms[1]
    torch.testing.assert_close(engine.clip_grad_norm_(1.0).item(), norms[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_a_gradient_is_gathered_at_its_first_use_with_its_unit(stage):
    model, engine, optimizer = prepared(stage)
    micro(model, batches(dist.get_rank(), 0), engine.backward)
    gathers = functools.partial(engine.comm.traffic.calls.__getitem__, "all_gather")
    before, params = gathers(), list(model.parameters())
    for p in params:
        assert p.grad is not None and p.grad.shape == p.shape and p.grad.dtype == p.dtype
        assert "not fetched yet" in repr(p.grad)
    assert gathers() == before, "nothing was used"
    units = len([unit for unit in engine.units if unit.gradients]) if stage else 0
    assert torch.stack([p.grad.norm() for p in params]).isfinite().all()
    assert gathers() - before == units
    kept = [p.grad for p in params]
    assert torch.stack([grad.norm() for grad in kept]).isfinite().all()
    assert gathers() - before == max(2 * units - 1, 0), "once more where nobody had held it, but for the last"
    assert torch.stack([p.grad.norm() for p in params]).isfinite().all()
    assert gathers() - before == max(2 * units - 1, 0), "the reader has them all"


@distributed(world_size=2)
def test_a_loop_over_gradients_holds_those_of_one_unit():
    model, engine, optimizer = prepared(3)
    micro(model, batches(dist.get_rank(), 0), engine.backward)

    def held():
        return hf_zero.memory_report(model).categories["gradients"]

    resting = held()
    largest = max(4 * gradient.buffer.layout.padded_numel for unit in engine.units for gradient in unit.gradients)
    for p in model.parameters():
        if p.grad is not None:
            assert p.grad.norm().isfinite()
            assert resting < held() <= resting + largest
    total = sum(4 * gradient.buffer.layout.padded_numel for unit in engine.units for gradient in unit.gradients)
    grads = [p.grad for p in model.parameters()]
    torch._foreach_norm(grads)
    assert held() == resting + total
    del grads
    optimizer.step()
    assert held() == resting, "the reader had none of it any more"


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_the_raise_setting_holds_for_gradients(stage):
    model, engine, optimizer = prepared(stage, param_access="raise")
    micro(model, batches(dist.get_rank(), 0), engine.backward)
    assert sum(p.grad is not None for p in model.parameters()) == len(list(model.parameters()))
    if stage == 0:
        model.head.weight.grad.norm()
        return
    with pytest.raises(ZeroAccessError, match=r"norm reads the gradient of 'head.weight'.*clip_grad_norm_"):
        model.head.weight.grad.norm()


@distributed(world_size=2)
def test_copies_of_a_gradient_are_plain_tensors():
    model, engine, optimizer = prepared(3)
    micro(model, batches(dist.get_rank(), 0), engine.backward)
    for copied in (
        copy.deepcopy(model.head.weight.grad),
        model.enter.weight.grad.clone(),
        saved(model.head.bias.grad),
    ):
        assert type(copied) is torch.Tensor and copied.abs().sum() > 0
        copied.zero_()
    assert model.head.weight.grad.abs().sum() > 0


def saved(tensor):
    file = io.BytesIO()
    torch.save({"grad": tensor}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["grad"]


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_zero_grad_of_one_optimizer_leaves_none_of_its_gradients(stage):
    """The same on every rank, also on one that owns nothing of the other optimizer's parameters."""
    model = seeded(Net)()
    first = SGD([p for name, p in model.named_parameters() if name != "head.bias"])
    second = SGD([model.head.bias])
    engine = hf_zero.shard(model, first, {"zero_stage": stage})
    engine.attach_optimizer(second)
    micro(model, batches(dist.get_rank(), 0), engine.backward)
    first.zero_grad()
    assert engine.has_gradients
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["head.bias"]
    assert model.head.bias.grad.abs().sum() > 0
    second.zero_grad()
    assert not engine.has_gradients and model.head.bias.grad is None
