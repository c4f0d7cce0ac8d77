"""Steps that stream masters through the device: what is copied, when it has arrived, and who chooses them."""

import functools

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.core.step_place import Rates, StepPlace
from hf_zero.integrations.plain_checkpoints import LoopEngine
from tests.ranks.test_offload import Case, Wide, _compare
from tests.support.harness import distributed
from tests.support.late_lanes import Place, late_homes
from tests.support.nets import batches, micro, seeded


def _prepared(homes, **config):
    model = seeded(Wide)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = LoopEngine(model, hf_zero.ZeroConfig(zero_stage=3, **config), homes=homes)
    engine.attach_optimizer(optimizer)
    return model, optimizer, engine


def _step(model, optimizer, engine, number):
    micro(model, batches(dist.get_rank(), number), engine.backward)
    engine.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()


STREAMED = {
    "host": functools.partial(late_homes, step="device"),
    "slices near": functools.partial(late_homes, Place.DEVICE, step="device"),
}


@distributed(world_size=2)
def test_no_bit_differs_by_any_optimizer():
    for optimizer, homes in [
        ("lion", "streamed"),
        ("adamw_fused", "streamed_slices_near"),
        ("amsgrad", "streamed_disk"),
    ]:
        _compare(Case(optimizer=optimizer, homes=homes))
    _compare(Case(model="experts", homes="streamed", precision="fp16", skips=True))


@pytest.mark.parametrize("weights", STREAMED)
@distributed(world_size=2)
def test_states_go_up_and_down_once_in_a_step(weights):
    model, optimizer, engine = _prepared(STREAMED[weights](), mixed_precision="bf16")
    copied = []
    for number in range(4):
        _step(model, optimizer, engine, number)
        engine.settle()
        copied.append(dict(engine.homes.host.courier.moved))
    moved = {way: copied[3][way] - copied[2][way] for way in ("down", "up")}
    owned = sum(shard.numel for buffer in engine.buffers for shard in buffer.master_shards)
    # The sum of gradients, and then a weight and two moments, with the gradient that they need.
    assert moved["down"] == (4 + 12) * owned, (moved, owned)
    gathers = 2 if weights == "host" else 0  # of weights in 16 bits; near ones follow on the device
    assert 16 * owned <= moved["up"] <= (16 + 2 * gathers) * owned, (moved, owned)


@distributed(world_size=2)
def test_what_was_stepped_is_on_the_host_when_it_is_looked_for():
    model, optimizer, engine = _prepared(STREAMED["slices near"]())
    for number in range(2):
        _step(model, optimizer, engine, number)
    small = [shard for buffer in engine.buffers for shard in buffer.master_shards if 0 < shard.numel <= 256]
    for shard in small:  # all of it is in buffers that nobody needs meanwhile
        shard.pay()
        before = shard.values.clone()
        with shard.open():
            assert not torch.equal(shard.values, before), "it was on its way"
    assert small
    state = optimizer.state_dict()["state"]
    assert state and not any(value.isnan().any() for kinds in state.values() for value in kinds.values())


FAST = Rates(down=5e10, up=5e10, host=5e8)
SLOW = Rates(down=5e9, up=5e9, host=2e9)


@distributed(world_size=2)
def test_the_place_is_that_of_rank_0_and_is_asked_for_once():
    comm = _prepared(late_homes())[2].comm
    place, asked = StepPlace("auto"), []
    for rates in (FAST, SLOW):
        place.choose(comm, lambda rates=rates: asked.append(rates) or (rates if comm.rank == 0 else SLOW))
    assert place.on_device and asked == ([FAST] if comm.rank == 0 else [])
    other = StepPlace("auto")
    other.choose(comm, lambda: SLOW)
    assert not other.on_device
    for wanted in ("host", "device"):
        chosen = StepPlace(wanted)
        chosen.choose(comm, lambda: pytest.fail("it was said"))
        assert chosen.name == wanted


@distributed(world_size=2)
def test_what_is_measured_is_no_traffic():
    _, _, engine = _prepared(late_homes(step="auto"))
    place = engine.homes.step_place
    assert place.is_chosen and not engine.homes.host.courier.moved


@distributed(world_size=2)
def test_a_resumed_run_steps_where_the_saved_one_did(tmp_path):
    model, optimizer, engine = _prepared(late_homes(step="device"))
    _step(model, optimizer, engine, 0)
    engine.save_checkpoint(tmp_path / "saved")
    for wanted, found in (("auto", "device"), ("host", "host")):
        model, optimizer, engine = _prepared(late_homes(step=wanted))
        engine.load_checkpoint(tmp_path / "saved")
        assert engine.homes.step_place.name == found
        _step(model, optimizer, engine, 1)
