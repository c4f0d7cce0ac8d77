"""fp16 and its loss scale: overflow is agreed over ranks, a skipped step changes nothing, and a run of them ends."""

import logging
import math

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.core.engine import ZeroEngine
from hf_zero.core.loss_scale import LossScaler
from hf_zero.errors import ZeroRuntimeError
from tests.support.harness import distributed


def outcomes(scaler, overflows):
    scales = []
    for overflow in overflows:
        scaler.update(bool(overflow))
        scales.append(scaler.scale)
    return scales


def test_the_scale_halves_after_the_hysteresis_and_doubles_after_a_window():
    scaler = LossScaler(initial_scale_power=4, window=3, hysteresis=2)
    assert outcomes(scaler, [1, 1, 1]) == [16, 8, 4]
    assert outcomes(scaler, [0, 0, 0]) == [4, 4, 8]
    assert outcomes(scaler, [1, 1]) == [8, 4], "a window without overflow refills the hysteresis"


def test_the_scale_has_a_floor():
    assert outcomes(LossScaler(initial_scale_power=2, hysteresis=1, min_scale=2), [1, 1, 1]) == [2, 2, 2]


def test_consecutive_hysteresis_refills_at_every_good_step():
    assert outcomes(LossScaler(initial_scale_power=4, consecutive_hysteresis=True), [1, 0, 1, 1]) == [16, 16, 16, 8]
    assert outcomes(LossScaler(initial_scale_power=4), [1, 0, 1, 1]) == [16, 16, 8, 4]


def test_a_fixed_scale_stays():
    assert outcomes(LossScaler(scale=128.0), [1, 0, 1]) == [128, 128, 128]


def test_the_state_comes_back():
    scaler, twin = LossScaler(window=3), LossScaler(window=3)
    outcomes(scaler, [1, 1, 0, 0])
    twin.load_state_dict(scaler.state_dict())
    assert outcomes(scaler, [0, 1]) == outcomes(twin, [0, 1])


def prepared(stage, precision, *, fused=None, **config):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    return (
        model,
        optimizer,
        hf_zero.shard(model, optimizer, {"zero_stage": stage, "mixed_precision": precision, **config}),
    )


def step(model, optimizer, engine, factor=1.0, clip=None):
    generator = torch.Generator().manual_seed(dist.get_rank())
    loss = model(torch.randn(4, 8, generator=generator)).float().square().mean() * factor
    engine.backward(loss)
    norm = engine.clip_grad_norm_(clip) if clip is not None else None
    optimizer.step()
    optimizer.zero_grad()
    return norm


def masters(engine):
    return torch.cat([master.detach().clone() for master in engine.masters])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_fp16_trains_as_fp32_does(stage):
    half, single = prepared(stage, "fp16", initial_scale_power=10), prepared(stage, "no")
    for _ in range(3):
        norms = [step(*triple, clip=1.0) for triple in (half, single)]
        assert half[1].param_groups and not half[2].step_was_skipped
        assert abs(norms[0] / norms[1] - 1) < 5e-3, norms
    with hf_zero.gathered_parameters(half[0]), hf_zero.gathered_parameters(single[0]):
        for ours, theirs in zip(half[0].parameters(), single[0].parameters(), strict=True):
            torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=5e-3)
    assert half[0][0].weight.dtype == torch.float16


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=2)
def test_overflow_on_one_rank_skips_on_all(stage, clip):
    model, optimizer, engine = prepared(stage, "fp16", initial_scale_power=8, hysteresis=1)
    step(model, optimizer, engine)
    before, state = masters(engine), optimizer.state[optimizer.param_groups[0]["params"][0]]["step"].clone()
    step(model, optimizer, engine, factor=float("inf") if dist.get_rank() == 1 else 1.0, clip=clip)
    assert engine.step_was_skipped and engine.control.first_bad == "0.weight", engine.control.first_bad
    assert engine.scaler.scale == 128
    assert torch.equal(masters(engine), before)
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] == state
    step(model, optimizer, engine)
    assert not engine.step_was_skipped and not torch.equal(masters(engine), before)


