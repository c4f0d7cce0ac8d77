"""What `Accelerator.save_state` wrote under DeepSpeed becomes what it reads under ZeRO, for any module."""

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from hf_zero.checkpoint.training_state import STATE_NAME
from tests.support.golden_runs import LOOPS, compare, convert, source, told, told_tensors
from tests.support.harness import run_ranks
from tests.support.make_golden_checkpoints import make_plain, plain_loss


def go_on(folder, stage=None, save=None, **options):
    """Three more steps of the loop, on the data of two ranks; the means of the losses, by step.

    `stage=None` is the stock Accelerator. With `save` the state goes to that folder before.
    """
    import hf_zero

    if stage is None:
        accelerator = Accelerator(**options)
    else:
        accelerator = hf_zero.ZeroAccelerator(zero_plugin=hf_zero.ZeroPlugin(zero_stage=stage), **options)
    model, optimizer, schedule = accelerator.prepare(*make_plain())
    accelerator.load_state(str(folder))
    if save is not None:
        accelerator.save_state(str(save))
    found = {}
    mine = [accelerator.process_index] if accelerator.num_processes == 2 else [0, 1]
    for step in (4, 5, 6):
        loss = plain_loss(model, step, mine)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)  # DeepSpeed does so unless it is told otherwise
        optimizer.step()
        for _ in mine if accelerator.num_processes == 1 else [0]:  # accelerate steps once for every rank
            schedule.step()
        optimizer.zero_grad()
        found[step] = accelerator.reduce(loss.detach(), "mean").item()
    return found


@pytest.mark.parametrize("stage, ranks", [(2, 2), (3, 2), (0, 1)])
@pytest.mark.parametrize("case", LOOPS)
def test_the_loop_goes_on_as_under_deepspeed(case, stage, ranks, tmp_path):
    assert convert(source(case), tmp_path / "ours") == 0
    found = run_ranks(go_on, tmp_path / "ours", stage, world_size=ranks)[0]
    compare(found, told(case)["resumed"], 1e-6)


@pytest.mark.parametrize("case", LOOPS)
def test_weights_buffers_and_states_are_those_of_deepspeed(case, tmp_path):
    assert convert(source(case), tmp_path / "ours") == 0
    names = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert names == ["COMMIT", "model.safetensors", "random_states_0.pkl", "scheduler.bin", STATE_NAME]
    weights, states = load_file(tmp_path / "ours/model.safetensors"), load_file(tmp_path / "ours" / STATE_NAME)
    wanted = told_tensors(case)
    assert sorted(weights) == ["body.bias", "body.weight", "scale", "table.weight"]
    for name, weight in weights.items():
        assert torch.equal(weight, wanted.pop(f"{name}.weight")), name
    assert torch.equal(wanted.pop("head.weight.weight"), weights["table.weight"])
    assert states.keys() == wanted.keys()
    for name, state in states.items():
        assert torch.equal(state, wanted[name]), name


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_stock_accelerator_goes_on_from_ours(precision, tmp_path):
    """In bf16 ours has half weights and masters; the stock one keeps fp32 weights and computes under autocast."""
    ours, saved, options = tmp_path / "ours", tmp_path / "saved", {"mixed_precision": precision}
    assert convert(source(LOOPS[0]), ours) == 0
    wanted = run_ranks(go_on, ours, 3, save=saved, world_size=2, **options)[0]
    assert convert(saved, tmp_path / "stock") == 0
    names = {path.name for path in (tmp_path / "stock").iterdir()}
    assert names >= {"model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"}
    assert not names & {"COMMIT", STATE_NAME, "optimizer.pt"}
    weights = load_file(tmp_path / "stock/model.safetensors")
    told_weights = told_tensors(LOOPS[0])
    assert all(torch.equal(weights[name], told_weights[f"{name}.weight"]) for name in weights if name != "scale")
    found = run_ranks(go_on, tmp_path / "stock", world_size=1, **options)[0]
    compare(found, wanted, 1e-6 if precision == "no" else 2e-2)


def test_several_models_are_refused(tmp_path, capsys):
    import shutil

    shutil.copytree(source(LOOPS[0]), tmp_path / "theirs")
    (tmp_path / "theirs/pytorch_model_1").mkdir()
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
    assert "pytorch_model_1: a checkpoint with several models is not supported" in capsys.readouterr().err
