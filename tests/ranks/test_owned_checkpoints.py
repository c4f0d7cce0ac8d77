"""What whole matrices have in masters and states is saved whole, and resumes at any number of ranks and stage."""

import dataclasses
import tempfile

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import hf_zero
from hf_zero.checkpoint import training_state
from hf_zero.checkpoint.background import SaveJob
from hf_zero.checkpoint.whole_states import describe, rebuild
from hf_zero.core.master import MASTER
from hf_zero.core.rebuild import gather_states
from hf_zero.errors import ZeroCheckpointError
from tests.ranks.test_owned import Case, compare, one_process, prepared, train, weights_of
from tests.support import zoo
from tests.support.harness import distributed, run_ranks
from tests.support.matrix_optimizers import MAKERS


def save(case, folder):
    model, optimizers, engine = prepared(case)
    train(case, model, optimizers, engine, range(2))
    job = SaveJob(comm=engine.comm, is_main=engine.comm.rank == 0)
    training_state.save_state(folder, engine.buffers, engine.bindings, job)
    engine.homes.close()


def resume(case, folder):
    model, optimizers, engine = prepared(case)
    train(case, model, optimizers, engine, range(7, 8))  # everything is there, and other than what is saved
    engine.before_load()
    missing, _ = training_state.load_state(folder, engine.buffers, engine.bindings, engine.comm)
    engine.after_load()
    assert not missing
    train(case, model, optimizers, engine, range(2, 3))
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    wanted = one_process(case.optimizer)
    compare(weights_of(model), {name: wanted[name] for name in wanted.keys() - frozen}, case)
    engine.homes.close()


@pytest.mark.parametrize(
    "name, first, then",
    [
        ("muon_and_adamw", (2, 3, "device"), (4, 1, "device")),
        ("muon_with_adam", (2, 2, "device"), (1, 0, "device")),
        ("adafactor", (4, 3, "device"), (2, 3, "disk")),
        ("soap", (2, 3, "far"), (4, 2, "device")),
        ("lamb", (2, 0, "device"), (2, 3, "device")),
    ],
)
def test_they_resume_at_any_number_of_ranks_and_stage(name, first, then, tmp_path):
    run_ranks(save, Case(name, first[1], homes=first[2]), tmp_path, world_size=first[0])
    run_ranks(resume, Case(name, then[1], homes=then[2]), tmp_path, world_size=then[0])


def test_the_file_holds_plain_tensors_of_every_parameter(tmp_path):
    run_ranks(save, Case("soap"), tmp_path, world_size=2)
    found = load_file(tmp_path / training_state.STATE_NAME)
    model, _, _ = prepared(Case("soap", 0))
    for name, param in model.named_parameters():
        if param.requires_grad:
            assert found[f"{name}.{MASTER}"].shape == found[f"{name}.exp_avg"].shape == param.shape
            for side, rows in enumerate(param.shape if param.dim() == 2 else ()):
                assert found[f"{name}.GG[{side}]"].shape == found[f"{name}.Q[{side}]"].shape == (rows, rows)


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_state_dict_goes_from_one_engine_to_another(stage):
    case = Case("soap", stage)
    model, (optimizer,), engine = prepared(case)
    train(case, model, [optimizer], engine, range(2))
    state, weights = optimizer.state_dict(), weights_of(model)
    assert state["state"]["enter.weight"]["Q"][0].shape == (8, 8) and state["state"]["enter.weight"]["step"] == 2
    twin, (other,), its_engine = prepared(dataclasses.replace(case, stage=3 - stage))
    with hf_zero.gathered_parameters(twin, write=True), torch.no_grad():
        for name, param in twin.named_parameters():
            param.copy_(weights[name])
    other.load_state_dict(state)
    train(case, twin, [other], its_engine, range(2, 3))
    compare(weights_of(twin), one_process("soap"), case)


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=2)
def test_saved_weights_are_the_masters(stage):
    """Not the 16-bit casts that slices have of them."""
    model = zoo.build("llama_tied")
    (optimizer,) = MAKERS["lamb"](model.parameters())
    config = {"mixed_precision": "bf16", "zero3_save_16bit_model": False}
    engine = hf_zero.shard(model, optimizer, {"zero_stage": stage, **config})
    engine.backward(model(**zoo.batch("llama_tied", dist.get_rank(), 0)).loss)
    optimizer.step()
    optimizer.zero_grad()
    masters = {name: gather_states(engine.buffers, engine.bindings)[param][MASTER] for name, param in named(model)}
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    engine.save_checkpoint(folders[0] + "/saved")
    found = load_file(folders[0] + "/saved/model.safetensors")
    for name, values in found.items():
        assert values.dtype == torch.float32
        assert torch.equal(values, masters[name].view_as(values)), f"stage {stage}: {name}"
    twin = zoo.build("llama_tied", seed=1)
    (other,) = MAKERS["lamb"](twin.parameters())
    its_engine = hf_zero.shard(twin, other, {"zero_stage": 3 - stage, **config})
    its_engine.load_checkpoint(folders[0] + "/saved")
    compare(weights_of(twin), weights_of(model), f"stage {stage}", tolerance=0)
    again = gather_states(its_engine.buffers, its_engine.bindings)
    for name, param in named(twin):
        assert torch.equal(again[param][MASTER].view(-1), masters[name].reshape(-1)), f"stage {stage}: {name}"


def named(model):
    return list(model.named_parameters())


def test_states_of_any_nest_come_back_and_what_is_no_state_is_refused():
    state = {"step": 3, "Q": [torch.ones(2, 2), None], "pair": (1.5, torch.zeros(3)), "more": {"flag": True}}
    described, tensors = describe(state, "weight")
    assert sorted(tensors) == ["Q[0]", "pair[1]"]
    again = rebuild(described, tensors.__getitem__)
    assert again["Q"][0] is state["Q"][0] and again["pair"][1] is state["pair"][1]
    assert str(again) == str(state)
    with pytest.raises(ZeroCheckpointError, match="'odd' of 'weight' is a object"):
        describe({"odd": object()}, "weight")
