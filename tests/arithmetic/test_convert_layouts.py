"""DeepSpeed's layouts at other numbers of ranks than the golden checkpoints have, with the padding that they bring."""

import math

import pytest
import torch

from hf_zero.checkpoint import commit
from hf_zero.convert import command, deepspeed, importing
from hf_zero.convert.source import Group, Source, unwrapped, whole
from hf_zero.errors import ZeroCheckpointError
from tests.support import zoo


SHAPES = [{"a.weight": (5, 3), "b.weight": (7,), "c.weight": (1,)}, {"a.bias": (3,), "b.bias": (2, 2)}]
NAMES = [name for group in SHAPES for name in group]
ALL_RANKS = [1, 2, 3, 5, 8, 40]


def values():
    """A weight and a state for every parameter, all numbers different."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name: shape for group in SHAPES for name, shape in group.items()}
    return {kind: {n: torch.rand(s, generator=generator) for n, s in shapes.items()} for kind in ("weight", "exp_avg")}


def padded(flat, multiple):
    return torch.nn.functional.pad(flat, (0, -flat.numel() % multiple), value=math.nan)


def shared_out_whole(whole, ranks):
    """Stages 1 and 2: a group is one vector, padded to twice the ranks and cut into equal parts."""
    vectors = [padded(torch.cat([whole[name].flatten() for name in group]), 2 * ranks) for group in SHAPES]
    return [[vector.chunk(ranks)[rank] for vector in vectors] for rank in range(ranks)]


def shared_out_each(whole, ranks):
    """Stage 3: every parameter is padded to the number of ranks and cut; a rank's parts lie behind each other."""
    pieces = {name: padded(whole[name].flatten(), ranks).chunk(ranks) for group in SHAPES for name in group}
    return [[torch.cat([pieces[name][rank] for name in group]) for group in SHAPES] for rank in range(ranks)]


