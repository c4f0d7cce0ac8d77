"""Our checkpoints become the stock Trainer's, which goes on with the losses that we would have had."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from hf_zero.checkpoint.safetensors_file import SlicedFile
from hf_zero.checkpoint.training_state import STATE_NAME
from tests.support.golden_runs import compare, convert, converted, resume
from tests.support.harness import run_ranks
from tests.support.make_golden_checkpoints import make_model
from tests.support.matrix_optimizers import Lamb, Soap


OPTIMIZERS = {"lamb": Lamb, "soap": Soap}


def ours(case, folder, **more):
    """Train under ZeRO-3 on two ranks, with a checkpoint after the third step; the losses after it, and the folder."""
    options = {"save_strategy": "steps", "save_steps": 3, **more}
    losses = run_ranks(resume, case, folder, None, 2, 3, world_size=2, **options)[0]
    return losses, folder / "checkpoint-3"


@pytest.mark.parametrize("case", ["deepspeed_zero2", "deepspeed_zero3"])
def test_the_stock_trainer_goes_on_from_it(case, tmp_path, capsys):
    wanted, checkpoint = ours(case, tmp_path / "run")
    assert convert(checkpoint, tmp_path / "stock") == 0
    found = run_ranks(resume, case, tmp_path / "again", tmp_path / "stock", 4, world_size=1)[0]
    compare(found, wanted, 1e-6)
    assert sorted(path.name for path in (tmp_path / "stock").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "optimizer.pt",
        "rng_state.pth",
        "rng_state_0.pth",
        "rng_state_1.pth",
        "scheduler.pt",
        "trainer_state.json",
    ]
    assert (tmp_path / "stock/model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    out = capsys.readouterr().out
    assert f"read a checkpoint of hf_zero from {checkpoint}\nwrote {tmp_path / 'stock'}: weights in fp32, " in out


def test_parameters_are_numbered_as_trainer_groups_them(tmp_path):
    _, checkpoint = ours("deepspeed_zero2", tmp_path / "run")
    assert convert(checkpoint, tmp_path / "stock") == 0
    saved = torch.load(tmp_path / "stock/optimizer.pt", weights_only=True)
    states = load_file(checkpoint / STATE_NAME)
    trained = [name for name, p in make_model("deepspeed_zero2").named_parameters() if p.requires_grad]
    order = [name for name in trained if "norm" not in name] + [name for name in trained if "norm" in name]
    assert [len(group["params"]) for group in saved["param_groups"]] == [8, 3]
    assert [group["weight_decay"] for group in saved["param_groups"]] == [0.1, 0.0]
    assert saved["param_groups"][0]["betas"] == (0.9, 0.999)
    assert sorted(saved["state"]) == list(range(len(order)))
    for number, name in enumerate(order):
        state = saved["state"][number]
        assert state["step"].item() == 3 and state["step"].dtype == torch.float32
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[kind], states[f"{name}.{kind}"]), (name, kind)


@pytest.mark.parametrize("name", ["adafactor", "lamb", "soap"])
def test_states_of_whole_matrices_are_exported(name, tmp_path):
    """Of matrices' shape, of their rows and columns, in lists: the stock Trainer goes on with them."""
    more = {"optim": "adafactor"} if name == "adafactor" else {"optimizer": OPTIMIZERS[name]}
    wanted, checkpoint = ours("deepspeed_zero2", tmp_path / "run", **more)
    assert convert(checkpoint, tmp_path / "stock") == 0
    saved = torch.load(tmp_path / "stock/optimizer.pt", weights_only=True)["state"]
    kinds = {
        "adafactor": {"step", "exp_avg_sq_row", "exp_avg_sq_col"},
        "lamb": {"step", "exp_avg", "exp_avg_sq"},
        "soap": {"step", "exp_avg", "exp_avg_sq", "GG", "Q"},
    }
    assert kinds[name] <= saved[0].keys() and saved[0]["step"] == 3
    found = run_ranks(resume, "deepspeed_zero2", tmp_path / "again", tmp_path / "stock", 4, world_size=1, **more)[0]
    compare(found, wanted, 1e-6)


