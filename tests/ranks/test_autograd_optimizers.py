"""Optimizers over sharded parameters: groups, kinds, schedulers, gradient hooks, and the weights they start from."""

import functools

import pytest
import torch
import torch.distributed as dist

import hf_zero
from tests.support import zoo
from tests.support.harness import distributed
from tests.support.nets import Net, batches, micro, seeded
from tests.support.reference import SGD, STAGES, Plan, check_stages, whole_weights


check_net = functools.partial(check_stages, batches=batches, micro=micro)


def _two_groups(params):
    params = list(params)
    decayed = [p for p in params if p.ndim > 1]
    rest = [p for p in params if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": rest, "weight_decay": 0.0, "lr": 2e-3}, {"params": decayed, "weight_decay": 0.1}],
        lr=1e-3,
        eps=1e-4,
    )


def _a_group_per_parameter(params):
    groups = [{"params": [p], "lr": 0.01 * (1 + number % 5)} for number, p in enumerate(reversed(list(params)))]
    return torch.optim.SGD(groups, momentum=0.9)


def _half_of_the_parameters(params):
    return SGD(list(params)[::2])


@pytest.mark.parametrize("optimizer", [_two_groups, _a_group_per_parameter])
@pytest.mark.parametrize("name", ["llama_tied", "gpt2"])
@distributed(world_size=2)
def test_optimizer_groups(optimizer, name):
    build, draw = functools.partial(zoo.build, name), functools.partial(zoo.batch, name)
    check_stages(build, draw, Plan(accumulation=2), optimizer=optimizer)


@distributed(world_size=2)
def test_an_optimizer_that_holds_half_of_the_parameters():
    check_net(seeded(Net), optimizer=_half_of_the_parameters)


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.Adam, lr=1e-3, eps=1e-4, amsgrad=True),
        functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4, fused=True),
        functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4, foreach=True),
        functools.partial(torch.optim.RMSprop, lr=1e-3, eps=1e-3),
        functools.partial(torch.optim.Adagrad, lr=1e-2, eps=1e-3),
        functools.partial(torch.optim.NAdam, lr=1e-3, eps=1e-4),
        functools.partial(torch.optim.RAdam, lr=1e-3, eps=1e-4),
        functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    ],
    ids=lambda optimizer: "_".join(
        [optimizer.func.__name__, *(k for k, v in optimizer.keywords.items() if v is True)]
    ),
)
@distributed(world_size=2)
def test_elementwise_optimizers(optimizer):
    check_net(seeded(Net), optimizer=optimizer, exact=False)


@distributed(world_size=2)
def test_a_scheduler_of_the_raw_optimizer():
    def optimizer(params):
        made = SGD(params)
        # Created before hf_zero takes over, as Trainer's users do, and stepped by the optimizer's own hook.
        scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))
        made.register_step_post_hook(lambda *_: scheduler.step())
        return made

    check_net(seeded(Net), plan=Plan(steps=4), optimizer=optimizer)


@distributed(world_size=2)
def test_hooks_on_the_gradient_of_a_parameter():
    def make():
        net = Net()
        net.layers[1].up.weight.register_hook(lambda grad: grad * 3)
        net.head.bias.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return net

    check_net(seeded(make))


@distributed(world_size=2)
def test_ranks_that_start_apart_are_made_equal_to_the_first():
    for stage in STAGES:
        model = seeded(Net, seed=dist.get_rank())()
        hf_zero.shard(model, SGD(model.parameters()), hf_zero.ZeroConfig(zero_stage=stage))
        for (name, weight), wanted in zip(whole_weights(model).items(), seeded(Net)().parameters(), strict=True):
            assert torch.equal(weight, wanted), f"stage {stage}: {name} is not rank 0's"