@distributed(world_size=2)
def test_bf16_checks_too_and_may_be_told_not_to():
    for check in (True, False):
        model, optimizer, engine = prepared(3, "bf16", check_grad_overflow=check)
        step(model, optimizer, engine, factor=float("nan"))
        assert engine.step_was_skipped is check
        assert masters(engine).isfinite().all().item() is check


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_a_step_that_the_device_leaves_out_is_the_same_as_one_that_the_host_does(stage, clip):
    """The host of a device learns of it a step later, and steps go on where they were."""
    runs = []
    for late in (False, True):
        model, _, engine = prepared(stage, "bf16", fused=True, max_consecutive_skips=3)
        (optimizer,) = engine.optimizers
        engine.control.late = late
        for factor in (1.0, float("nan"), 1.0, float("inf"), float("nan"), 1.0):
            step(model, optimizer, engine, factor=factor if dist.get_rank() == 1 else 1.0, clip=clip)
            assert engine.step_was_skipped is (not math.isfinite(factor))
        state = next(iter(optimizer.state.values()))
        assert state["step"] == 3
        runs.append([masters(engine), state["exp_avg"], state["exp_avg_sq"]])
        assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()
        with pytest.raises(ZeroRuntimeError, match="3 steps in a row were skipped"):
            for _ in range(4):
                step(model, optimizer, engine, factor=float("nan"))
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("stage", [0, 2])
@distributed(world_size=2)
def test_a_norm_of_earlier_micro_batches_does_not_decide(stage):
    """A loop may log the norm after each micro-batch."""
    model, optimizer, engine = prepared(stage, "bf16")
    before = masters(engine)
    x = torch.ones(2, 8)
    for factor in (1.0, float("nan")):
        engine.clip_grad_norm_(float("inf"))
        engine.backward(model(x).float().sum() * factor)
    optimizer.step()
    assert engine.step_was_skipped and torch.equal(masters(engine), before)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@distributed(world_size=2)
def test_a_run_of_skips_is_an_error_whose_advice_fits_the_precision(precision):
    model, optimizer, engine = prepared(2, precision, max_consecutive_skips=3)
    for _ in range(2):
        step(model, optimizer, engine, factor=float("inf"))
    with pytest.raises(ZeroRuntimeError, match=r"3 steps in a row were skipped.*\(step 3\).*'0.weight'") as caught:
        step(model, optimizer, engine, factor=float("inf"))
    assert ("train in bf16" in str(caught.value)) is (precision == "fp16"), caught.value


@distributed(world_size=2)
def test_skipped_steps_are_named_by_number_and_a_run_of_them_is_not_repeated():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("hf_zero").addHandler(handler)
    model, optimizer, engine = prepared(2, "fp16")
    step(model, optimizer, engine)
    for _ in range(6):
        step(model, optimizer, engine, factor=float("inf"))
    if dist.get_rank() != 0:
        assert not lines, lines
        return
    starts = [line.split(":")[1] for line in lines if line.startswith("hf_zero: ")]
    assert starts == [" step 2 skipped", " step 3 skipped (2 in a row)", " step 5 skipped (4 in a row)"], lines
    assert all("'0.weight' is inf or nan; the loss scale is now" in line for line in lines), lines


@distributed(world_size=2)
def test_the_scheduler_does_not_move_on_a_skipped_step():
    accelerator = hf_zero.ZeroAccelerator(zero_plugin=hf_zero.ZeroPlugin(zero_stage=2), mixed_precision="bf16")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for factor in (1.0, float("nan"), 1.0):
        accelerator.backward(model(torch.ones(2, 4)).float().sum() * factor)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
        assert accelerator.optimizer_step_was_skipped is (factor != factor)
    assert rates[0] == rates[1] > rates[2], rates


def pair(**config):
    """Two models with an optimizer each that share one loss scale, as an actor and a critic of one loss do."""
    first = prepared(2, "fp16", **config)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = ZeroEngine(model, first[2].config, scaler=first[2].scaler)
    engine.attach_optimizer(optimizer)
    return first, (model, optimizer, engine)


def step_of_both(states, factors):
    """One loss of both models, then a step of each; `factors` are those of their parts of the loss."""
    x = torch.full((2, 8), 0.1)
    loss = sum(model(x).square().mean() * factor for (model, *_), factor in zip(states, factors, strict=True))
    scaler = states[0][2].scaler
    (loss * scaler.scale).backward()
    for _, optimizer, _ in states:
        optimizer.step()
        optimizer.zero_grad()
    return scaler.scale


INF = float("inf")


@distributed(world_size=2)
def test_models_of_one_loss_move_the_scale_once_for_each_backward():
    states = pair(loss_scale_window=4, initial_scale_power=2, hysteresis=1)
    assert [step_of_both(states, (1, 1)) for _ in range(4)] == [4, 4, 4, 8]
    assert step_of_both(states, (INF, INF)) == 4, "an overflow in both is one overflow"
    assert step_of_both(states, (1, INF)) == 2, "one model had stepped before the overflow of the other was seen"
    assert [step_of_both(states, (1, 1)) for _ in range(4)] == [2, 2, 2, 4]


@distributed(world_size=2)
def test_models_with_losses_of_their_own_move_it_for_each_of_them():
    states = pair(loss_scale_window=4, initial_scale_power=2, hysteresis=1)
    scales = [step_of_both([state], (1,)) for state in states * 2]
    assert scales == [4, 4, 4, 8], "a backward and a step of each, in turn, are two windows"
