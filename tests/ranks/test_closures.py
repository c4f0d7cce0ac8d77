"""A closure that is given to `optimizer.step` is called before the step, whose gradients are those it makes."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import hf_zero
from tests.support.harness import distributed
from tests.support.nets import Net, batches, seeded
from tests.support.reference import whole_weights


def _train(with_closure, stage, **config):
    model = seeded(functools.partial(Net, depth=2))()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    engine = hf_zero.shard(model, optimizer, {"zero_stage": stage, **config})
    steps, losses = [], []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))

    def closure(number):
        optimizer.zero_grad()
        x, y = batches(dist.get_rank(), number)
        loss = F.cross_entropy(model(x), y)
        engine.backward(loss)
        return loss

    for number in range(3):
        if with_closure:
            loss = optimizer.step(functools.partial(closure, number))
        else:
            loss = closure(number)
            assert optimizer.step() is None
        losses.append(loss.item())
    optimizer.load_state_dict(optimizer.state_dict())  # torch wraps what it takes for a new class here
    optimizer.step(functools.partial(closure, 9)) if with_closure else (closure(9), optimizer.step())
    assert len(steps) == 4, "a hook ran twice"
    return losses, whole_weights(model)


@pytest.mark.parametrize("stage, config", [(0, {}), (2, {}), (3, {}), (3, {"offload_optimizer_device": "cpu"})])
@distributed(world_size=2)
def test_a_step_with_a_closure_is_backward_and_step(stage, config):
    losses, weights = _train(True, stage, **config)
    wanted, plain = _train(False, stage, **config)
    assert losses == wanted
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
