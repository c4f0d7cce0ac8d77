"""What modules return: inputs changed in place, dataclasses, objects; each trains as it does without hf_zero."""

import dataclasses
import functools
import types

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hf_zero
from hf_zero.errors import ZeroAccessError, ZeroRuntimeError
from tests.support.harness import distributed
from tests.support.nets import WIDTH, Block, Net, batches, micro, seeded
from tests.support.reference import SGD, Plan, check_stages


check_net = functools.partial(check_stages, batches=batches, micro=micro)


@dataclasses.dataclass
class Out:
    hidden: Tensor
    note: str = "a"


@dataclasses.dataclass(slots=True)
class Nested:
    inner: Out
    extra: Tensor | None = None


class Holder:
    """Not a dataclass, and it holds itself."""

    def __init__(self, hidden):
        self.parts = {"hidden": [hidden]}
        self.me = self


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


def _wrapping(wrap, unwrap):
    """A network each of whose blocks returns `wrap(hidden)`."""

    class Wrapped(Block):
        def forward(self, x):
            return wrap(super().forward(x))

    class Unwrapping(Net):
        def route(self, x):
            for layer in self.layers:
                x = unwrap(layer(x))
            return x

    return seeded(lambda: Unwrapping(block=Wrapped))


WRAPPERS = {
    "dataclass": (Out, lambda out: out.hidden),
    "nested dataclass": (lambda h: Nested(Out(h)), lambda out: out.inner.hidden),
    "dataclass beside a tensor": (lambda h: (h.pow(2).mean(), Out(h)), lambda out: out[1].hidden + out[0]),
    "object": (Holder, lambda out: out.parts["hidden"][0]),
    "namespace": (lambda h: types.SimpleNamespace(hidden=h), lambda out: out.hidden),
    "distribution": (lambda h: torch.distributions.Normal(h, 1 + h.sigmoid()), lambda out: out.mean + out.stddev),
}


@pytest.mark.parametrize("name", WRAPPERS)
@distributed(world_size=2)
def test_a_block_returns(name):
    check_net(_wrapping(*WRAPPERS[name]))


class _Rooted(Net):
    """Its last use of a weight is in the model's own forward, behind every block."""

    def __init__(self, wrap):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(super().forward(x) * self.scale)


@pytest.mark.parametrize("name", WRAPPERS)
@distributed(world_size=2)
def test_the_model_returns(name):
    wrap, unwrap = WRAPPERS[name]

    def unwrapping(model, batch, backward):
        x, y = batch
        loss = F.cross_entropy(unwrap(model(x)), y)
        backward(loss)
        return loss

    check_stages(seeded(lambda: _Rooted(wrap)), batches, micro=unwrapping)


@distributed(world_size=2)
def test_a_block_returns_its_input_changed_in_place():
    class InPlace(Block):
        def forward(self, x):
            x += super().forward(x * 1.0) * 0.5
            return x

    class Net2(Net):
        def route(self, x):
            return super().route(x * 1.0)

    check_net(seeded(lambda: Net2(block=InPlace)), plan=Plan(accumulation=2))


@distributed(world_size=2)
def test_an_input_that_is_handed_on_unchanged_belongs_to_the_call_that_made_it():
    """Its gradient is complete only at the end: a hook of the later call would gather that unit again."""

    class Passing(Block):
        def forward(self, x, bias):
            return super().forward(x + bias), bias

    class Net3(Net):
        def route(self, x):
            bias = x * 0.1
            for layer in self.layers:
                x, bias = layer(x, bias)
            return x

    build = seeded(lambda: Net3(block=Passing))
    check_net(build)
    model = build()
    engine = hf_zero.shard(model, None, {"zero_stage": 3})
    for number in range(2):
        engine.comm.traffic.clear()
        micro(model, batches(0, number), engine.backward)
    in_forward = len(engine.units)
    again = [unit for unit in engine.units if unit.name != engine.units[-1].name]
    assert engine.comm.traffic.calls["all_gather"] <= in_forward + len(again), engine.comm.traffic.calls


@distributed(world_size=2)
def test_an_output_without_a_tensor_is_refused_where_it_is_to_be_differentiated():
    build = _wrapping(Slotted, lambda out: out.hidden)
    model = build()
    engine = hf_zero.shard(model, SGD(model.parameters()), {"zero_stage": 3})
    x, _ = batches(0, 0)
    with pytest.raises(ZeroRuntimeError, match=r"'layers\.0'.*Slotted.*dataclass.*no_grad"):
        model(x)
    with torch.no_grad():
        model(x)
    for stage in (0, 1, 2):  # nothing is released there
        model = build()
        engine = hf_zero.shard(model, SGD(model.parameters()), {"zero_stage": stage})
        engine.backward(model(x).sum())


@distributed(world_size=2)
def test_a_backward_that_reads_released_weights_says_so():
    """The gradient comes in through a tensor that was never returned."""
    seen = []

    class Leaking(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

        def forward(self, x):
            seen.append(self.inner(x))
            return seen[-1].detach()

    model = seeded(lambda: Net(block=Leaking))()
    engine = hf_zero.shard(model, SGD(model.parameters()), {"zero_stage": 3})
    x, _ = batches(0, 0)
    model(x)
    with pytest.raises(ZeroAccessError, match="weights that are released.*return"):
        engine.backward(seen[1].sum())
    engine.zero_grad()
    micro(model, batches(0, 0), engine.backward)  # the engine is usable afterwards


# ----------------------------------------------------------------------------------------------------- second order


def _penalty(model, x):
    """The norm of the gradient that the input gets, itself to be differentiated."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return grad.pow(2).sum()


@distributed(world_size=2)
def test_gradients_of_gradients_are_refused_where_weights_are_released():
    x, _ = batches(0, 0)
    for stage in (0, 1, 2, 3):
        model = seeded(Net)()
        engine = hf_zero.shard(model, SGD(model.parameters()), {"zero_stage": stage})
        if stage < 3:
            engine.backward(_penalty(model, x))
            continue
        with pytest.raises(ZeroRuntimeError, match="create_graph.*stage 2"):
            _penalty(model, x)
        with pytest.raises(ZeroRuntimeError, match="create_graph.*stage 2"):
            engine.backward(model(x).sum(), create_graph=True)
        engine.zero_grad()
        micro(model, batches(0, 0), engine.backward)


@distributed(world_size=2)
def test_a_gradient_penalty_where_weights_stay_whole():
    def penalised(model, batch, backward):
        x, y = batch
        loss = F.cross_entropy(model(x), y) + 0.1 * _penalty(model, x)
        backward(loss)
        return loss

    check_stages(seeded(Net), batches, micro=penalised, stages=(0, 1, 2))
