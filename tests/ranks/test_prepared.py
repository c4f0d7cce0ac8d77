"""A prepared model can be moved to where it is, cast, copied and pickled, without being gathered as a whole."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.core import engine as prepared_module
from hf_zero.core import guard
from hf_zero.core.engine import engine_of
from hf_zero.core.unit import UnitState
from hf_zero.errors import ZeroRuntimeError
from tests.support.harness import distributed
from tests.support.nets import Net, batches, micro, seeded
from tests.support.reference import SGD, whole_weights


STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Buffered(Net):
    """With a buffer that counts and one that scales."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(8))

    def route(self, x):
        self.calls += 1
        return super().route(x * self.scale)


def prepared(stage=3, **config):
    model = seeded(Buffered)()
    optimizer = SGD(model.parameters())
    return model, optimizer, hf_zero.shard(model, optimizer, {"zero_stage": stage, **config})


def train_step(model, optimizer, engine, number=0):
    micro(model, batches(dist.get_rank(), number), engine.backward)
    optimizer.step()
    optimizer.zero_grad()


def states(engine):
    """The state of each unit; a refresh that the last step began counts as done, for any reader may wait for it."""
    done = {UnitState.GATHERING: UnitState.READY}
    return {unit.name: done.get(unit.state, unit.state) for unit in engine.units}


# ------------------------------------------------------------------------------------------------- moves and casts


MOVES = {
    "to its device": lambda model: model.to("cpu"),
    "to its dtype": lambda model: model.to(torch.float32),
    "to both": lambda model: model.to(device="cpu", dtype=torch.float32, non_blocking=True),
    "cpu": lambda model: model.cpu(),
    "float": lambda model: model.float(),
}


@pytest.mark.parametrize("name", MOVES)
@STAGES
@distributed(world_size=2)
def test_a_move_to_where_it_is_gathers_nothing(name, stage):
    model, optimizer, engine = prepared(stage)
    train_step(model, optimizer, engine)
    before = states(engine)
    engine.comm.traffic.clear()
    assert MOVES[name](model) is model
    assert not engine.comm.traffic.calls, engine.comm.traffic.calls
    assert states(engine) == before
    train_step(model, optimizer, engine, 1)


