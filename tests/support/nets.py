"""Small hand-made networks and their batches, for shapes of autograd that no model of the zoo has."""

import torch
from torch import nn
from torch.nn import functional as F


WIDTH = 8


class Block(nn.Module):
    """A residual block with a matrix, a bias, a norm and a scalar."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """An input layer, a list of blocks and a head; `route(layers, x)` may be replaced to call them in other ways."""

    def __init__(self, depth=3, block=Block):
        super().__init__()
        self.enter = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList([block() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, 3)

    def route(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x):
        return self.head(self.route(self.enter(x)))


def seeded(make, seed=0):
    """A function that makes the same network at every call."""

    def build():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make()

    return build


def batches(rank, number):
    draw = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(5, 4, generator=draw), torch.randint(3, (5,), generator=draw)


def micro(model, batch, backward):
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    backward(loss)
    return loss