def test_half_weights_are_exported_from_their_masters(tmp_path):
    wanted, checkpoint = ours("deepspeed_zero2", tmp_path / "run", bf16=True)
    assert load_file(checkpoint / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    assert convert(checkpoint, tmp_path / "stock") == 0
    states, kept = load_file(checkpoint / STATE_NAME), load_file(checkpoint / "model.safetensors")
    weights = load_file(tmp_path / "stock/model.safetensors")
    assert weights.keys() == kept.keys()
    for name, weight in weights.items():
        master = states.get(f"{name}.master")
        assert (master is None) == name.startswith("model.layers.0."), name
        assert torch.equal(weight, kept[name].float() if master is None else master), name
    assert json.loads((tmp_path / "stock/config.json").read_text())["dtype"] == "float32"
    # The stock Trainer computes in fp32 with autocast, and rounds elsewhere.
    found = run_ranks(resume, "deepspeed_zero2", tmp_path / "a", tmp_path / "stock", 4, world_size=1, bf16=True)[0]
    compare(found, wanted, 2e-3)


def test_what_came_from_deepspeed_goes_to_the_stock_trainer(tmp_path):
    from tests.support.golden_runs import told_losses

    case = "deepspeed_zero2_round_robin"
    assert convert(converted(case, tmp_path / "ours"), tmp_path / "stock") == 0
    found = run_ranks(resume, case, tmp_path / "run", tmp_path / "stock", 4, world_size=1)[0]
    compare(found, told_losses(case), 1e-6)


def test_the_loss_scale_becomes_that_of_torchs_scaler(tmp_path):
    from tests.integration.test_convert_deepspeed import in_fp16

    in_fp16(tmp_path / "theirs")
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 0
    assert convert(tmp_path / "ours", tmp_path / "stock") == 0
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(torch.load(tmp_path / "stock/scaler.pt", weights_only=True))
    assert scaler.get_scale() == 512.0 and scaler.state_dict()["_growth_tracker"] == 5


def test_a_write_that_fails_leaves_nothing(imported, tmp_path, capsys, monkeypatch):
    def fail(*args):
        raise RuntimeError("PytorchStreamWriter failed writing file data/1: file write failed")

    monkeypatch.setattr(torch, "save", fail)
    assert convert(imported, tmp_path / "stock") == 2
    assert "optimizer.pt cannot be written: PytorchStreamWriter failed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def without_members(folder):
    """As saved before the groups' parameters were kept."""
    path = folder / STATE_NAME
    file, tensors = SlicedFile.open(path), load_file(path)
    from safetensors.torch import save_file

    extra = json.loads(file.metadata["extra"])
    del extra["members"]
    save_file(tensors, path, {**file.metadata, "extra": json.dumps(extra)})
    recommit(folder)


def recommit(folder):
    from hf_zero.checkpoint import commit

    commit.write_marker(folder, {})


def flip(folder):
    path = folder / STATE_NAME
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def lead_outside(folder):
    tensors = dict.fromkeys(load_file(folder / "model.safetensors"), "../evil.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": tensors}))
    recommit(folder)


FAULTS = {
    "outside": (lead_outside, "index.json names '../evil.safetensors', which is no file beside it"),
    "torn": (lambda folder: (folder / "COMMIT").unlink(), "was not saved completely (it has no COMMIT file)"),
    "damaged": (flip, "is damaged: tensor '"),
    "missing": (lambda folder: (folder / "scheduler.pt").unlink(), "scheduler.pt is missing from a committed"),
    "old": (without_members, "was saved by an older hf_zero"),
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    return converted("deepspeed_zero1", tmp_path_factory.mktemp("imported") / "ours")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_in_one_line(fault, imported, tmp_path, capsys):
    damage, words = FAULTS[fault]
    shutil.copytree(imported, tmp_path / "ours")
    damage(tmp_path / "ours")
    assert convert(tmp_path / "ours", tmp_path / "stock") == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1, err
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
