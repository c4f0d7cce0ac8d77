"""Gradients that are read or written where no step would see it are errors; reads gather what they need, no more."""

import copy
import functools
import io

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.errors import ZeroAccessError
from tests.ranks.test_gradients import prepared
from tests.support.harness import distributed
from tests.support.nets import Net, batches, micro, seeded
from tests.support.reference import SGD, STAGES, whole_weights


# ------------------------------------------------------------------------------------------- what cannot take effect


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
