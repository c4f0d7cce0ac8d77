"""Networks that are called in every way an engine has to serve, and changes that can be made to them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.nets import WIDTH, Block, Net, batches, seeded


class Repeated(Net):
    def route(self, x):
        for _ in range(2):
            x = self.layers[0](x)
            x = self.layers[1](self.layers[1](x))
        return x * self.layers[2](x)


class Turning(Net):
    """The order of a step says nothing about the next."""

    turn = 0

    def route(self, x):
        self.turn += self.training
        for layer in self.layers if self.turn % 2 else reversed(self.layers):
            x = layer(x)
        return x


class Skipping(Net):
    """Another block is left out at every call."""

    turn = 0

    def route(self, x):
        self.turn += self.training
        for number, layer in enumerate(self.layers):
            if (number + self.turn) % 3:
                x = layer(x)
        return x


class Rooted(Net):
    """The top module has parameters of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def route(self, x):
        return super().route(x * self.scale + self.shift) * self.scale


class Spare(Net):
    """Parameters of the last block, of another one and of the model are never used."""

    def __init__(self, **options):
        super().__init__(**options)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.layers[1].spare = nn.Linear(3, 3)
        self.layers[-1].spare = nn.Linear(3, 3)


class Borrowing(Net):
    """A weight is read outside of its module."""

    def route(self, x):
        return super().route(x) + F.linear(x, self.layers[0].down.weight @ self.layers[2].up.weight)


class Spanning(Net):
    """Checkpoints of two blocks each."""

    reentrant = False

    def route(self, x):
        for first in range(0, len(self.layers), 2):
            x = checkpoint(nn.Sequential(*self.layers[first : first + 2]), x, use_reentrant=self.reentrant)
        return x


class SpanningReentrant(Spanning):
    reentrant = True


class Nested(Net):
    """A checkpoint inside a checkpoint."""

    def route(self, x):
        inner = functools.partial(checkpoint, self.layers[1], use_reentrant=False)
        x = checkpoint(lambda h: inner(self.layers[0](h)), x, use_reentrant=False)
        for layer in self.layers[2:]:
            x = layer(x)
        return x


class Talkative(Block):
    """Takes keywords, and answers with what holds tensors deep inside."""

    def forward(self, x, *, notes=(), flag=None):
        out = super().forward(x)
        return {"hidden": (out, None, {"aux": [out.pow(2).mean()]}), "notes": [*notes, "seen"], "count": 3}


class Listening(Net):
    def route(self, x):
        notes, aux = [], 0
        for layer in self.layers:
            out = layer(x, notes=notes)
            x, notes = out["hidden"][0], out["notes"]
            aux = aux + out["hidden"][2]["aux"][0]
        return x + aux


class Branches(Block):
    """Two ways through a block; at every call the ranks take different ones."""

    turn = 0

    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x):
        self.turn += self.training
        return self.ways[(self.turn + dist.get_rank()) % 2](super().forward(x))


class Routed(Block):
    """Experts, of which the values choose one."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x):
        x = super().forward(x)
        return x + self.experts[int(x.detach().sum().abs() * 1000) % 3](x)


class Outer(Block):
    """A block in a block."""

    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x):
        return self.inner(super().forward(x))


class Mixed(Block):
    """Parameters of two dtypes."""

    def __init__(self):
        super().__init__()
        self.fine = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x):
        x = super().forward(x)
        return x + self.fine(x.double()).float()


class Adapted(Block):
    """A frozen matrix beside trained ones of low rank."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.low, self.high = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return super().forward(x) + self.high(self.low(x))


def _frozen():
    net = Net(depth=6)
    for layer in (net.layers[1], net.layers[2].up, net.layers[4].norm, net.enter):
        layer.requires_grad_(False)
    return net


def _tied():
    net = Net(depth=5)
    net.layers[4].down.weight = net.layers[0].down.weight
    net.layers[1].up.bias = net.layers[2].up.bias
    return net


def _twice_in_the_list():
    net = Net(depth=5)
    net.layers[3] = net.layers[0]
    return net


def _some_of_experts():
    net = Net(depth=5)
    net.layers[1], net.layers[4] = Branches(), Routed()
    return net


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "blocks": seeded(lambda: Net(depth=8)),
    "one_layer": seeded(lambda: Net(depth=1)),
    "repeated": seeded(Repeated),
    "turning": seeded(lambda: Turning(depth=4)),
    "skipping": seeded(lambda: Skipping(depth=5)),
    "rooted": seeded(lambda: Rooted(depth=5)),
    "spare": seeded(lambda: Spare(depth=6)),
    "borrowing": seeded(lambda: Borrowing(depth=5)),
    "spanning": seeded(lambda: Spanning(depth=6)),
    "spanning_reentrant": seeded(lambda: SpanningReentrant(depth=6)),
    "nested": seeded(lambda: Nested(depth=5)),
    "talkative": seeded(lambda: Listening(depth=5, block=Talkative)),
    "branches": seeded(lambda: Net(depth=6, block=Branches)),
    "routed": seeded(lambda: Net(depth=6, block=Routed)),
    "some_of_experts": seeded(_some_of_experts),
    "outer": seeded(lambda: Net(depth=4, block=Outer)),
    "mixed": seeded(lambda: Net(depth=5, block=Mixed)),
    "adapted": seeded(lambda: Net(depth=6, block=Adapted)),
    "frozen": seeded(_frozen),
    "tied": seeded(_tied),
    "twice_in_the_list": seeded(_twice_in_the_list),
    "no_layers": seeded(lambda: nn.Linear(4, 3)),
    "sequential": seeded(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 6)), nn.Linear(6, 3))
    ),
}


def loss_of_network(model: nn.Module, number: int) -> torch.Tensor:
    """Of this rank's micro-batch of that number."""
    x, y = batches(dist.get_rank(), number)
    return F.cross_entropy(model(x).float(), y)


# -- changes to a network --------------------------------------------------------------------------------------------


def layers_of(net: nn.Module) -> nn.ModuleList | tuple:
    """The list of blocks of a network, or of a model of transformers; empty if it has none."""
    return max((m for m in net.modules() if isinstance(m, nn.ModuleList)), key=len, default=())


def diverge(net: nn.Module) -> None:
    """Have the last block use a parameter on the first rank only, and the first block one on all other ranks only."""
    layers = layers_of(net)
    width = net.config.hidden_size if hasattr(net, "config") else WIDTH
    for layer, first in ((layers[-1], True), (layers[0], False)) if layers else ():
        layer.expert = nn.Linear(width, width)
        layer.register_forward_pre_hook(functools.partial(_use_expert, first))


def _use_expert(first: bool, layer: nn.Module, args: tuple) -> tuple:
    x, *others = args
    return (x + layer.expert(x) if (dist.get_rank() == 0) == first else x, *others)


def checkpoint_calls(net: nn.Module, reentrant: bool) -> None:
    """Recompute every block in backward, its hooks included, as transformers' layers do by themselves."""
    if hasattr(net, "gradient_checkpointing_enable"):
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        return
    for kind in {type(layer) for layer in net.layers}:
        made = type(kind.__name__, (kind,), {"__call__": functools.partialmethod(_checkpointed, kind, reentrant)})
        for layer in net.layers:
            if type(layer) is kind:
                layer.__class__ = made


def _checkpointed(layer: nn.Module, kind: type, reentrant: bool, *args: object, **kwargs: object) -> object:
    call = functools.partial(kind.__call__, layer, **kwargs)
    return checkpoint(call, *args, use_reentrant=reentrant) if layer.training else call(*args)
