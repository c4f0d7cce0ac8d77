"""Order, prefetch and limits at stage 3, buckets at stages 1 and 2; none of them changes a number."""

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.core.order import ForwardOrder, HookPoint, Progress
from hf_zero.core.unit import UnitState
from tests.support.harness import distributed


LAYER = 8 * 8 + 8


class Net(torch.nn.Module):
    """Six layers of 72 elements each, called in a given order."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(6)])

    def forward(self, x, order=range(6)):
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def prepared(**config):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, hf_zero.shard(model, optimizer, {"zero_stage": 3, **config})


def train(model, optimizer, engine, steps=3, orders=None):
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        x = torch.randn(4, 8, generator=generator)
        engine.backward(model(x, *([orders[step]] if orders else [])).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    with hf_zero.gathered_parameters(model):
        return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def peaks(model, engine):
    """How many units are unsharded inside each layer's forward and backward, in the order of the calls."""
    seen = []

    def count(*_):
        seen.append(sum(unit.state is not UnitState.RESTING for unit in engine.units))

    for layer in model.layers:
        layer.register_forward_pre_hook(count)
    return seen


@distributed(world_size=2)
def test_no_limit_changes_a_number():
    reference = train(*prepared())
    for config in (
        {"overlap_comm": False},
        {"stage3_prefetch_bucket_size": 0},
        {"stage3_prefetch_bucket_size": 3 * LAYER},
        {"stage3_max_reuse_distance": 3 * LAYER},
        {"stage3_max_reuse_distance": 10**9, "stage3_max_live_parameters": 4 * LAYER},
        {"stage3_param_persistence_threshold": 10},
        {"stage3_param_persistence_threshold": 100},
        {"deterministic_reduce": True},
        *({"zero_stage": stage, "peer_memory": False} for stage in (1, 2, 3)),
        {"zero_stage": 3, "peer_memory": False, "overlap_comm": False},
        {"zero_stage": 1, "reduce_bucket_size": LAYER},
        {"zero_stage": 2, "reduce_bucket_size": "256B", "allgather_bucket_size": 10**6},
        {"zero_stage": 2},
        {"zero_stage": 0},
    ):
        assert torch.equal(train(*prepared(**config)), reference), config


@pytest.mark.parametrize(
    "config, expected",
    [
        ({}, [2, 2, 2, 2, 2, 1]),
        ({"overlap_comm": False}, [1] * 6),
        ({"stage3_prefetch_bucket_size": 0}, [1] * 6),
        ({"stage3_prefetch_bucket_size": 3 * LAYER}, [4, 4, 4, 3, 2, 1]),
        ({"stage3_prefetch_bucket_size": 3 * LAYER, "stage3_max_live_parameters": 2 * LAYER}, [2, 2, 2, 2, 2, 1]),
        ({"stage3_max_reuse_distance": 10**9}, [2, 3, 4, 5, 6, 6]),
    ],
)
@distributed(world_size=2)
def test_units_unsharded_in_forward(config, expected):
    model, optimizer, engine = prepared(**config)
    train(model, optimizer, engine, steps=1)
    seen = peaks(model, engine)
    engine.backward(model(torch.ones(1, 8)).sum())
    assert seen == expected, seen


@distributed(world_size=2)
def test_reuse_saves_gathers():
    counts = {}
    for reuse in (0, 2 * LAYER, 10**9):
        model, optimizer, engine = prepared(stage3_max_reuse_distance=reuse)
        train(model, optimizer, engine, steps=1)
        engine.comm.traffic.clear()
        train(model, optimizer, engine, steps=1)
        counts[reuse] = engine.comm.traffic.calls["all_gather"] - 6  # the reading of the weights at the end
    assert counts == {0: 11, 2 * LAYER: 10, 10**9: 6}, counts


@distributed(world_size=2)
def test_changed_control_flow_falls_back():
    orders = [range(6), [5, 3, 1], [0, 0, 2, 2], range(6), [4], range(5, -1, -1), range(6)]
    ours = train(*prepared(), steps=7, orders=orders)
    assert torch.equal(ours, train(*prepared(zero_stage=0), steps=7, orders=orders))


@distributed(world_size=2)
def test_persistent_parameters_stay_whole_and_have_sharded_state():
    model, optimizer, engine = prepared(stage3_param_persistence_threshold=10)
    train(model, optimizer, engine, steps=1)
    engine.comm.traffic.clear()
    assert all(layer.bias.isfinite().all() for layer in model.layers)
    assert not engine.comm.traffic.calls, "biases are below the threshold: reading them needs no gather"
    unit = engine.units[0]
    assert unit.name == "(persistent)" and unit.numel == 6 * 8 and not unit.sharded
    (buffer,) = unit.buffers
    assert buffer.end - buffer.begin == buffer.layout.padded_numel // 2


