"""What data x tensor parallel ranks save is byte for byte what one process saves, and any layout goes on from it."""

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

import hf_zero
from tests.support import zoo
from tests.support.harness import distributed, run_ranks
from tests.support.reference import ADAMW
from tests.support.tensor_models import build, whole, whole_weights


def loop(name, width, config):
    model = build(name, width)
    optimizer = ADAMW(model.parameters())
    return model, optimizer, hf_zero.shard(model, optimizer, config)


def train(model, optimizer, engine, steps, name="llama"):
    """Steps on the batches of two data-parallel ranks, however many there are."""
    groups = engine.mesh.world.world_size
    mine = [group for group in range(2) if group % groups == engine.mesh.world.rank] if groups < 2 else None
    for step in steps:
        batches = mine or [engine.mesh.world.rank % 2]
        for group in batches:
            engine.backward(model(**zoo.batch(name, group, step)).loss / len(batches))
        optimizer.step()
        optimizer.zero_grad()


def save(name, width, folder, stage):
    """Weights that no step has touched: the same numbers everywhere."""
    model, _, engine = loop(name, width, {"zero_stage": stage})
    if stage == 3:
        engine.save_model(folder)
    else:
        model.save_pretrained(folder)


# Columns and rows with tied embeddings, packed experts, packed projections.
CASES = {("llama_tied", 1), ("mixtral", 3), ("phi3", 2)}


@pytest.mark.parametrize(
    "name, stage",
    [
        pytest.param(name, stage, marks=[pytest.mark.exhaustive] * ((name, stage) not in CASES))
        for name in ("llama", "llama_tied", "qwen3", "gemma", "phi3", "mixtral", "qwen3_moe")
        for stage in (0, 1, 2, 3)
    ],
)
def test_saved_folders_are_those_of_one_process(name, stage, tmp_path):
    whole(name).save_pretrained(tmp_path / "stock")
    run_ranks(save, name, 2, tmp_path / "ours", stage, world_size=4)
    theirs = {path.name: path.read_bytes() for path in (tmp_path / "stock").iterdir()}
    ours = {path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()}
    assert ours.keys() == theirs.keys()
    for file, content in theirs.items():
        assert ours[file] == content, file


def begin(name, width, folder):
    model, optimizer, engine = loop(name, width, {"zero_stage": 2})
    train(model, optimizer, engine, range(2), name)
    engine.save_checkpoint(folder, {"step": 2})
    train(model, optimizer, engine, range(2, 4), name)
    return whole_weights(model)


@distributed(world_size=4)
def test_an_optimizer_hands_out_and_takes_whole_states():
    model, optimizer, engine = loop("llama", 2, {"zero_stage": 3})
    train(model, optimizer, engine, range(2))
    state = optimizer.state_dict()
    for name, weight in zoo.build("llama").named_parameters():
        assert state["state"][name]["exp_avg"].shape == weight.shape, name
    before = whole_weights(model)
    train(model, optimizer, engine, range(2, 3))
    after = whole_weights(model)
    other, second, its = loop("llama", 2, {"zero_stage": 1})
    with hf_zero.gathered_parameters(other, write=True), torch.no_grad():
        for name, param in other.named_parameters():
            param.copy_(distribute(before[name], param))
    second.load_state_dict(state)
    train(other, second, its, range(2, 3))
    for name, weight in whole_weights(other).items():
        assert (after[name] - weight).abs().max() <= 1e-6, name


def distribute(whole, param):
    if not isinstance(param, DTensor):
        return whole
    return distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)


def go_on(name, width, folder, stage):
    model, optimizer, engine = loop(name, width, {"zero_stage": stage})
    assert engine.load_checkpoint(folder) == {"step": 2}
    train(model, optimizer, engine, range(2, 4), name)
    return whole_weights(model)


LAYOUTS = [(4, 2), (2, 2), (4, 1), (1, 1)]


def resume(name, before, after, folder):
    """Whatever the layout (ranks, and how many share out a model), a step takes the mean over the same two batches.

    Returns the largest difference of a weight from that of the run that was not interrupted, after each of `after`.
    """
    (weights, *_) = run_ranks(begin, name, before[1], folder, world_size=before[0])
    worst = {}
    for layout in after:
        (found, *_) = run_ranks(go_on, name, layout[1], folder, 3, world_size=layout[0])
        assert found.keys() == weights.keys()
        worst[layout] = max((found[key] - weight).abs().max().item() for key, weight in weights.items())
        assert worst[layout] <= 1e-6, (layout, worst)
    return worst


@pytest.mark.parametrize("before, after", [((4, 2), (1, 1)), ((4, 1), (4, 2))])
def test_training_goes_on_at_other_layouts(before, after, tmp_path):
    resume("llama", before, [after], tmp_path / "state")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "phi3"])
@pytest.mark.parametrize("before", LAYOUTS)
def test_training_goes_on_at_any_layout(name, before, tmp_path):
    resume(name, before, LAYOUTS, tmp_path / "state")
