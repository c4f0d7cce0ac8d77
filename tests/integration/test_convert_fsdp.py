"""accelerate's sharded FSDP checkpoints become ours: the same weights, the same states, the same next losses."""

import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hf_zero.checkpoint.training_state import STATE_NAME
from tests.support.golden_runs import (
    GOLDEN,
    compare,
    convert,
    converted,
    resume,
    source,
    told_losses,
    told_tensors,
)
from tests.support.harness import run_ranks


CONFIG = GOLDEN / "deepspeed_zero2/checkpoint-3"


def test_weights_and_states_are_those_that_torch_gathers(tmp_path, capsys):
    folder = converted("fsdp2", tmp_path / "ours")
    weights, states = load_file(folder / "model.safetensors"), load_file(folder / STATE_NAME)
    seen = set()
    for name, wanted in told_tensors("fsdp2").items():
        parameter, kind = name.rsplit(".", 1)
        if kind != "weight":
            assert torch.equal(states[name], wanted), name
            seen.add(name)
        elif parameter != "lm_head.weight":  # tied
            assert torch.equal(weights.pop(parameter), wanted), parameter
    assert not weights and set(states) == seen and len(seen) == 22
    with safe_open(folder / STATE_NAME, "pt") as file:
        groups = json.loads(file.metadata()["optimizers"])[0]
    assert [group["options"]["weight_decay"] for group in groups] == [0.1, 0.0]
    assert groups[1]["scalars"] == {"step": {"tensor": 3.0, "dtype": "float32"}}
    assert f"read a sharded FSDP checkpoint of 2 ranks from {source('fsdp2')}" in capsys.readouterr().out


@pytest.mark.parametrize("stage, ranks", [(2, 2), (3, 2), (3, 1)])
def test_training_goes_on_as_fsdp_would(stage, ranks, tmp_path):
    folder = converted("fsdp2", tmp_path / "ours")
    found = run_ranks(resume, "fsdp2", tmp_path / "run", folder, 4 // ranks, stage, world_size=ranks)[0]
    compare(found, told_losses("fsdp2"), 1e-6)


def test_the_scale_of_torchs_gradient_scaler_goes_along(tmp_path):
    shutil.copytree(source("fsdp2"), tmp_path / "theirs")
    state = {
        "scale": 256.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 7,
    }
    torch.save(state, tmp_path / "theirs/scaler.pt")
    assert convert(tmp_path / "theirs", tmp_path / "ours", "--config", CONFIG) == 0
    with safe_open(tmp_path / "ours" / STATE_NAME, "pt") as file:
        extra = json.loads(file.metadata()["extra"])
    assert extra["loss_scale"] == {"scale": 256.0, "tolerated": 1, "since_overflow": 7}


def test_what_accelerate_saved_needs_no_configuration(tmp_path):
    shutil.copytree(source("fsdp2"), tmp_path / "theirs", ignore=shutil.ignore_patterns("trainer_state.json"))
    (tmp_path / "theirs/random_states_0.pkl").touch()
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 0
    weights = load_file(tmp_path / "ours/model.safetensors")
    wanted = {name: weight for name, weight in told_tensors("fsdp2").items() if name.endswith(".weight")}
    assert {f"{name}.weight" for name in weights} == wanted.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, wanted[f"{name}.weight"]), name


def lead_outside(folder):
    """Make the metadata name a file of another folder."""
    path = folder / "optimizer_0/.metadata"
    with path.open("rb") as file:
        metadata = pickle.load(file)
    for info in metadata.storage_data.values():
        info.relative_path = "../scheduler.pt"
    path.write_bytes(pickle.dumps(metadata))


def lose_a_part(folder):
    path = folder / "pytorch_model_fsdp_0/.metadata"
    with path.open("rb") as file:
        metadata = pickle.load(file)
    lost = next(index for index in metadata.storage_data if "q_proj" in index.fqn)
    del metadata.storage_data[lost]
    path.write_bytes(pickle.dumps(metadata))


def flip(folder):
    """Change one bit of the first tensor in a file."""
    path = folder / f"{MODEL}/__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[data.index(b"archive/data/0") + 256] ^= 64
    path.write_bytes(data)


def full(folder):
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        shutil.rmtree(folder / name)
    (folder / "pytorch_model_fsdp.bin").touch()


def per_rank(folder):
    full(folder)
    (folder / "optimizer_0_rank0.bin").touch()


MODEL = "pytorch_model_fsdp_0"
FAULTS = {
    "no rank": (lambda folder: (folder / f"{MODEL}/__1_0.distcp").unlink(), "__1_0.distcp is missing: the checkpoint"),
    "no metadata": (lambda folder: (folder / "optimizer_0/.metadata").unlink(), ".metadata is missing"),
    "no optimizer": (lambda folder: shutil.rmtree(folder / "optimizer_0"), "optimizer_0/.metadata is missing"),
    "cut": (lambda folder: os.truncate(folder / f"{MODEL}/__0_0.distcp", 9000), "__0_0.distcp is cut off"),
    "bit": (flip, "__0_0.distcp cannot be read: it is damaged, 'archive/data/0' has other bytes than were saved"),
    "damaged": (lambda folder: os.truncate(folder / f"{MODEL}/.metadata", 500), ".metadata cannot be read"),
    "outside": (lead_outside, "outside its folder"),
    "lost": (lose_a_part, "parts of 'model.model.layers.0.self_attn.q_proj.weight' are missing"),
    "full": (full, "FSDP's FULL_STATE_DICT checkpoints are not supported, only SHARDED_STATE_DICT"),
    "per rank": (per_rank, "one file per rank (use_dcp=False) are not supported"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_in_one_line(fault, tmp_path, capsys):
    damage, words = FAULTS[fault]
    shutil.copytree(source("fsdp2"), tmp_path / "theirs")
    damage(tmp_path / "theirs")
    assert convert(tmp_path / "theirs", tmp_path / "ours", "--config", CONFIG) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1, err
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_what_is_missing_or_half_is_told(tmp_path, capsys):
    assert convert(source("fsdp2"), tmp_path / "ours") == 2
    assert "holds no config.json: give the folder of the model" in capsys.readouterr().err
    assert convert(source("fsdp2") / "optimizer_0", tmp_path / "ours") == 2
    assert "is one half of an FSDP checkpoint: give the folder above it" in capsys.readouterr().err
