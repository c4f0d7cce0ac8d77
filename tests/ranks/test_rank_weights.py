"""Ranks with unequal shares of the optimizer's state train, save and resume as equal ones, by equal gathers."""

import contextlib
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.comm.communicator import Communicator
from hf_zero.core.engine import ZeroEngine
from hf_zero.errors import ZeroConfigError
from tests.ranks.test_extents import NODES, REPLICAS, _files, _save
from tests.ranks.test_owned import Case, check
from tests.ranks.test_plain_checkpoints import _go_on
from tests.support import zoo
from tests.support.harness import distributed, run_ranks
from tests.support.nets import Net, batches, micro, seeded
from tests.support.networks import NETWORKS
from tests.support.planned import check_resident
from tests.support.reference import ADAMW, SGD, Plan, check_stages, whole_weights


UNEVEN = {"rank_weights": [2, 1]}
FOUR = {"rank_weights": [3, 1, 2, 1]}


@distributed(world_size=2)
def test_two_unequal_ranks_give_the_numbers_of_ddp():
    run = functools.partial(check_stages, stages=[1, 2, 3], config=UNEVEN, micro=micro)
    run(seeded(functools.partial(Net, depth=3)), batches, Plan(accumulation=2, clip=0.1), optimizer=ADAMW)
    run(seeded(NETWORKS["frozen"]), batches, Plan(steps=2), optimizer=SGD)


@pytest.mark.parametrize(
    "stages, config",
    [([1, 2, 3], FOUR), ([3], {**FOUR, **NODES, "no_sync": "node"}), ([1, 3], {**UNEVEN, **REPLICAS})],
)
@distributed(world_size=4)
def test_four_unequal_ranks_give_the_numbers_of_ddp(stages, config):
    net = seeded(functools.partial(Net, depth=3))
    plan = Plan(accumulation=2, clip=0.1)
    check_stages(net, batches, plan, stages=stages, config=config, micro=micro, optimizer=ADAMW)


@distributed(world_size=2)
def test_beside_whole_matrices_and_away_from_the_device():
    config = (("rank_weights", [1, 3]),)
    check(Case(stage=3, accumulation=2, clip=0.1, zero_init=True, config=config))
    for stage, homes in ((3, "disk"), (3, "far"), (2, "host"), (1, "device"), (3, "far_slices_near")):
        check(Case("muon_with_adam", stage, homes=homes, config=config))


def _wide():
    return nn.ModuleList([nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(3)])


def _train(stage, steps=1, accumulation=1, **config):
    """A net of three units, its optimizer and its engine after some steps, of which the traffic counts the last."""
    model = seeded(lambda: Stack())()
    optimizer = ADAMW(model.parameters())
    engine = hf_zero.shard(model, optimizer, {"zero_stage": stage, **config})
    for step, number in itertools.product(range(steps), range(accumulation)):
        with engine.no_sync() if number < accumulation - 1 else contextlib.nullcontext():
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + number + dist.get_rank()))
            engine.backward(model(x).square().mean())
        if number == accumulation - 1:
            optimizer.step()
            optimizer.zero_grad()
            if step < steps - 1:
                engine.comm.traffic.clear()
    return model, optimizer, engine


