"""What ranks enqueue says how much is held on a device: reductions under way, and nothing new between steps."""

import pytest
import torch
from torch import nn

from tests.support.allocator import replay
from tests.support.happens_before import Compute, Section, reductions_under_way
from tests.support.networks import NETWORKS, loss_of_network
from tests.support.recorder import record


STAGES = (0, 1, 2, 3)
WIDTH = 16


class Words(nn.Module):
    """Layers of one size between an embedding and a head that are larger than three of them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1024, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))
        self.head = nn.Linear(WIDTH, 1024, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


@pytest.mark.parametrize("stage", (2, 3))
def test_reductions_under_way_hold_no_more_than_two_layers(stage):
    """A larger one goes on by itself, and nothing does while the gradient of a larger one is made."""

    def program(recording):
        model = Words()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = recording.shard(model, optimizer, zero_stage=stage)
        for _ in range(2):
            engine.backward(model(torch.arange(4)).square().mean())
            optimizer.step()

    for log in record(program):
        layer, large = (numel * 4 * 3 // 2 for numel in (WIDTH * WIDTH, 1024 * WIDTH))  # sums over 2 ranks beside it
        moments = [held for _, held in reductions_under_way(log)]
        assert 2 * layer in moments and {held for held in moments if held > 2 * layer} <= {large}, set(moments)
        made = [
            held
            for event, held in reductions_under_way(log)
            if isinstance(event, Compute) and event.name == "embedding_dense_backward"
        ]
        assert made == [0, 0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["rooted", "adapted"])
def test_steps_leave_no_memory_behind_and_no_holes(name, stage):
    """What is held between steps stays the same, and what an allocator has to reserve for a step is found early."""

    def program(recording):
        model = NETWORKS[name]()
        optimizer = torch.optim.AdamW(model.parameters())
        engine = recording.shard(model, optimizer, zero_stage=stage)
        for number in range(6):
            engine.backward(loss_of_network(model, number))
            optimizer.step()
            optimizer.zero_grad()
            recording.section("between steps")

    log = record(program)[0]
    ends = [index for index, event in enumerate(log) if isinstance(event, Section)]
    allocators = [replay(log[:end]) for end in ends]
    held, reserved = [each.held for each in allocators], [each.reserved for each in allocators]
    assert len(set(held[1:])) == 1, held
    assert len(set(reserved[2:])) == 1, reserved
