"""Optimizers that cannot step flat slices are refused by name, before anything is changed."""

import pytest
import torch
from transformers import Adafactor

import hf_zero
from hf_zero.core.elementwise import check_elementwise


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (Chen et al. 2023, arXiv:2302.06675), as users write it."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = momentum.lerp(p.grad, 1 - group["betas"][0]).sign()
                p.add_(update, alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - group["betas"][1])


class NormalisedSGD(torch.optim.SGD):
    """Divides each gradient by its own norm: not elementwise, though nothing fails on a flat tensor."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(p.grad.norm())
        return super().step(closure)


def matrix():
    return [torch.nn.Parameter(torch.randn(8, 4))]


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        torch.optim.Adam,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.NAdam,
        torch.optim.RAdam,
        Lion,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
        lambda params: torch.optim.AdamW(params, fused=True, amsgrad=True),
    ],
)
def test_elementwise_optimizers_pass(make):
    optimizer = make(matrix())
    check_elementwise(optimizer)
    assert all(not isinstance(v, torch.Tensor) or v.sum() == 0 for s in optimizer.state.values() for v in s.values())


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda params: Adafactor(params), "shape around it|fails on flat"),
        (lambda params: torch.optim.Adafactor(params), "shape around it|fails on flat"),
        (lambda params: torch.optim.Muon(params, lr=0.1), "fails on flat"),
        (lambda params: torch.optim.LBFGS(params), "fails on flat"),
        (lambda params: NormalisedSGD(params, lr=0.1), "shape around it"),
    ],
)
def test_others_are_refused_by_name(make, reason):
    optimizer = make(matrix())
    with pytest.raises(ValueError, match=f"{type(optimizer).__name__} cannot be sharded: .*({reason}).*AdamW"):
        check_elementwise(optimizer)


def test_a_refusal_leaves_the_optimizer_as_it_was():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adafactor(model.parameters())
    with pytest.raises(ValueError, match="Adafactor cannot be sharded"):
        hf_zero.shard(model, optimizer, {"zero_stage": 3})
    assert type(optimizer) is torch.optim.Adafactor
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


def test_a_schedulers_counter_is_not_moved():
    optimizer = torch.optim.SGD(matrix(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    check_elementwise(optimizer)
    assert not getattr(optimizer, "_opt_called", False)
    optimizer.param_groups[0]["params"][0].grad = torch.zeros(8, 4)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.01)]
