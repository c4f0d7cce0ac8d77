"""DeepSpeed's optimizer and scheduler sections, built in torch, against the published formulas written out here."""

import math

import pytest
import torch

from hf_zero.config.builders import build_optimizer, build_scheduler
from hf_zero.errors import ZeroConfigError


ARGUMENTS = {
    "learning_rate": 2e-4,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.01,
    "warmup_steps": 5,
    "max_steps": 20,
}


def _params():
    return [torch.nn.Parameter(torch.ones(3))]


def _optimizer(kind, **params):
    return build_optimizer({"type": kind, "params": params}, _params(), arguments=ARGUMENTS)


def test_adamw_with_auto_takes_the_arguments():
    optimizer = _optimizer("AdamW", lr="auto", betas="auto", eps="auto", weight_decay="auto")
    assert type(optimizer) is torch.optim.AdamW
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (2e-4, (0.8, 0.95), 1e-6, 0.01)


def test_adam_decays_weights_as_deepspeed_does():
    assert type(_optimizer("Adam", lr="1e-3")) is torch.optim.AdamW
    assert type(_optimizer("Adam", lr=1e-3, adam_w_mode=False)) is torch.optim.Adam
    assert type(_optimizer("adamw", lr=1e-3, adam_w_mode=False, torch_adam=True)) is torch.optim.AdamW
    assert _optimizer("AdamW", lr=1e-3).param_groups[0]["weight_decay"] == 0.0  # torch's own default is 0.01


def test_sgd_and_groups():
    optimizer = _optimizer("SGD", lr=0.1, momentum="0.9", nesterov=True)
    assert type(optimizer) is torch.optim.SGD
    assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["nesterov"]) == (0.9, True)
    groups = [{"params": _params(), "weight_decay": 0.0}, {"params": _params()}]
    built = build_optimizer({"type": "AdamW", "params": {"lr": 1.0, "weight_decay": 0.1}}, groups)
    assert [group["weight_decay"] for group in built.param_groups] == [0.0, 0.1]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "Lamb"}, "optimizer.type is 'Lamb': expected one of AdamW, Adam, SGD; or remove the section"),
        ({"type": "AdamW", "params": {"beta": 1}}, "optimizer.params.beta: AdamW has no such parameter"),
        ({"type": "AdamW", "params": {"lr": "fast"}}, "optimizer.params.lr is 'fast': expected a number"),
        ({"type": "AdamW", "params": {"betas": [0.9]}}, r"optimizer.params.betas is \[0.9\]: expected two numbers"),
        ({"type": "SGD", "params": {"momentum": "auto"}}, 'optimizer.params.momentum is "auto", but'),
        ({"type": "Adam", "params": {"bias_correction": False}}, "bias_correction is False"),
    ],
)
def test_optimizers_that_cannot_be_built(section, message):
    with pytest.raises(ZeroConfigError, match=message):
        build_optimizer(section, _params(), arguments=ARGUMENTS)


def _rates(kind, steps, lr=1.0, **params):
    optimizer = torch.optim.SGD(_params(), lr=lr)
    scheduler = build_scheduler({"type": kind, "params": params}, optimizer, arguments=ARGUMENTS)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def _delayed(rate, steps, before):
    """DeepSpeed's counter is -1 before the first step of the scheduler and 0 before the second."""
    return [before] + [rate(iteration) for iteration in range(steps - 1)]


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup(kind):
    def rate(iteration):
        if iteration >= 4:
            return 0.5
        share = math.log(iteration + 1) / math.log(4) if kind == "log" else iteration / 4
        return 0.1 + 0.4 * share

    rates = _rates("WarmupLR", 8, warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_num_steps=4, warmup_type=kind)
    assert rates == pytest.approx(_delayed(rate, 8, 0.1), abs=1e-12)


def test_warmup_defaults_to_the_optimizers_rate_and_log():
    assert _rates("WarmupLR", 5, lr=0.3, warmup_num_steps=3)[-1] == pytest.approx(0.3)
    assert _rates("WarmupLR", 3, warmup_max_lr="auto", warmup_min_lr="auto", warmup_num_steps=0)[0] == 0.0


def test_warmup_then_linear_decay():
    def rate(iteration):
        if iteration < 4:
            return iteration / 4
        return max(0.0, (10 - iteration) / 6)

    params = {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "total_num_steps": 10, "warmup_type": "linear"}
    assert _rates("WarmupDecayLR", 14, **params) == pytest.approx(_delayed(rate, 14, 0.0), abs=1e-12)


def test_warmup_then_cosine():
    def rate(iteration):
        if iteration < 4:
            return 0.5 * (0.2 + 0.8 * iteration / 4)
        progress = min(1.0, (iteration - 3) / 6)
        return 0.5 * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)

    params = {"warmup_min_ratio": 0.2, "warmup_num_steps": 4, "total_num_steps": 10, "cos_min_ratio": 0.1}
    rates = _rates("WarmupCosineLR", 14, lr=0.5, warmup_type="linear", **params)
    assert rates == pytest.approx(_delayed(rate, 14, 0.0), abs=1e-12)


def test_rates_per_group_and_auto_totals():
    groups = [{"params": _params()}, {"params": _params()}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    params = {"warmup_max_lr": [0.1, 0.2], "warmup_num_steps": "auto", "total_num_steps": "auto"}
    scheduler = build_scheduler({"type": "WarmupDecayLR", "params": params}, optimizer, arguments=ARGUMENTS)
    for _ in range(6):
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.1, 0.2])  # 5 warm-up steps are over
    with pytest.raises(ZeroConfigError, match="warmup_max_lr has 3 values for 2 optimizer groups"):
        build_scheduler({"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2, 3]}}, optimizer)


def test_a_scheduler_resumes_from_its_state():
    params = {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "total_num_steps": 10}
    whole = _rates("WarmupDecayLR", 9, **params)
    first = torch.optim.SGD(_params(), lr=1.0)
    scheduler = build_scheduler({"type": "WarmupDecayLR", "params": params}, first)
    for _ in range(5):
        first.step()
        scheduler.step()
    second = torch.optim.SGD(_params(), lr=1.0)
    resumed = build_scheduler({"type": "WarmupDecayLR", "params": params}, second)
    resumed.load_state_dict(scheduler.state_dict())
    second.load_state_dict(first.state_dict())
    rates = []
    for _ in range(4):
        rates.append(second.param_groups[0]["lr"])
        second.step()
        resumed.step()
    assert rates == pytest.approx(whole[5:])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"type": "OneCycle"},
            "scheduler.type is 'OneCycle': expected one of WarmupLR, WarmupDecayLR, WarmupCosineLR",
        ),
        ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, "expected 'log' or 'linear'"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": -1}}, "warmup_num_steps is -1"),
        ({"type": "WarmupDecayLR"}, "total_num_steps is None: expected the number of updates"),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": 0}}, "total_num_steps is 0"),
        ({"type": "WarmupLR", "params": {"total_num_steps": 9}}, "WarmupLR has no such parameter"),
    ],
)
def test_schedulers_that_cannot_be_built(section, message):
    with pytest.raises(ZeroConfigError, match=message):
        build_scheduler(section, torch.optim.SGD(_params(), lr=1.0))
