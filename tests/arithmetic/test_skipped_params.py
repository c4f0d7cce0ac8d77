"""A step leaves parameters without a gradient as they were, and the host does not wait to know which these are."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hf_zero
from tests.support.harness import distributed
from tests.support.nets import Net, batches, micro, seeded
from tests.support.reference import Plan, check_stages


class Waits(TorchDispatchMode):
    """Counts how often a value of a tensor is asked for on the host."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Later(Net):
    """A spare layer that only later calls use."""

    turn = 0

    def __init__(self, first=2):
        super().__init__()
        self.first, self.spare = first, nn.Linear(8, 8)

    def route(self, x):
        self.turn += 1
        x = super().route(x)
        return self.spare(x) if self.turn > self.first else x


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.5),
        functools.partial(torch.optim.RMSprop, lr=1e-3, eps=1e-3, weight_decay=0.5, momentum=0.9),
    ],
)
@distributed(world_size=2)
def test_state_of_a_parameter_begins_with_its_first_gradient(optimizer):
    """Weight decay enters the momentum: not that of a layer which the step must not touch."""
    check_stages(seeded(Later), batches, Plan(steps=5), micro=micro, optimizer=optimizer)


@pytest.mark.parametrize("stage", [0, 2])
@distributed(world_size=2)
def test_the_host_does_not_wait_to_know_what_is_unused(stage):
    model = seeded(functools.partial(Later, first=99))()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = hf_zero.shard(model, optimizer, {"zero_stage": stage})
    for number in range(2):
        micro(model, batches(dist.get_rank(), number), engine.backward)
        with Waits() as waits:
            optimizer.step()
        optimizer.zero_grad()
    assert waits.number == 0, waits.number