class Stack(nn.Module):
    """Three layers; the middle one can be left out."""

    def __init__(self):
        super().__init__()
        self.layers = _wide()
        self.skips = False

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = x if self.skips and number == 1 else layer(x)
        return x


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=4)
def test_masters_and_states_take_bytes_in_proportion_to_the_weights(stage):
    model, optimizer, _ = _train(stage, **FOUR)
    tensors = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    tensors += [weight for group in optimizer.param_groups for weight in group["params"]]
    held = [torch.zeros((), dtype=torch.int64) for _ in range(4)]
    dist.all_gather(held, torch.tensor(sum(tensor.nbytes for tensor in tensors)))
    total = 12 * sum(param.numel() for param in model.parameters())
    assert sum(map(int, held)) == pytest.approx(total, rel=0.005)
    for weight, nbytes in zip(FOUR["rank_weights"], held, strict=True):
        assert int(nbytes) == pytest.approx(total * weight / 7, rel=0.02), held


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_gathers_and_sums_stay_equal_and_what_changes_hands_does_so_once_a_step(stage):
    sent = {}
    for name, accumulation, config in (("even", 3, {}), ("one", 1, UNEVEN), ("three", 3, UNEVEN)):
        model, _, engine = _train(stage, 2, accumulation, mixed_precision="bf16", **config)
        sent[name] = dict(engine.comm.traffic.bytes_sent)
    assert sent["one"]["hand_over"] == sent["three"]["hand_over"] > 0
    moved = torch.tensor(float(sent["three"].pop("hand_over")))
    dist.all_reduce(moved)
    # A sixth of the elements lies in the slice of another rank than its owner: 4 bytes of gradients, 2 of weights.
    assert moved.item() == pytest.approx(6 * sum(param.numel() for param in model.parameters()) / 6, rel=0.02)
    assert sent["three"]["all_gather"] == sent["even"]["all_gather"]
    assert sent["three"]["reduce_scatter"] == sent["even"]["reduce_scatter"]


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_what_has_no_gradient_is_left_alone_and_what_is_written_arrives(stage):
    found = []
    for config in (UNEVEN, {}):
        model, optimizer, engine = _train(stage, steps=2, **config)
        before = whole_weights(model)
        model.skips = True
        engine.backward(model(torch.ones(2, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        after = whole_weights(model)
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved == {name for name in before if not name.startswith("layers.1.")}
        with hf_zero.gathered_parameters(model, write=True):
            model.layers[1][0].weight.data[0] = 3.0
        model.skips = False
        engine.backward(model(torch.ones(2, 64)).square().mean())
        optimizer.step()
        found.append(whole_weights(model))
    for name, value in found[0].items():
        assert torch.allclose(value, found[1][name], rtol=0, atol=1e-6), name


def _saved_weights(folder, **config):
    model = zoo.build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = hf_zero.shard(model, optimizer, {"zero_stage": 3, "mixed_precision": "bf16", **config})
    for step in range(2):
        engine.backward(model(**zoo.batch("llama", dist.get_rank(), step)).loss)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def test_saved_models_are_the_same_bytes(tmp_path):
    for name, config in (("even", {}), ("uneven", UNEVEN)):
        run_ranks(_saved_weights, tmp_path / name, world_size=2, **config)
    even, uneven = _files(tmp_path / "even"), _files(tmp_path / "uneven")
    assert even and even == uneven


def test_it_resumes_from_equal_shares_and_to_them(tmp_path):
    whole = run_ranks(_save, tmp_path / "uneven", world_size=2, **UNEVEN)[0]
    assert run_ranks(_go_on, tmp_path / "uneven", 3, world_size=2, **UNEVEN)[0] == whole
    run_ranks(_save, tmp_path / "even", world_size=2)
    for saved, stage, ranks, config in (
        ("uneven", 3, 2, {}),
        ("uneven", 1, 4, FOUR),
        ("even", 2, 2, {"rank_weights": [1, 4]}),
    ):
        resumed = run_ranks(_go_on, tmp_path / saved, stage, world_size=ranks, **config)[0]
        assert max(abs(a - b) for a, b in zip(whole, resumed, strict=True)) <= 1e-6, (saved, ranks, config)


@distributed(world_size=2)
def test_the_state_of_an_optimizer_goes_to_other_shares():
    _, optimizer, _ = _train(3, steps=2, **UNEVEN)
    _, other, _ = _train(3, steps=1, rank_weights=[1, 5])
    other.load_state_dict(state := optimizer.state_dict())
    for name, kinds in other.state_dict()["state"].items():
        for kind, value in kinds.items():
            assert torch.equal(value, state["state"][name][kind]), (name, kind)


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_parameters_may_be_trained_later_and_the_model_be_an_ordinary_one_again(stage):
    found = []
    for config in (UNEVEN, {}):
        model = seeded(Stack)()
        model.layers[1].requires_grad_(False)
        optimizer = ADAMW([param for param in model.parameters() if param.requires_grad])
        engine = hf_zero.shard(model, optimizer, {"zero_stage": stage, "mixed_precision": "bf16", **config})
        for step in range(3):
            engine.backward(model(torch.ones(2, 64)).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                model.layers[1].requires_grad_(True)
                optimizer.add_param_group({"params": list(model.layers[1].parameters()), "lr": 1e-2})
        engine.undo()
        found.append([param.detach().clone() for param in model.parameters()])
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_the_first_rank_holds_what_was_planned(stage):
    model = zoo.build("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    engine = hf_zero.shard(model, optimizer, {"zero_stage": stage, "mixed_precision": "bf16", **UNEVEN})
    batch = zoo.batch("llama", dist.get_rank(), 0)
    engine.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
    engine.settle()
    if dist.get_rank() == 0:
        check_resident(model, batch)


@distributed(world_size=2)
def test_equal_weights_are_equal_slices():
    _, _, engine = _train(3, rank_weights=[3, 3])
    assert all(buffer.owned is None for buffer in engine.buffers)
    assert "hand_over" not in engine.comm.traffic.bytes_sent


@distributed(world_size=2)
def test_what_does_not_fit_is_refused_with_the_fix():
    for config, says in [
        ({"zero_stage": 3, "rank_weights": [2, 1, 1]}, "has 3 number.*but 2 rank.*give one for each"),
        ({"zero_stage": 0, "rank_weights": [2, 1]}, "set zero_stage to 1, 2 or 3, or remove rank_weights"),
        ({"zero_stage": 3, "rank_weights": [2, 0]}, "expected a list of numbers above 0"),
        ({"zero_stage": 3, "rank_weights": [2, 1], "zero_quantized_weights": True}, "remove one of them"),
    ]:
        with pytest.raises(ZeroConfigError, match=says):
            hf_zero.shard(nn.Linear(2, 2), config=config)


def test_nccl_is_refused_as_it_would_need_unequal_collectives():
    comm = Communicator.imagine(2, "nccl", on_buffer=lambda tensors: None)
    with pytest.raises(ZeroConfigError, match="not available with NCCL.*collective of unequal lengths.*Remove"):
        ZeroEngine(nn.Linear(2, 2), hf_zero.ZeroConfig(zero_stage=3, **UNEVEN), group=comm)
