"""What cannot be converted is told in one line with exit status 2, and leaves nothing behind."""

import json
import os
import pickle
import shutil
import socket
import subprocess
import zipfile

import pytest
import torch
from torch.serialization import set_crc32_options

from hf_zero.convert import folder as folders
from hf_zero.convert.pickles import load, load_plain
from hf_zero.errors import ZeroCheckpointError
from tests.support.golden_runs import convert, source


OPTIM, MODEL = "zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"


def remove(name):
    return lambda folder: (folder / name).unlink()


def add(name):
    return lambda folder: (folder / name).write_bytes(b"")


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def rename(old, new):
    return lambda folder: (folder / old).rename(folder / new)


def cut(name):
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def edit(name, change):
    """Load a .pt file, change what it holds, and save it."""

    def do(folder):
        content = load(folder / name)
        change(content)
        (folder / name).unlink()
        torch.save(content, folder / name)

    return do


def flip(name, member):
    """Change one bit of a tensor in a .pt file; torch does not notice."""

    def do(folder):
        with zipfile.ZipFile(folder / name) as archive:
            found = next(info for info in archive.infolist() if info.filename.endswith(member))
        data = bytearray((folder / name).read_bytes())
        data[found.header_offset + 64 + found.file_size // 2] ^= 64  # torch aligns to 64 bytes, the header is shorter
        (folder / name).write_bytes(data)

    return do


def configure(**values):
    def do(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return do


def widen(content):
    shapes = content["param_shapes"][0]
    shapes["lm_head.weight"] = torch.Size([40, 12])


def forget(content):
    part = content["optimizer_state_dict"]
    content["optimizer_state_dict"] = {"zero_stage": 1, "partition_count": part["partition_count"]}


TAG, ADAPTER = "global_step3", "adapter_model.safetensors"
FAULTS = {
    "torn": ("deepspeed_zero1", remove(f"{TAG}/{OPTIM}"), f"{OPTIM} is missing: 2 ranks wrote this checkpoint"),
    "no model": ("deepspeed_zero1", remove(f"{TAG}/{MODEL}"), f"{MODEL} is missing: the checkpoint is incomplete"),
    "torn 3": (
        "deepspeed_zero3",
        remove(f"{TAG}/zero_pp_rank_0_mp_rank_00_model_states.pt"),
        "zero_pp_rank_0_mp_rank_00_model_states.pt is missing: 2 ranks wrote",
    ),
    "leftover": (
        "deepspeed_zero1",
        lambda folder: shutil.copy(folder / TAG / OPTIM, folder / TAG / OPTIM.replace("_1_", "_2_", 1)),
        "is not part of this checkpoint, which 2 ranks wrote",
    ),
    "cut": ("deepspeed_zero1", cut(f"{TAG}/{OPTIM}"), f"{OPTIM} cannot be read: "),
    "bit of a state": ("deepspeed_zero1", flip(f"{TAG}/{OPTIM}", "data/1"), f"{OPTIM} cannot be read: it is damaged"),
    "bit of a weight": ("deepspeed_zero1", flip(f"{TAG}/{MODEL}", "data/1"), f"{MODEL} cannot be read: it is damaged"),
    "bit of a file": ("deepspeed_zero1", flip("scheduler.pt", "data.pkl"), "scheduler.pt cannot be read: it is dam"),
    "other place": ("deepspeed_zero1", write("latest", "../theirs/global_step3"), "latest names '../theirs/global_"),
    "parent": ("deepspeed_zero1", write("latest", ".."), "latest names '..', which is no folder beside it"),
    "no tag": ("deepspeed_zero1", write("latest", "global_step9"), "global_step9 is missing: "),
    "two tags": (
        "deepspeed_zero1",
        lambda folder: (shutil.copytree(folder / TAG, folder / "global_step6"), (folder / "latest").unlink()),
        "holds global_step3, global_step6, and no `latest` file that names one: choose",
    ),
    "no states": (
        "deepspeed_zero1",
        lambda folder: [path.unlink() for path in (folder / TAG).glob("*_optim_states.pt")],
        "holds no *_optim_states.pt",
    ),
    "wide": ("deepspeed_zero1", edit(f"{TAG}/{MODEL}", widen), "the shapes of optimizer group 0 ask for 3,"),
    "other config": ("deepspeed_zero1", configure(hidden_size=16), "'model.embed_tokens.weight' has shape (29, 12)"),
    "other layers": ("deepspeed_zero1", configure(num_hidden_layers=1), "the model has no 'model.layers.1."),
    "more layers": ("deepspeed_zero1", configure(num_hidden_layers=3), "it lacks 'model.layers.2."),
    "unknown model": ("deepspeed_zero1", configure(model_type="none", architectures=[]), "config.json"),
    "no config": ("deepspeed_zero1", remove("config.json"), "holds no config.json: give the folder of the model"),
    "experts": (
        "deepspeed_zero1",
        add(f"{TAG}/layer_0_expert_0_mp_rank_00_model_states.pt"),
        "experts that are spread",
    ),
    "pipeline": ("deepspeed_zero1", add(f"{TAG}/layer_00-model_00-model_states.pt"), "pipeline parallelism"),
    "tensor": (
        "deepspeed_zero1",
        rename(f"{TAG}/{OPTIM}", f"{TAG}/zero_pp_rank_0_mp_rank_01_optim_states.pt"),
        "tensor parallelism is not supported",
    ),
    "tensor degree": (
        "deepspeed_zero1",
        edit(f"{TAG}/{MODEL}", lambda content: content.update(mp_world_size=2)),
        "tensor parallelism (of 2 ranks) is not supported",
    ),
    "layout": (
        "deepspeed_zero1",
        edit(f"{TAG}/{OPTIM.replace('_1_', '_0_', 1)}", forget),
        "is not laid out as DeepSpeed's checkpoints are: it lacks 'base_optimizer_state'",
    ),
    "no adapters": (
        "deepspeed_zero2_lora",
        remove(ADAPTER),
        "adapter_model.safetensors is missing: adapter_config.json says that this checkpoint holds adapters",
    ),
    "other adapters": (
        "deepspeed_zero2_lora",
        lambda folder: shutil.copy(
            source("deepspeed_zero1") / "model.safetensors", folder / "adapter_model.safetensors"
        ),
        "adapter_model.safetensors does not hold the trained parameter 'base_model.model.model.layers.0.",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_in_one_line(fault, tmp_path, capsys):
    case, damage, words = FAULTS[fault]
    shutil.copytree(source(case), tmp_path / "theirs")
    damage(tmp_path / "theirs")
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("hf-zero convert: ") and err.count("\n") == 1, err
    assert words in err, err
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_link_brings_no_file_of_another_place(tmp_path, capsys):
    shutil.copytree(source("deepspeed_zero1"), tmp_path / "theirs")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "theirs/notes.txt").symlink_to(tmp_path / "secret")
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
    err = capsys.readouterr().err
    assert f"theirs/notes.txt is a symbolic link to {tmp_path / 'secret'}, outside of its folder" in err, err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "theirs"]
    (tmp_path / "theirs/notes.txt").unlink()
    (tmp_path / "theirs/notes.txt").symlink_to("config.json")
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 0


def test_links_of_the_hubs_cache_are_followed(tmp_path):
    snapshot = tmp_path / "models--a--b/snapshots/123"
    shutil.copytree(source("deepspeed_zero1"), snapshot)
    (tmp_path / "models--a--b/blobs").mkdir()
    (snapshot / "config.json").rename(tmp_path / "models--a--b/blobs/456")
    (snapshot / "config.json").symlink_to("../../blobs/456")
    assert convert(snapshot, tmp_path / "ours") == 0
    assert not (tmp_path / "ours/config.json").is_symlink()


def test_what_a_killed_conversion_left_is_removed(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    host = socket.gethostname()
    mine, dead, alive = (tmp_path / f".ours.{host}.{pid}" for pid in (os.getpid(), ended.pid, os.getppid()))
    for folder in (mine, dead, alive, tmp_path / ".ours.elsewhere.1", tmp_path / f".theirs.{host}.{ended.pid}"):
        folder.mkdir()
        (folder / "model.safetensors").touch()
    assert convert(source("deepspeed_zero1"), tmp_path / "ours") == 0
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"ours", alive.name, ".ours.elsewhere.1", f".theirs.{host}.{ended.pid}"}


def test_a_file_without_checksums_is_converted_with_a_warning(tmp_path, caplog):
    shutil.copytree(source("deepspeed_zero1"), tmp_path / "theirs")
    set_crc32_options(False)
    try:
        edit(f"{TAG}/{MODEL}", lambda content: None)(tmp_path / "theirs")
    finally:
        set_crc32_options(True)
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 0
    assert [record.getMessage() for record in caplog.records] == [
        f"hf-zero convert: {tmp_path / 'theirs' / TAG / MODEL} was saved without checksums, so it is read without a "
        "check for damage"
    ]


def test_folders_that_are_nothing_of_the_kind(tmp_path, capsys):
    (tmp_path / "run/checkpoint-3").mkdir(parents=True)
    for source_folder, words in (
        ("absent", "absent does not exist"),
        ("run", "is a run and not a checkpoint: give one of its folders, checkpoint-3"),
        ("run/checkpoint-3", "is no training checkpoint of DeepSpeed, FSDP (sharded) or hf_zero"),
    ):
        assert convert(tmp_path / source_folder, tmp_path / "ours") == 2
        assert words in capsys.readouterr().err
    assert convert(__file__, tmp_path / "ours") == 2
    assert "is no folder" in capsys.readouterr().err


def test_the_target_must_be_new(tmp_path, capsys):
    (tmp_path / "ours").mkdir()
    assert convert(source("deepspeed_zero1"), tmp_path / "ours") == 2
    assert "exists: give a folder that does not exist yet" in capsys.readouterr().err
    assert convert(source("deepspeed_zero1"), tmp_path / "no/ours") == 2
    assert "no does not exist: make it first" in capsys.readouterr().err
    assert convert(source("deepspeed_zero1"), tmp_path / "new", "--config", tmp_path) == 2
    assert "is no folder that holds a config.json" in capsys.readouterr().err


def test_a_full_disk_is_found_before_anything_is_written(tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert convert(source("deepspeed_zero1"), tmp_path / "ours") == 2
    assert "has 1,000 bytes free, and 5" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_error_on_the_way_leaves_nothing(tmp_path, capsys, monkeypatch):
    def fail(*args):
        assert len(list(tmp_path.iterdir())) == 1, "built under another name"
        raise OSError("No space left on device")

    monkeypatch.setattr("hf_zero.checkpoint.commit.write_marker", fail)
    assert convert(source("deepspeed_zero1"), tmp_path / "ours") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


class Harmful:
    """Unpickled in the ordinary way, it makes a folder."""

    def __init__(self, path, call=os.mkdir):
        self.path, self.call = path, call

    def __reduce__(self):
        return self.call, (str(self.path),)


def make(path):
    os.mkdir(path)


@pytest.mark.parametrize("call", [os.mkdir, make])
def test_nothing_in_a_pickle_is_called(tmp_path, call):
    path, made = tmp_path / "x.pt", tmp_path / "made"
    torch.save({"a": torch.ones(2), "b": Harmful(made, call)}, path)
    if call is make:
        content = load(path)
        assert content["a"].tolist() == [1.0, 1.0] and content["b"].args == (str(made),)
    else:
        with pytest.raises(ZeroCheckpointError, match="x.pt cannot be read"):
            load(path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harmful(made, call)))
    assert load_plain(tmp_path / ".metadata").args == (str(made),)
    assert not made.exists()
    torch.load(path, weights_only=False)
    assert made.exists(), "this test can fail"


def test_help_says_what_it_does(capsys):
    with pytest.raises(SystemExit) as left:
        convert("--help")
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert "SRC" in text and "DST" in text and "--config FOLDER" in text
