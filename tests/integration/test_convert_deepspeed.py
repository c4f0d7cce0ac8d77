"""DeepSpeed's checkpoints of every ZeRO stage become ours: the same weights, the same states, the same next losses."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hf_zero.checkpoint import commit
from hf_zero.checkpoint.training_state import STATE_NAME
from tests.support.golden_runs import (
    DEEPSPEED,
    compare,
    convert,
    converted,
    resume,
    source,
    told_losses,
    told_tensors,
)
from tests.support.harness import run_ranks
from tests.support.make_golden_checkpoints import CASES, make_model


@pytest.mark.parametrize("case", DEEPSPEED)
def test_weights_and_states_are_those_that_deepspeed_consolidates(case, tmp_path):
    folder = converted(case, tmp_path / "ours")
    weights, states = load_file(folder / "model.safetensors"), load_file(folder / STATE_NAME)
    half = CASES[case].get("bf16", False)
    seen = set()
    for name, wanted in told_tensors(case).items():
        parameter, kind = name.rsplit(".", 1)
        if kind != "weight":
            assert torch.equal(states[name], wanted), name
            seen.add(name)
        elif parameter in weights:
            saved = weights[parameter]
            assert saved.dtype == (torch.bfloat16 if half else torch.float32), parameter
            assert torch.equal(saved, wanted.to(saved.dtype)), parameter
            if half:
                assert torch.equal(states[f"{parameter}.master"], wanted), parameter
                seen.add(f"{parameter}.master")
    model = make_model(case)
    assert set(weights) == set(dict(model.named_parameters()))
    # In round-robin order the engine cannot tell its states; the losses of the resumed run prove them.
    assert set(states) == seen or "round_robin" in case, set(states) ^ seen
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.rsplit(".", 1)[0] for name in states} == trained
    commit.check_files(folder)
    commit.check_tensors(folder)


@pytest.mark.parametrize("stage, ranks", [(2, 2), (3, 2), (3, 1)])
@pytest.mark.parametrize("case", DEEPSPEED)
def test_training_goes_on_as_deepspeed_would(case, stage, ranks, tmp_path):
    folder = converted(case, tmp_path / "ours")
    found = run_ranks(resume, case, tmp_path / "run", folder, 4 // ranks, stage, world_size=ranks)[0]
    # In bf16 the two round gradients at other places.
    compare(found, told_losses(case), 5e-4 if CASES[case].get("bf16") else 1e-6)


def test_the_folder_is_complete_and_plain(tmp_path, capsys):
    from transformers import LlamaForCausalLM

    folder = converted("deepspeed_zero2", tmp_path / "ours")
    assert sorted(path.name for path in folder.iterdir()) == [
        "COMMIT",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "rng_state_0.pth",
        "rng_state_1.pth",
        "scheduler.pt",
        "trainer_state.json",
        STATE_NAME,
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"read DeepSpeed ZeRO-2 of 2 ranks from {source('deepspeed_zero2')}"
    assert told[1].startswith(f"wrote {folder}: 20 weights in float32, optimizer state (exp_avg, exp_avg_sq) of 11 ")
    _, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    with safe_open(folder / STATE_NAME, "pt") as file:
        groups = json.loads(file.metadata()["optimizers"])[0]
    assert [group["options"]["weight_decay"] for group in groups] == [0.1, 0.0]
    assert groups[0]["scalars"] == {"step": {"tensor": 3.0, "dtype": "float32"}}


def test_the_dtype_of_the_weights_is_noted(tmp_path):
    folder = converted("deepspeed_zero3_bf16", tmp_path / "ours")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("inner", ["", "global_step3"])
def test_deepspeeds_own_folder_needs_a_configuration(inner, tmp_path, capsys):
    """`engine.save_checkpoint` writes no config.json; `latest`, or the folder itself, leads to the files."""
    bare = tmp_path / "bare"
    shutil.copytree(source("deepspeed_zero1"), bare, ignore=shutil.ignore_patterns("*.json", "*.safetensors", "*.p?h"))
    assert convert(bare / inner, tmp_path / "ours") == 2
    assert "holds no config.json: give the folder of the model" in capsys.readouterr().err
    assert convert(bare / inner, tmp_path / "ours", "--config", source("deepspeed_zero1")) == 0
    names = {path.name for path in (tmp_path / "ours").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", STATE_NAME, "COMMIT"} <= names
    assert "trainer_state.json" not in names, "of another run"


def in_fp16(folder):
    """The bf16 checkpoint as if its run had computed in fp16, with a dynamic loss scale as DeepSpeed pickles it."""
    import sys
    import types

    shutil.copytree(source("deepspeed_zero3_bf16"), folder)
    module = types.ModuleType("deepspeed.runtime.fp16.loss_scaler")
    scaler_class = type("DynamicLossScaler", (), {"__module__": module.__name__})
    module.DynamicLossScaler = scaler_class
    packages = {"deepspeed": types.ModuleType("deepspeed"), module.__name__: module}
    scaler = scaler_class()
    scaler.__dict__.update(cur_scale=512.0, cur_iter=9, last_overflow_iter=3, cur_hysteresis=1, dynamic=True)
    sys.modules.update(packages)
    try:
        for path in (folder / "global_step3").iterdir():
            from hf_zero.convert.pickles import load

            content = load(path)
            if "module" in content:
                content["module"] = {name: value.half() for name, value in content["module"].items()}
            else:
                part = content["optimizer_state_dict"]
                part["loss_scaler"], part["zero_stage"] = scaler, 3
            path.unlink()
            torch.save(content, path)
    finally:
        for name in packages:
            del sys.modules[name]


def test_the_loss_scale_of_fp16_goes_along(tmp_path):
    in_fp16(tmp_path / "theirs")
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 0
    with safe_open(tmp_path / "ours" / STATE_NAME, "pt") as file:
        extra = json.loads(file.metadata()["extra"])
    assert extra["loss_scale"] == {"scale": 512.0, "tolerated": 1, "since_overflow": 5}
    weights = load_file(tmp_path / "ours/model.safetensors")
    wanted = told_tensors("deepspeed_zero3_bf16")
    for name, weight in weights.items():
        assert torch.equal(weight, wanted[f"{name}.weight"].half()), name


def is_mapped_from(tensor, path):
    """Whether the memory of a tensor is that of a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return True
    return False


def test_values_stay_in_their_files_until_they_are_written():
    from hf_zero.convert import deepspeed

    folder = source("deepspeed_zero3")
    tag = deepspeed.find(folder)
    found = deepspeed.read(folder, tag)
    path = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    for stored in (found.weights["lm_head.weight"], found.states["lm_head.weight"]["exp_avg"]):
        (first, _), (second, values) = stored.parts()
        assert (first, second) == (0, stored.numel // 2) and is_mapped_from(values, path)
    assert not is_mapped_from(values.clone(), path), "this test can fail"
