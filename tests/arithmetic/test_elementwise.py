"""Whether an optimizer steps slices or whole matrices is found out by trying; what does neither is refused by name."""

import pytest
import torch
from transformers import Adafactor

import hf_zero
from hf_zero.core.elementwise import needs_whole_matrices
from tests.support.matrix_optimizers import BlockwiseAdam, BlockwiseLion, Lamb, MuonWithAdam, Soap


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
                if p.grad is not None:
                    p.grad.div_(p.grad.norm())
        return super().step(closure)


class CloselyClippedSGD(torch.optim.SGD):
    """Clips by the norm over all parameters, of which each rank has some only."""

    @torch.no_grad()
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


class VectorSGD(torch.optim.SGD):
    """Steps no matrix."""

    @torch.no_grad()
    def step(self, closure=None):
        raise RuntimeError("vectors only")


def matrix():
    return [torch.nn.Parameter(torch.randn(8, 4))]


def tried(optimizer, group=0, **options):
    found = {key: value for key, value in optimizer.param_groups[group].items() if key != "params"}
    return needs_whole_matrices(optimizer, found, **options)


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
def test_elementwise_optimizers_step_slices(make):
    optimizer = make(matrix())
    assert tried(optimizer) is tried(optimizer, in_parts=True) is False
    assert all(not isinstance(v, torch.Tensor) or v.sum() == 0 for s in optimizer.state.values() for v in s.values())


@pytest.mark.parametrize(
    "make",
    [
        lambda params: Adafactor(params),
        lambda params: Adafactor(params, lr=1e-2, relative_step=False, scale_parameter=True),
        lambda params: torch.optim.Adafactor(params),
        lambda params: torch.optim.Muon(params, lr=0.1),
        lambda params: NormalisedSGD(params, lr=0.1),
        Lamb,
        Soap,
        BlockwiseAdam,
        BlockwiseLion,
    ],
)
def test_those_that_look_at_matrices_step_whole_ones(make):
    optimizer = make(matrix())
    assert tried(optimizer) is tried(optimizer, in_parts=True) is True
    assert not optimizer.state, "a twin was stepped"


def test_each_group_is_tried_by_its_own_options():
    optimizer = MuonWithAdam([{"params": matrix(), "use_muon": True}, {"params": matrix()}])
    assert (tried(optimizer, 0), tried(optimizer, 1)) == (True, False)


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda params: torch.optim.LBFGS(params), "calls a closure, several times.*AdamW"),
        (lambda params: CloselyClippedSGD(params, lr=0.1), "depends on the others.*clip_grad_norm_"),
        (lambda params: VectorSGD(params, lr=0.1), "fails on a matrix of 8 x 4: vectors only"),
    ],
)
def test_others_are_refused_by_name(make, reason):
    optimizer = make(matrix())
    with pytest.raises(ValueError, match=f"{type(optimizer).__name__} cannot be sharded: .*{reason}"):
        tried(optimizer)


def test_a_refusal_leaves_the_optimizer_as_it_was():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match="LBFGS cannot be sharded"):
        hf_zero.shard(model, optimizer, {"zero_stage": 3})
    assert type(optimizer) is torch.optim.LBFGS
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


def test_a_schedulers_counter_is_not_moved():
    optimizer = torch.optim.SGD(matrix(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    tried(optimizer)
    assert not getattr(optimizer, "_opt_called", False)
    optimizer.param_groups[0]["params"][0].grad = torch.zeros(8, 4)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.01)]