@distributed(world_size=2)
def test_the_cap_on_persistent_parameters():
    model, optimizer, engine = prepared(stage3_param_persistence_threshold=10, stage3_model_persistence_threshold=20)
    assert engine.units[0].numel == 16


@pytest.mark.parametrize("stage", [1, 2])
@distributed(world_size=2)
def test_buckets_bound_a_collective(stage):
    model, optimizer, engine = prepared(zero_stage=stage, reduce_bucket_size=64)
    train(model, optimizer, engine, steps=1)
    assert engine.comm.traffic.calls["reduce_scatter"] == 12, engine.comm.traffic.calls  # weights and biases apart
    assert max(buffer.layout.numel for buffer in engine.buffers) == 64


def test_the_order_is_learnt_and_forgotten():
    a, b, c = (HookPoint(name, [], True, False) for name in "abc")
    order = ForwardOrder()

    def follow(points):
        order.begin(points[0])
        seen = []
        for point in points:
            order.visit(point)
            seen.append(names(order.upcoming(then_backward=True)))
        order.complete()
        return seen

    assert follow([a, b, c]) == ["", "", ""]
    assert follow([a, b, c]) == ["bccba", "ccba", "cba"]
    assert follow([b, c]) == ["", ""], "a pass that begins elsewhere is another one"
    assert follow([b, c]) == ["ccb", "cb"]
    assert follow([a, c, b]) == ["bccba", "", ""]
    assert follow([a, c]) == ["cbbca", "bbca"]
    assert follow([a, c]) == ["cca", "ca"]


def names(points):
    return "".join(point.name for point in points)


def test_the_way_back():
    root = HookPoint("r", [], True, True)
    a, b, c, other = (HookPoint(name, [], True, False) for name in "abco")
    order, places = ForwardOrder(), []
    order.begin(root)
    for point in (root, a, b, a, c):
        order.visit(point)
        places.append(order.here)
    last = order.here
    order.complete()
    order.begin_backward()
    order.reach(last)
    assert names(order.upcoming_in_backward(root)) == "caba"
    order.reach(places[4])
    assert names(order.upcoming_in_backward(c)) == "aba"
    order.reach(places[3])
    assert names(order.upcoming_in_backward(a)) == "b", "units of the same module need no other gather"
    order.reach(last)
    assert names(order.upcoming_in_backward(root)) == "aba", "an output inside of the model does not lead back up"
    assert names(order.recompute(b)) == "aa", "the rest of what is recomputed, then backward"
    assert names(order.recompute(other)) == ""
    assert names(order.upcoming_in_backward(a)) == "b", "the place is not lost"
    order.reach(places[1])
    assert names(order.upcoming_in_backward(a)) == ""


def test_what_backward_has_left_behind():
    a, b, unknown = object(), object(), object()
    progress = Progress()
    progress.begin_forward()
    for call, unit in enumerate([a, b, b, a], start=1):
        progress.use([unit], call)
    assert not any(map(progress.has_left, (a, b, unknown))), "before backward"
    assert progress.reach(3) and not progress.has_left(b) and progress.has_left(unknown)
    assert progress.reach(1) and progress.has_left(b) and not progress.has_left(a)
    assert not progress.reach(2), "backward does not go back up"
    assert progress.reach(0) and progress.has_left(a)
    progress.end_backward()
    progress.begin_forward()
    progress.use([b], 5)
    progress.begin_forward()
    progress.use([a, b], 6)
    progress.forget_since(5)
    assert progress.reach(4) and progress.has_left(a) and progress.has_left(b)
    progress.end_backward()
    assert not any(map(progress.has_left, (a, b, unknown))), "until the next pass"


@distributed(world_size=2)
def test_optimizer_state_is_keyed_by_name_and_comes_back_at_another_stage():
    def make(stage):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, hf_zero.shard(model, optimizer, {"zero_stage": stage})

    model, optimizer, engine = make(3)
    train(model, optimizer, engine, steps=2)
    state = optimizer.state_dict()
    assert list(state["state"]) == [name for name, _ in model.named_parameters()]
    assert state["state"]["layers.0.weight"]["exp_avg"].shape == (8, 8)
    assert state["param_groups"][0]["params"][1] == "layers.0.bias"
    with hf_zero.gathered_parameters(model):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = train(model, optimizer, engine, steps=2)
    twin, twin_optimizer, twin_engine = make(1)
    twin.load_state_dict(weights)
    twin_optimizer.load_state_dict(state)
    assert torch.equal(train(twin, twin_optimizer, twin_engine, steps=2), expected)
    with pytest.raises(ValueError, match="other groups or parameters"):
        twin_optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}]})
