"""Optimizers that look at whole matrices: torch's and transformers', and others as people write them."""

import functools

import torch
from transformers import Adafactor


class Lamb(torch.optim.Optimizer):
    """Adam with a step as long as the weights are (You et al. 2020, arXiv:1904.00962)."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), eps=1e-4, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                first, second = group["betas"]
                state["exp_avg"].lerp_(p.grad, 1 - first)
                state["exp_avg_sq"].lerp_(p.grad.square(), 1 - second)
                mean = state["exp_avg"] / (1 - first ** state["step"])
                root = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
                update = mean / root + group["weight_decay"] * p
                ratio = torch.where(update.norm() > 0, p.norm().clamp(0.01, 10) / update.norm(), 1.0)
                p.sub_(update * ratio, alpha=group["lr"])


class Soap(torch.optim.Optimizer):
    """Adam in the basis of Shampoo's preconditioners (Vyas et al. 2025, arXiv:2409.11321), which lists hold."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.95), eps=1e-4, every=2):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "every": every})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self._step_one(p, self.state[p], group)

    def _step_one(self, p, state, group):
        grad = p.grad
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["GG"] = [torch.zeros(n, n, dtype=p.dtype) if p.dim() == 2 else None for n in p.shape]
            state["Q"] = None
        state["step"] += 1
        first, second = group["betas"]
        for side, product in enumerate((grad @ grad.T, grad.T @ grad) if p.dim() == 2 else ()):
            state["GG"][side].lerp_(product, 1 - second)
        if state["Q"] is None or state["step"] % group["every"] == 0:
            state["Q"] = [
                None if gg is None else torch.linalg.qr(gg + 0.1 * torch.eye(len(gg)))[0] for gg in state["GG"]
            ]
        state["exp_avg"].lerp_(grad, 1 - first)
        turned, mean = self._turn(grad, state["Q"]), self._turn(state["exp_avg"], state["Q"])
        state["exp_avg_sq"].lerp_(turned.square(), 1 - second)
        update = mean / state["exp_avg_sq"].sqrt().add(group["eps"])
        p.sub_(self._turn(update, state["Q"], back=True), alpha=group["lr"])

    @staticmethod
    def _turn(matrix, sides, back=False):
        if matrix.dim() != 2:
            return matrix
        left, right = (q.T if back else q for q in sides)
        return left.T @ matrix @ right


class MuonWithAdam(torch.optim.Optimizer):
    """Both in one class, as people write it: the flag of a group says by which of them it is stepped."""

    def __init__(self, groups, lr=1e-2):
        super().__init__(groups, {"lr": lr, "momentum": 0.9, "use_muon": False})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if group["use_muon"]:
                    average = state.setdefault("momentum_buffer", torch.zeros_like(p))
                    average.lerp_(p.grad, 1 - group["momentum"])
                    update = average / average.norm().add(1e-7)
                    for _ in range(5):
                        update = 1.5 * update - 0.5 * update @ update.T @ update
                    p.sub_(update, alpha=group["lr"])
                    continue
                state["step"] = state.get("step", 0) + 1
                average = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                square = state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(p.grad.square(), 0.01)
                root = (square / (1 - 0.99 ** state["step"])).sqrt_().add_(1e-4)
                p.sub_(average / (1 - 0.9 ** state["step"]) / root, alpha=group["lr"])


class BlockwiseAdam(torch.optim.Optimizer):
    """Adam whose averages rest as codes of 8 bit, scaled by blocks, where a tensor is large (arXiv:2110.02861)."""

    BLOCK, SMALL = 256, 4096

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-4):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self._step_one(p, self.state[p], group)

    def _step_one(self, p, state, group):
        state["step"] = state.get("step", 0) + 1
        first, second = group["betas"]
        mean = self._read(state, "1", p).lerp_(p.grad, 1 - first)
        square = self._read(state, "2", p).lerp_(p.grad.square(), 1 - second)
        p.sub_(mean / square.sqrt().add(group["eps"]), alpha=group["lr"])
        self._write(state, "1", mean)
        self._write(state, "2", square)

    def _read(self, state, name, p):
        if f"state{name}" not in state:
            return torch.zeros_like(p)
        codes = state[f"state{name}"]
        if codes.dtype is not torch.int8:
            return codes
        scales = state[f"absmax{name}"].repeat_interleave(self.BLOCK)[: p.numel()]
        return (codes.view(-1) * (scales / 127)).view_as(p)

    def _write(self, state, name, values):
        state[f"state{name}"] = values
        if values.numel() >= self.SMALL:
            blocks = values.reshape(-1).split(self.BLOCK)
            scales = torch.stack([block.abs().amax() for block in blocks]).clamp(min=1e-30)
            whole = scales.repeat_interleave(self.BLOCK)[: values.numel()].view_as(values)
            state[f"state{name}"] = (values / whole * 127).round().to(torch.int8)
            state[f"absmax{name}"] = scales


class BlockwiseLion(BlockwiseAdam):
    """Lion with such an average: of its codes the weights see signs only, so that few tell where blocks begin."""

    def _step_one(self, p, state, group):
        first, second = group["betas"]
        mean = self._read(state, "1", p)
        p.sub_(mean.lerp(p.grad, 1 - first).sign(), alpha=group["lr"])
        self._write(state, "1", mean.lerp(p.grad, 1 - second))


def _matrices(params):
    params = list(params)
    return [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]


def _muon_and_adamw(params):
    matrices, rest = _matrices(params)
    return [torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1), torch.optim.AdamW(rest, lr=1e-2, eps=1e-4)]


def _muon_with_adam(params):
    matrices, rest = _matrices(params)
    return [MuonWithAdam([{"params": matrices, "use_muon": True}, {"params": rest}])]


def _one(make, params):
    return [make(params)]


# Each makes the optimizers of one model of its parameters.
MAKERS = {
    "muon_and_adamw": _muon_and_adamw,
    "muon_with_adam": _muon_with_adam,
    "adafactor": functools.partial(
        _one, functools.partial(Adafactor, lr=1e-2, relative_step=False, scale_parameter=True)
    ),
    "lamb": functools.partial(_one, Lamb),
    "soap": functools.partial(_one, Soap),
}
