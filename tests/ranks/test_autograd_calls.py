"""Ways of calling a model and its backward that break engines: each trains as it does without hf_zero."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support import zoo
from tests.support.harness import distributed
from tests.support.nets import Block, Net, batches, micro, seeded
from tests.support.reference import Plan, check_stages


check_net = functools.partial(check_stages, batches=batches, micro=micro)


# --------------------------------------------------------------------------------------------- how modules are called


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "t5", "mixtral"])
@distributed(world_size=2)
def test_gradient_checkpointing_of_transformers(name, reentrant):
    def build():
        model = zoo.build(name)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        return model

    check_stages(build, functools.partial(zoo.batch, name), Plan(accumulation=2))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("span", [1, 2, 3])
@distributed(world_size=2)
def test_checkpoint_over_one_or_several_layers(reentrant, span):
    class Checkpointed(Net):
        def route(self, x):
            for first in range(0, len(self.layers), span):
                x = checkpoint(nn.Sequential(*self.layers[first : first + span]), x, use_reentrant=reentrant)
            return x

    check_net(seeded(Checkpointed))


@distributed(world_size=2)
def test_checkpoints_inside_checkpoints():
    class Nested(Net):
        def route(self, x):
            inner = functools.partial(checkpoint, self.layers[1], use_reentrant=False)
            x = checkpoint(lambda h: inner(self.layers[0](h)), x, use_reentrant=False)
            return self.layers[2](x)

    check_net(seeded(Nested))


@distributed(world_size=2)
def test_a_module_is_called_several_times():
    class Repeated(Net):
        def route(self, x):
            for _ in range(2):
                x = self.layers[0](x)
                x = self.layers[1](self.layers[1](x))
            return x * self.layers[2](x)

    check_net(seeded(Repeated), plan=Plan(accumulation=2))


@distributed(world_size=2)
def test_layers_run_backwards_and_forwards_in_turn():
    """The order of a step says nothing about the next."""

    class Turning(Net):
        turn = 0

        def route(self, x):
            self.turn += 1
            for layer in self.layers if self.turn % 2 else reversed(self.layers):
                x = layer(x)
            return x

    check_net(seeded(Turning), plan=Plan(steps=5))


@distributed(world_size=2)
def test_one_layer_stands_twice_in_the_list():
    def make():
        net = Net()
        net.layers[2] = net.layers[0]
        return net

    check_net(seeded(make))


@distributed(world_size=2)
def test_a_layer_lives_in_another_layer():
    class Outer(Block):
        def __init__(self):
            super().__init__()
            self.inner = Block()

        def forward(self, x):
            return self.inner(super().forward(x))

    check_net(seeded(lambda: Net(block=Outer)))


@distributed(world_size=2)
def test_a_parameter_of_the_top_module():
    class Rooted(Net):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(8))
            self.scale = nn.Parameter(torch.tensor(1.5))

        def route(self, x):
            return super().route(x * self.scale + self.shift) * self.scale

    check_net(seeded(Rooted))


@distributed(world_size=2)
def test_nested_and_empty_outputs():
    class Talkative(Block):
        def forward(self, x, *, notes, flag=None):
            out = super().forward(x)
            return {"hidden": (out, None, {"aux": [out.pow(2).mean()]}), "notes": [*notes, "seen"], "count": 3}

    class Listening(Net):
        def route(self, x):
            notes, aux = [], 0
            for layer in self.layers:
                out = layer(x, notes=notes)
                x, notes = out["hidden"][0], out["notes"]
                aux = aux + out["hidden"][2]["aux"][0]
            assert len(notes) == 3
            return x + aux

    check_net(seeded(lambda: Listening(block=Talkative)))


@distributed(world_size=2)
def test_hidden_states_and_attentions_feed_the_loss():
    def deep(model, batch, backward):
        out = model(**batch, output_hidden_states=True)
        loss = out.loss + sum(h.pow(2).mean() for h in out.hidden_states)
        backward(loss)
        return loss

    check_stages(functools.partial(zoo.build, "llama_tied"), functools.partial(zoo.batch, "llama_tied"), micro=deep)


@distributed(world_size=2)
def test_inputs_that_need_gradients():
    def probing(model, batch, backward):
        x, y = batch
        x = x.clone().requires_grad_()
        loss = F.cross_entropy(model(x), y)
        backward(loss)
        return loss + x.grad.abs().sum()

    check_stages(seeded(Net), batches, micro=probing)


# ------------------------------------------------------------------------------------- how many forwards and backwards


def _siamese(model, batch, backward):
    x, _ = batch
    loss = F.mse_loss(model(x), model(x.flip(0))) - model(-x).mean()
    backward(loss)
    return loss


def _losses_in_order(model, batch, backward):
    x, y = batch
    first, second = F.cross_entropy(model(x), y), F.cross_entropy(model(x.flip(0)), y)
    backward(first)
    backward(second)
    return first + second


def _losses_in_reverse(model, batch, backward):
    x, y = batch
    first, second = F.cross_entropy(model(x), y), F.cross_entropy(model(x.flip(0)), y)
    backward(second)
    backward(first)
    return first + second


def _twice_through_one_graph(model, batch, backward):
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    backward(loss, retain_graph=True)
    backward(loss)
    return loss


def _two_losses_of_one_forward(model, batch, backward):
    x, y = batch
    out = model(x)
    first, second = F.cross_entropy(out, y), out.pow(2).mean()
    backward(first, retain_graph=True)
    backward(second)
    return first + second


def _with_a_look_aside(model, batch, backward):
    x, y = batch
    out = model(x)
    with torch.no_grad():
        target = model(x.flip(0))
    with torch.inference_mode():
        shift = model(-x).mean().item()
    loss = F.cross_entropy(out, y) + F.mse_loss(out, target) * (1 + shift)
    backward(loss)
    return loss


def _with_a_forward_for_nothing(model, batch, backward):
    x, y = batch
    model(x.flip(0))
    loss = F.cross_entropy(model(x), y)
    model(-x)
    backward(loss)
    return loss


def _with_a_failed_forward(model, batch, backward):
    x, y = batch
    with pytest.raises(RuntimeError, match="shapes"):
        model(x[:, :2])
    hook = model.layers[1].register_forward_pre_hook(_stumble)
    with pytest.raises(InterruptedError):
        model(x)
    hook.remove()
    loss = F.cross_entropy(model(x), y)
    backward(loss)
    return loss


def _stumble(module, args):
    raise InterruptedError


def _of_a_part(model, batch, backward):
    x, _ = batch
    loss = model.layers[1](model.enter(x)).pow(2).mean()
    backward(loss)
    return loss


def _by_the_tensor_itself(model, batch, backward):
    """The loss goes through a module that the model does not own, and back."""
    x, y = batch
    hidden = model.enter(x)
    frozen = hidden.detach().requires_grad_()
    loss = F.cross_entropy(model.head(model.route(frozen)), y)
    backward(loss)
    backward((hidden * frozen.grad).sum() * 2)
    return loss


WAYS = [
    _siamese,
    _losses_in_order,
    _losses_in_reverse,
    _twice_through_one_graph,
    _two_losses_of_one_forward,
    _with_a_look_aside,
    _with_a_forward_for_nothing,
    _with_a_failed_forward,
    _of_a_part,
    _by_the_tensor_itself,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("accumulation", [1, 2])
@distributed(world_size=2)
def test_forwards_and_backwards(way, accumulation):
    # Several backward passes in one window reduce at stages 2 and 3 as several micro-batches do.
    several = way in (_losses_in_order, _losses_in_reverse, _twice_through_one_graph, _two_losses_of_one_forward)
    exact = False if several or way is _by_the_tensor_itself else None
    check_stages(seeded(Net), batches, Plan(accumulation=accumulation), micro=way, exact=exact)
