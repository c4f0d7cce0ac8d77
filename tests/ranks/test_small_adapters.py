"""Adapters that are small beside a frozen model stay whole at stage 3: one gather for each unit, and not two."""

import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from tests.support.fake_group import fake_group
from tests.support.harness import distributed


DEPTH, WIDTH = 4, 256


class Adapted(nn.Module):
    """A frozen layer with a trained product of two narrow ones beside it."""

    def __init__(self, rank):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x):
        return x + self.base(x).tanh() + self.up(self.down(x))


class Stack(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.layers = nn.ModuleList(Adapted(rank) for _ in range(DEPTH))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def prepare(stage, rank=1, **config):
    torch.manual_seed(0)
    model = Stack(rank)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.01)
    return model, optimizer, hf_zero.shard(model, optimizer, {"zero_stage": stage, **config})


def train(model, optimizer, engine, number):
    torch.manual_seed(10 * number + dist.get_rank())
    engine.backward(model(torch.randn(3, WIDTH)))
    optimizer.step()
    optimizer.zero_grad()


def gathers_and_sums(**options):
    model, optimizer, engine = prepare(3, **options)
    for number in range(2):
        train(model, optimizer, engine, number)
    engine.comm.traffic.clear()
    train(model, optimizer, engine, 2)
    calls = engine.comm.traffic.calls
    return calls["all_gather"], calls["reduce_scatter"]


@distributed(world_size=1)
def test_collectives_of_a_step():
    with fake_group(8):
        # In forward and backward, but for the last layer; and once the adapters that the step has changed.
        assert gathers_and_sums() == (2 * DEPTH - 1 + 1, 1)
        # What is not small is sharded: a second gather of each unit.
        assert gathers_and_sums(rank=16) == (2 * (2 * DEPTH - 1), DEPTH)
        # The cap on all that stays whole holds for adapters.
        assert gathers_and_sums(stage3_model_persistence_threshold=2 * WIDTH)[0] > 2 * DEPTH


@distributed(world_size=2)
def test_the_same_bits_as_at_stage_2():
    found = {}
    for stage in (2, 3):
        model, optimizer, engine = prepare(stage)
        for number in range(3):
            train(model, optimizer, engine, number)
        with hf_zero.gathered_parameters(model):
            found[stage] = [param.detach().clone() for param in model.parameters()]
    assert all(map(torch.equal, found[2], found[3]))