@distributed(world_size=2)
def test_what_was_added_since_is_moved():
    model, _, _ = prepared()
    model.late = nn.Linear(2, 2, device="meta")
    model.register_buffer("later", torch.ones(2, dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="meta"):
        model.to("cpu")
    model.late = nn.Linear(2, 2, dtype=torch.float64)
    model.to(torch.float32)
    assert {model.late.weight.dtype, model.late.bias.dtype, model.later.dtype} == {torch.float32}


@STAGES
@distributed(world_size=2)
def test_a_cast_changes_what_is_computed_and_not_the_masters(stage):
    """As `model.to(bfloat16)` of an ordinary model; the cast back loses nothing that is trained."""
    model, optimizer, engine = prepared(stage)
    train_step(model, optimizer, engine)
    masters = [master.detach().clone() for master in engine.masters]
    weights, twin = whole_weights(model), seeded(Buffered)()
    twin.load_state_dict({**twin.state_dict(), **weights})
    twin.to(torch.bfloat16)
    assert model.to(torch.bfloat16) is model
    assert {p.dtype for p in model.parameters()} == {model.scale.dtype} == {torch.bfloat16}
    assert model.calls.dtype == torch.long
    x, y = batches(dist.get_rank(), 1)
    with torch.no_grad():
        assert torch.equal(model(x.bfloat16()), twin(x.bfloat16()))
    for present, master in zip(engine.masters, masters, strict=True):
        assert torch.equal(present, master)
    model.to(torch.float32)
    for name, value in whole_weights(model).items():
        assert torch.equal(value, weights[name]), name
    reference, other, other_engine = prepared(stage)
    train_step(reference, other, other_engine)
    for triple in ((model, optimizer, engine), (reference, other, other_engine)):
        train_step(*triple, 1)
    for (name, value), wanted in zip(whole_weights(model).items(), whole_weights(reference).values(), strict=True):
        assert torch.equal(value, wanted), name


@STAGES
@distributed(world_size=2)
def test_a_model_that_was_cast_trains_in_that_precision(stage):
    model, optimizer, engine = prepared(stage)
    model.to(torch.bfloat16)
    before = whole_weights(model)
    x, y = batches(dist.get_rank(), 0)
    for _ in range(3):
        engine.backward(nn.functional.cross_entropy(model(x.bfloat16()).float(), y))
        optimizer.step()
        optimizer.zero_grad()
    assert {master.dtype for master in engine.masters} == {torch.float32}
    after = whole_weights(model)
    assert all(value.dtype == torch.bfloat16 and value.isfinite().all() for value in after.values())
    assert not all(torch.equal(value, before[name]) for name, value in after.items())


@STAGES
@distributed(world_size=2)
def test_what_cannot_be_converted_is_refused(stage):
    model, optimizer, engine = prepared(stage)
    train_step(model, optimizer, engine)
    for convert in (lambda: model.to("meta"), lambda: model.double(), lambda: model.to(torch.float64)):
        with pytest.raises(ValueError, match=r"cannot make a prepared parameter.*before it is prepared"):
            convert()
        assert model.scale.dtype == torch.float32 and model.scale.device.type == "cpu", "nothing was changed"
    if stage == 3:
        with pytest.raises(ValueError, match="gathered_parameters"), hf_zero.gathered_parameters(model):
            model.to(torch.bfloat16)
    train_step(model, optimizer, engine, 1)


# ---------------------------------------------------------------------------------------------------------- copies


def check_is_plain(twin, model):
    """An ordinary model with the same values, that neither knows an engine nor calls one."""
    weights = whole_weights(model)
    assert type(twin) is Buffered and engine_of(twin) is None and type(twin).__mro__ == Buffered.__mro__
    for name, param in twin.named_parameters():
        assert type(param) is nn.Parameter and torch.equal(param, weights[name]), name
        assert not hasattr(param, "_zero_owner"), name
    for module in twin.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks, module
    calls = engine_of(model).comm.traffic.calls.copy()
    x, y = batches(0, 5)
    nn.functional.cross_entropy(twin(x), y).backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert engine_of(model).comm.traffic.calls == calls, "the copy drives the engine of the original"


@STAGES
@distributed(world_size=2)
def test_a_deep_copy_is_ordinary_and_made_a_unit_at_a_time(stage):
    model, optimizer, engine = prepared(stage, param_access="raise")
    train_step(model, optimizer, engine)
    before, together, stock = states(engine), [], guard.ReadyParameter.__deepcopy__

    def watched(param, memo):
        together.append(sum(unit.sharded and unit.state is UnitState.READY for unit in engine.units))
        return stock(param, memo)

    guard.ReadyParameter.__deepcopy__ = watched
    engine.comm.traffic.clear()
    twin = copy.deepcopy(model)
    assert states(engine) == before
    assert len(together) >= len(list(model.parameters())) and max(together) == (stage == 3), together
    assert engine.comm.traffic.calls["all_gather"] == (len(engine.units) if stage == 3 else 0), (
        engine.comm.traffic.calls
    )
    check_is_plain(twin, model)
    train_step(model, optimizer, engine, 1)


@distributed(world_size=2)
def test_a_copy_of_what_holds_a_prepared_model_holds_an_ordinary_one():
    model, _, _ = prepared()
    twin = copy.deepcopy(nn.ModuleDict({"policy": model, "same": model}))
    assert twin["policy"] is twin["same"]
    check_is_plain(twin["policy"], model)


@distributed(world_size=2)
def test_a_shallow_copy_shares_everything_and_gathers_nothing():
    model, _, engine = prepared()
    engine.comm.traffic.clear()
    twin = copy.copy(model)
    assert twin.layers is model.layers and engine_of(twin) is engine and not engine.comm.traffic.calls


@pytest.mark.parametrize("save", [torch.save, pickle.dump])
@STAGES
@distributed(world_size=2)
def test_a_pickled_model_is_ordinary(stage, save):
    model, optimizer, engine = prepared(stage)
    train_step(model, optimizer, engine)
    before, file = states(engine), io.BytesIO()
    save(model, file)
    assert states(engine) == before
    assert b"hf_zero" not in file.getvalue(), "it must load where hf_zero is not installed"
    file.seek(0)
    check_is_plain(torch.load(file, weights_only=False) if save is torch.save else pickle.load(file), model)
    train_step(model, optimizer, engine, 1)


@distributed(world_size=2)
def test_a_pickled_part_of_a_model_is_ordinary():
    model, optimizer, engine = prepared()
    weights = whole_weights(model)
    layer = pickle.loads(pickle.dumps(model.layers[1]))
    for name, param in layer.named_parameters():
        assert type(param) is nn.Parameter and torch.equal(param, weights[f"layers.1.{name}"]), name
    layer(torch.randn(2, 8)).sum().backward()


@distributed(world_size=2, timeout=120)
def test_a_copy_on_one_rank_names_the_ranks_that_are_missing():
    prepared_module.MEETING_SECONDS = 1.0
    model, _, _ = prepared()
    if dist.get_rank() == 0:
        with pytest.raises(ZeroRuntimeError, match=r"copying the model, but rank\(s\) \[1\] of 2 did not call it"):
            copy.deepcopy(model)
    dist.barrier()
