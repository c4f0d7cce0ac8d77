"""A shard away from the device owes its step: when it is made, by which numbers, and what may happen in between."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.core.engine import ZeroEngine
from tests.support.far_home import far_homes
from tests.support.harness import distributed
from tests.support.nets import Net, batches, micro, seeded


class Counting(torch.optim.SGD):
    """Counts the tensors that it steps."""

    stepped = 0

    def step(self, closure=None):
        for group in self.param_groups:
            Counting.stepped += sum(param.grad is not None for param in group["params"])
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """Draws numbers for every step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(torch.rand_like(param), alpha=0.0)
        return super().step(closure)


class Interrupted(torch.optim.SGD):
    """Fails where a test says so."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            raise KeyError("interrupted")
        return super().step(closure)


def _prepared(kind=Counting, stage=3, homes=far_homes, **options):
    model = seeded(functools.partial(Net, depth=4))()
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9, **options)
    engine = ZeroEngine(model, hf_zero.ZeroConfig(zero_stage=stage), homes=homes() if homes else None)
    engine.attach_optimizer(optimizer)
    return model, optimizer, engine


def _pass(model, engine, number=0):
    micro(model, batches(dist.get_rank(), number), engine.backward)


def _weights(model):
    with hf_zero.gathered_parameters(model):
        return [param.detach().clone() for param in model.parameters()]


def _same(ours, others):
    assert all(map(torch.equal, ours, others)), [(a - b).abs().max() for a, b in zip(ours, others, strict=True)]


@distributed(world_size=2)
def test_a_step_is_made_when_its_unit_is_gathered():
    model, optimizer, engine = _prepared()
    _pass(model, engine)
    Counting.stepped = 0
    optimizer.step()
    assert Counting.stepped == 0, "step() makes none of them"
    seen = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: seen.append(Counting.stepped))
    with torch.no_grad():
        model(batches(0, 0)[0])
    # The unit that is computed with, and the one that is gathered ahead of it.
    owed = [len(unit.buffers[0].master_shards) for unit in engine.units]
    assert seen == sorted(seen) and 0 < seen[0] < sum(owed) and Counting.stepped == sum(owed), (seen, owed)


@distributed(world_size=2)
def test_below_stage_three_steps_are_made_at_once():
    model, optimizer, engine = _prepared(stage=2)
    _pass(model, engine)
    Counting.stepped = 0
    optimizer.step()
    assert Counting.stepped == sum(len(b.master_shards) for b in engine.buffers)


class Detour(Net):
    """Leaves a layer out when it is told to."""

    short = False

    def route(self, x):
        for layer in self.layers[: 2 if self.short else 4]:
            x = layer(x)
        return x


@distributed(world_size=2)
def test_what_a_forward_pass_does_not_reach_is_stepped_before_the_next_step():
    model = seeded(functools.partial(Detour, depth=4))()
    optimizer = Counting(model.parameters(), lr=0.1)
    engine = ZeroEngine(model, hf_zero.ZeroConfig(zero_stage=3), homes=far_homes())
    engine.attach_optimizer(optimizer)
    _pass(model, engine)
    optimizer.step()
    optimizer.zero_grad()
    model.short = True
    Counting.stepped = 0
    _pass(model, engine)
    shards = [len(unit.buffers[0].master_shards) for unit in engine.units]
    assert Counting.stepped < sum(shards), "the last layers are still to be stepped"
    optimizer.step()
    assert Counting.stepped == sum(shards), (Counting.stepped, shards)


def _change_options(optimizer):
    for group in optimizer.param_groups:
        group["lr"], group["momentum"] = 99.0, 0.5


CHANGES = {
    "options": lambda model, optimizer, engine: _change_options(optimizer),
    "zero_grad": lambda model, optimizer, engine: optimizer.zero_grad(),
    "zero_grad in place": lambda model, optimizer, engine: optimizer.zero_grad(set_to_none=False),
    "zero_grad of the model": lambda model, optimizer, engine: model.zero_grad(),
    "clipping": lambda model, optimizer, engine: engine.clip_grad_norm_(1e-6),
    "a gradient written": lambda model, optimizer, engine: model.head.bias.grad.fill_(99.0),
}


@pytest.mark.parametrize("name", CHANGES)
@distributed(world_size=2)
def test_what_happens_after_a_step_does_not_change_it(name):
    results = []
    for homes in (None, far_homes):
        model, optimizer, engine = _prepared(homes=homes)
        _pass(model, engine)
        optimizer.step()
        CHANGES[name](model, optimizer, engine)
        results.append(_weights(model))
    _same(*results)


@distributed(world_size=2)
def test_gradients_stay_until_zero_grad():
    model, optimizer, engine = _prepared()
    _pass(model, engine)
    before = model.head.weight.grad.clone()
    optimizer.step()
    assert torch.equal(model.head.weight.grad, before)
    optimizer.zero_grad()
    assert model.head.weight.grad is None


@pytest.mark.parametrize("zeroes", [True, False])
@distributed(world_size=2)
def test_a_step_that_failed_has_taken_no_gradient(zeroes):
    results = []
    for homes in (None, far_homes):
        model, optimizer, engine = _prepared(Interrupted, homes=homes)
        _pass(model, engine, 0)
        optimizer.fails = True
        with pytest.raises(KeyError, match="interrupted"):
            optimizer.step()
        optimizer.fails = False
        if zeroes:
            optimizer.zero_grad()
        _pass(model, engine, 1)
        optimizer.step()
        results.append(_weights(model))
    _same(*results)


@distributed(world_size=2)
def test_a_step_inside_a_forward_pass_draws_none_of_its_numbers():
    model, optimizer, engine = _prepared(Noisy)
    _pass(model, engine)
    optimizer.step()
    torch.manual_seed(3)
    with torch.no_grad():
        model(batches(0, 0)[0])
    drawn = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(3))


@distributed(world_size=2)
def test_a_failed_step_is_told_to_everybody_who_asks():
    model, optimizer, engine = _prepared(Interrupted)
    _pass(model, engine)
    optimizer.step()
    Interrupted.fails = True
    for _ in range(2):
        with pytest.raises(KeyError, match="interrupted"):
            engine.settle()


WRITES = {
    "data": lambda model: model.layers[1].up.weight.data.mul_(3.0),
    "in place": lambda model: nn.init.ones_(model.layers[1].up.weight),
    "gathered": lambda model: _write_gathered(model),
    "another shape": lambda model: setattr(model.head.weight, "data", torch.ones(5, 8)),
}


def _write_gathered(model):
    with hf_zero.gathered_parameters(model.layers[1].up.weight, write=True):
        model.layers[1].up.weight.data.add_(1.0)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", WRITES)
@distributed(world_size=2)
def test_a_write_between_steps_meets_the_weights_after_the_step(name, stage):
    results = []
    for homes in (None, far_homes):
        model, optimizer, engine = _prepared(homes=homes, stage=stage)
        _pass(model, engine)
        optimizer.step()
        optimizer.zero_grad()
        WRITES[name](model)
        if name == "another shape":
            model.head.bias.data = torch.ones(5)
        _pass(model, engine, 1)
        optimizer.step()
        results.append(_weights(model))
    _same(*results)


@distributed(world_size=2)
def test_state_moves_along_when_groups_and_structure_change():
    results = []
    for homes in (None, far_homes):
        model = seeded(functools.partial(Net, depth=4))()
        for param in model.layers[0].parameters():
            param.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.layers[1:].parameters(), lr=0.1)
        engine = ZeroEngine(model, hf_zero.ZeroConfig(zero_stage=3), homes=homes() if homes else None)
        engine.attach_optimizer(optimizer)
        for number in range(2):
            _pass(model, engine, number)
            optimizer.step()
            optimizer.zero_grad()
        for param in model.layers[0].parameters():
            param.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.layers[0].parameters()), "lr": 0.01})
        for number in range(2, 4):
            _pass(model, engine, number)
            optimizer.step()
            optimizer.zero_grad()
        engine.undo()
        results.append([param.detach().clone() for param in model.parameters()])
    _same(*results)


@distributed(world_size=2)
def test_one_shard_is_open_at_a_time_and_none_is_left_behind():
    homes = far_homes(limit=1024)
    model = seeded(lambda: Net(depth=2))()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = ZeroEngine(model, hf_zero.ZeroConfig(zero_stage=3), homes=homes)
    engine.attach_optimizer(optimizer)
    for number in range(2):
        _pass(model, engine, number)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state_dict()
    engine.settle()
    assert homes.optimizer.most_open <= 2, "a shard, and the copy that follows it"
    assert torch.isnan(engine.masters[0]).all(), "at rest there is nothing to be read"
    engine.undo()
    assert homes.optimizer.shelves == 0, homes.optimizer.shelves