def write(folder, stage, ranks):
    tag = folder / "global_step1"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    shapes = [{name: torch.Size(shape) for name, shape in group.items()} for group in SHAPES]
    module = {name: torch.empty(0) if stage == 3 else value for name, value in values()["weight"].items()}
    model = {"module": module, "param_shapes": shapes, "buffer_names": [], "shared_params": {}}
    share_out = shared_out_each if stage == 3 else shared_out_whole
    weights, states = (share_out(values()[kind], ranks) for kind in ("weight", "exp_avg"))
    for rank in range(ranks):
        groups = [
            {"lr": 0.1, "weight_decay": 0.0 if number else 0.1, "params": [number]} for number in range(len(SHAPES))
        ]
        optimizer = {
            "state": {g: {"step": torch.tensor(2.0), "exp_avg": flat} for g, flat in enumerate(states[rank])},
            "param_groups": groups,
        }
        part = {"zero_stage": stage, "partition_count": ranks if stage == 3 else [ranks] * len(SHAPES)}
        if stage == 3:
            part |= {"fp32_flat_groups": weights[rank], "optimizer_state_dict": optimizer}
            torch.save(model, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        else:
            # What is saved of the last rank is shorter by the padding, but for the optimizer's states.
            lean = [flat[~flat.isnan()] if rank == ranks - 1 else flat for flat in weights[rank]]
            part |= {"single_partition_of_fp32_groups": lean, "base_optimizer_state": optimizer}
        torch.save({"optimizer_state_dict": part}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    if stage != 3:
        torch.save(model, tag / "mp_rank_00_model_states.pt")
    return tag


def gathered(stored):
    """A stored tensor, every element of which must be given once."""
    flat = torch.full((stored.numel,), math.nan)
    for start, part in stored.parts():
        assert flat[start : start + part.numel()].isnan().all(), "given twice"
        flat[start : start + part.numel()] = part
    return flat.view(stored.shape)


@pytest.mark.parametrize("ranks", ALL_RANKS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_element_is_found_at_any_number_of_ranks(stage, ranks, tmp_path):
    found = deepspeed.read(tmp_path, write(tmp_path, stage, ranks))
    assert found.what == f"DeepSpeed ZeRO-{stage} of {ranks} rank{'s' * (ranks > 1)}"
    assert list(found.weights) == list(found.states) == NAMES
    for name in NAMES:
        assert torch.equal(gathered(found.weights[name]), values()["weight"][name]), name
        assert torch.equal(gathered(found.states[name]["exp_avg"]), values()["exp_avg"][name]), name
    assert [group.names for group in found.groups] == [list(group) for group in SHAPES]
    assert [group.options["weight_decay"] for group in found.groups] == [0.1, 0.0]
    assert found.groups[0].scalars == {"step": {"tensor": 2.0, "dtype": "float32"}}


@pytest.mark.parametrize("stage", [1, 3])
def test_shapes_that_ask_for_another_number_of_elements_are_refused(stage, tmp_path, monkeypatch):
    tag = write(tmp_path, stage, 3)
    for path in tag.glob("*_model_states.pt"):
        model = torch.load(path)
        model["param_shapes"][0]["a.weight"] = torch.Size([5, 9])
        torch.save(model, path)
    with pytest.raises(ZeroCheckpointError, match="the shapes of .*group 0 ask for"):
        deepspeed.read(tmp_path, tag)


def rewrite(tag, change):
    """Change the optimizer's part of every rank."""
    for path in tag.glob("*_optim_states.pt"):
        content = torch.load(path)
        change(content["optimizer_state_dict"])
        torch.save(content, path)


def move_step(part):
    """DeepSpeed's fused Adam counts steps in the options of the group, which have a few more of its own."""
    for group in part["base_optimizer_state"]["param_groups"]:
        group.update(step=7, bias_correction=True, betas=(0.9, 0.99))
    for state in part["base_optimizer_state"]["state"].values():
        del state["step"]


def test_the_step_count_of_fused_optimizers_is_found(tmp_path):
    tag = write(tmp_path, 2, 2)
    rewrite(tag, move_step)
    for group in deepspeed.read(tmp_path, tag).groups:
        assert group.scalars == {"step": {"tensor": 7.0, "dtype": "float32"}}
        assert group.options.keys() == {"lr", "weight_decay", "betas"}


def test_an_elastic_checkpoint_is_refused(tmp_path):
    tag = write(tmp_path, 1, 2)
    rewrite(tag, lambda part: part.update(base_optimizer_state=[]))
    with pytest.raises(ZeroCheckpointError, match="was saved with `elastic_checkpoint`"):
        deepspeed.read(tmp_path, tag)


@pytest.mark.parametrize("optimizer_section, groups", [({}, 2), ({"optimizer": {"type": "AdamW"}}, 1)])
def test_an_empty_group_comes_back_where_trainer_made_it(optimizer_section, groups, tmp_path, monkeypatch):
    """Only norms are trained here: the group with weight decay, which comes first, is the empty one."""
    import tests.arithmetic.test_convert_layouts as this

    monkeypatch.setattr(this, "SHAPES", [{"norm.weight": (4,), "b.bias": (3,)}])
    tag = write(tmp_path, 3, 2)
    (tmp_path / "trainer_state.json").write_text("{}")
    torch.save({"last_epoch": 1, "base_lrs": [0.1], "_last_lr": [0.05]}, tmp_path / "scheduler.pt")
    for path in tag.glob("*_model_states.pt"):
        torch.save({**torch.load(path), "ds_config": optimizer_section}, path)
    found = deepspeed.read(tmp_path, tag)
    names = ["norm.weight", "b.bias"]
    assert [group.names for group in found.groups] == ([[], names] if groups == 2 else [names])
    if groups == 2:
        assert found.schedule == {"last_epoch": 1, "base_lrs": [0.1, 0.1], "_last_lr": [0.05, 0.05]}
        assert "scheduler.pt" in found.unread
    else:
        assert found.schedule is None


@pytest.mark.parametrize("wrapped", ["module.{}", "_orig_mod.{}", "layers.0._fsdp_wrapped_module.weight"])
def test_names_lose_what_wrappers_have_added(wrapped):
    assert unwrapped(wrapped.format("layers.0.weight"), {"layers.0.weight"}) == "layers.0.weight"
    assert unwrapped("module.weight", {"module.weight"}) == "module.weight", "a name of the model's own"
    assert unwrapped("module.weight", {"other"}) == "module.weight"


@pytest.mark.parametrize("name", ["mixtral", "llama_tied"])
def test_files_are_those_that_the_model_would_save(name, tmp_path):
    """Experts that are one tensor in memory are many in the files, and a tied weight stands there once."""
    model = zoo.build(name)
    model.save_pretrained(tmp_path / "plain")
    trained = dict(model.named_parameters())
    found = Source(
        what="a model",
        folder=tmp_path / "plain",
        weights={name: whole(value) for name, value in model.state_dict().items()},
        dtypes={},
        states={name: {} for name in trained},
        groups=[Group(options={"lr": 0.1}, scalars={}, names=list(trained))],
    )
    importing.write(found, command._model(tmp_path / "plain"), tmp_path / "plain", tmp_path / "ours")
    for path in (tmp_path / "plain").iterdir():
        assert (tmp_path / "ours" / path.name).read_bytes() == path.read_bytes(), path.name
    commit.check_tensors(tmp_path / "ours")
