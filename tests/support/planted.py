"""Faults that sharded training has had somewhere, planted one by one into a run of hf_zero."""

import torch
import torch.distributed as dist
from torch import nn

from hf_zero.core.unit import gathered_parameters
from hf_zero.verify.systems import ZeroSystem


class Scaled(ZeroSystem):
    """Gradients are summed over ranks and not averaged."""

    def micro_step(self, batch, weight, last):
        return super().micro_step(batch, weight * dist.get_world_size(), last)


class Dropped(ZeroSystem):
    """One micro-batch of one rank does not count."""

    def micro_step(self, batch, weight, last):
        return super().micro_step(batch, 0.0 if not last and dist.get_rank() == 1 else weight, last)


class Stale(ZeroSystem):
    """After each step, what other ranks have stepped of the weights of one unit does not arrive."""

    def step(self):
        unit = next(unit for unit in self.engine.units if unit.name.endswith("h.1"))
        old = [buffer.unsharded.data.clone() for buffer in unit.buffers]
        super().step()
        unit.unshard()
        for buffer, values in zip(unit.buffers, old, strict=True):
            own = buffer.local_slice.detach().clone()
            buffer.unsharded.data.copy_(values)
            buffer.local_slice.data.copy_(own)


class Clipped(ZeroSystem):
    """Clipping takes another limit."""

    def clip(self, limit):
        return super().clip(1.5 * limit)


class Unclipped(ZeroSystem):
    """The norm is measured, and nothing is clipped."""

    def clip(self, limit):
        return super().clip(float("inf"))


class Untied(ZeroSystem):
    """The head has a copy of the embedding's weights."""

    def __init__(self, task, config):
        def build():
            model = task.build()
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
            return model

        super().__init__(_with(task, build=build), config)


class Shifted(ZeroSystem):
    """Something draws a random number before forward."""

    def micro_step(self, batch, weight, last):
        torch.rand(1)
        return super().micro_step(batch, weight, last)


class ShiftedInside(ZeroSystem):
    """Something draws a random number inside of the model."""

    def __init__(self, task, config):
        super().__init__(task, config)
        self.model.transformer.h[1].register_forward_pre_hook(lambda *_: torch.rand(1) and None)


class OtherData(ZeroSystem):
    """The last rank trains on the data of the first."""

    def __init__(self, task, config):
        super().__init__(task, config)
        self._calls = 0

    def micro_step(self, batch, weight, last):
        step, number = divmod(self._calls, self._task.accumulation)
        self._calls += 1
        others = self._task.batch(0, step, number) if dist.get_rank() == dist.get_world_size() - 1 else batch
        return super().micro_step(others, weight, last)


class OtherRate(ZeroSystem):
    """Norms and biases get the learning rate of the matrices."""

    def step(self):
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.param_groups[1]["lr"] = rates[0]
        super().step()
        self.optimizer.param_groups[1]["lr"] = rates[1]


class UncorrectedAdamW(torch.optim.Optimizer):
    """AdamW without the correction of its moments' bias."""

    def __init__(self, params, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": 1e-3, "weight_decay": 0.0, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(param.grad, 1 - group["betas"][0])
                state["exp_avg_sq"].lerp_(param.grad.square(), 1 - group["betas"][1])
                param.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt() + group["eps"], value=-group["lr"])


class Uncorrected(ZeroSystem):
    """Adam's moments are used as they are."""

    def __init__(self, task, config):
        groups = task.make_optimizer
        super().__init__(
            _with(task, make_optimizer=lambda model: UncorrectedAdamW(groups(model).param_groups)), config
        )


class Decayed(ZeroSystem):
    """Weight decay acts on norms and biases, too."""

    def step(self):
        self.optimizer.param_groups[1]["weight_decay"] = self.optimizer.param_groups[0]["weight_decay"]
        super().step()


class WronglyAveraged(ZeroSystem):
    """Losses are averaged over micro-batches, whatever their numbers of tokens."""

    def micro_step(self, batch, weight, last):
        return super().micro_step(batch, 1 / self._task.accumulation, last)


class Unfrozen(ZeroSystem):
    """What the user has frozen is trained."""

    def __init__(self, task, config):
        def build():
            return task.build().requires_grad_(True)

        super().__init__(_with(task, build=build), config)


class MovedFrozen(ZeroSystem):
    """What the user has frozen is said to be, and changes all the same."""

    def step(self):
        super().step()
        frozen = self.model.transformer.wpe.weight
        with torch.no_grad(), gathered_parameters(frozen, write=True):
            frozen.mul_(1.001)


class DoubledLayer(ZeroSystem):
    """The backward of one layer gives twice what it should give."""

    def micro_step(self, batch, weight, last):
        layer = self.model.transformer.h[2]
        handle = layer.register_forward_hook(lambda module, args, output: _Doubled.apply(output))
        try:
            return super().micro_step(batch, weight, last)
        finally:
            handle.remove()


class _Doubled(torch.autograd.Function):
    """Identity in forward, a factor of 2 in backward."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class OtherKernel(ZeroSystem):
    """One layer computes something else."""

    def __init__(self, task, config):
        super().__init__(task, config)
        self.model.transformer.h[1].mlp.act.forward = lambda value: nn.functional.relu(value)


def _with(task, **changes):
    return type(task)(**{**vars(task), **changes})


# fault -> (promise that fails, words of the cause)
FAULTS = {
    Scaled: ("gradients", "every gradient is 2 times what it should be: scaled by N, summed over the 2 ranks"),
    Dropped: ("gradients", "every gradient is without micro-batch 0 of rank 1: dropped"),
    Stale: ("losses", r"'transformer.h.1.[\w.]+' is computed with other values .*: stale weights"),
    Clipped: ("clipping", "clipping: to a norm of .* and the limit is"),
    Unclipped: ("clipping", "clipping: nothing was clipped"),
    Untied: ("structure", "tied weight untied: 'lm_head.weight' is 'transformer.wte.weight' in the model"),
    Shifted: ("random numbers", "random numbers shifted: the generator of rank 0 stands elsewhere"),
    ShiftedInside: ("losses", "the generator stands elsewhere when module 'transformer.h.1"),
    OtherData: ("data", "rank 1 computes with other data than it was given: micro-batch 0"),
    OtherRate: ("updates", r"learning rate of 0\.001 on .*, where 0\.0005 is asked for: that of group 0"),
    Uncorrected: ("updates", "missing bias correction"),
    Decayed: ("updates", r"weight decay of 0\.01 on '.*ln_1\.weight', .* where 0 is asked for"),
    WronglyAveraged: ("gradients", "the loss is averaged over micro-batches and not over tokens"),
    Unfrozen: ("structure", "frozen parameter trained: 'transformer.wpe.weight'"),
    MovedFrozen: ("frozen parameters", "frozen parameter trained: 'transformer.wpe.weight' has changed"),
    DoubledLayer: ("gradients", r"the gradient of 'transformer\.h\.0.* is 2 times what it should be"),
    OtherKernel: (
        "losses",
        "module 'transformer.h.1.mlp.act' is the first one that returns something else for the same",
    ),
}
