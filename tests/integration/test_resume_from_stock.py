"""A run goes on from a checkpoint of the stock Trainer as the stock Trainer itself would have."""

import logging
import shutil
from pathlib import Path

import pytest
import torch

from hf_zero.errors import ZeroCheckpointError
from tests.support import zoo
from tests.support.harness import distributed, run_ranks
from tests.support.matrix_optimizers import MAKERS
from tests.support.trainers import compare_logs, make_trainer, without_times


GOLDEN = Path(__file__).parents[1] / "golden"
RUN = {
    "max_steps": 6,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "save_strategy": "steps",
    "save_steps": 3,
    "weight_decay": 0.1,
}


def with_adapters():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(zoo.build("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


def history_of(folder, stage, resume=None, adapters=False, maker=None, **arguments):
    """What was logged after step 3; `maker` has made the optimizer."""
    model = with_adapters() if adapters else zoo.build("llama")
    if maker is not None:
        (optimizer,) = MAKERS[maker](model.parameters())
        arguments["others"] = {"optimizers": (optimizer, None)}
    trainer = make_trainer("llama", stage, folder, model=model, **{**RUN, **arguments})
    trainer.train(resume_from_checkpoint=resume)
    log = [{k: v for k, v in entry.items() if k != "total_flos"} for entry in trainer.state.log_history]
    return [entry for entry in without_times(log) if entry["step"] > 3 and "loss" in entry]


OPTIMIZERS = {
    "adamw": {"optim": "adamw_torch"},
    "fused": {"optim": "adamw_torch_fused"},
    "momentum": {"others": {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9})}},
    "adagrad": {"optim": "adagrad"},
    "adapters": {"optim": "adamw_torch", "adapters": True},
    # States of whole matrices: of their shape, of rows and columns, lists.
    "adafactor": {"optim": "adafactor"},
    "adapters_by_adafactor": {"optim": "adafactor", "adapters": True},
    "lamb": {"maker": "lamb"},
    "soap": {"maker": "soap"},
    "muon": {"maker": "muon_with_adam"},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(world_size=2)
def test_losses_and_learning_rates_are_those_of_the_stock_trainer(tmp_path, name):
    stock = history_of(tmp_path / "stock", None, **OPTIMIZERS[name])
    assert [entry["step"] for entry in stock] == [4, 5, 6], stock
    checkpoint = str(tmp_path / "stock/checkpoint-3")
    for stage in (0, 1, 2, 3):
        ours = history_of(tmp_path / str(stage), stage, checkpoint, **OPTIMIZERS[name])
        compare_logs(ours, stock, f"stage {stage}")


def test_another_number_of_ranks_goes_on_too(tmp_path):
    stock = run_ranks(history_of, tmp_path / "stock", None)[0]
    checkpoint = str(tmp_path / "stock/checkpoint-3")
    ours = run_ranks(history_of, tmp_path / "ours", 2, checkpoint, per_device_train_batch_size=1, world_size=4)[0]
    compare_logs(ours, stock, "4 ranks")


@distributed(world_size=2)
def test_our_own_checkpoint_of_such_a_run_is_resumed(tmp_path):
    longer = {"max_steps": 8}
    history_of(tmp_path / "stock", None, **longer)
    whole = history_of(tmp_path / "ours", 3, str(tmp_path / "stock/checkpoint-3"), **longer)
    again = history_of(tmp_path / "again", 3, str(tmp_path / "ours/checkpoint-6"), **longer)
    assert again == whole and [entry["step"] for entry in again][-2:] == [7, 8], (again, whole)


@distributed(world_size=2)
def test_parameters_that_are_named_are_found_by_their_names(tmp_path):
    """torch's own names in a group decide, and not its order."""
    stock = history_of(tmp_path / "stock", None)
    path = tmp_path / "stock/checkpoint-3/optimizer.pt"
    if torch.distributed.get_rank() == 0:
        saved = torch.load(path, weights_only=True)
        names = dict(zoo.build("llama").named_parameters())
        decayed = [name for name in names if "norm" not in name]
        groups = [decayed, [name for name in names if name not in decayed]]
        for group, own in zip(saved["param_groups"], groups, strict=True):
            assert len(group["params"]) == len(own), "Trainer groups other parameters"
            group["params"], group["param_names"] = group["params"][::-1], own[::-1]
        torch.save(saved, path)
    torch.distributed.barrier()
    compare_logs(history_of(tmp_path / "ours", 3, str(path.parent)), stock, "by names")


# --------------------------------------------------------------------------------------------------- what does not fit


def _without_schedule(folder):
    (folder / "scheduler.pt").unlink()


def _damaged(folder):
    path = folder / "optimizer.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def _fewer_parameters(folder):
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    saved["param_groups"][0]["params"].pop()
    torch.save(saved, folder / "optimizer.pt")


def _other_shapes(folder):
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    saved["state"][0]["exp_avg"] = torch.zeros(3)
    torch.save(saved, folder / "optimizer.pt")


def _other_names(folder):
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    group = saved["param_groups"][1]
    group["param_names"] = [f"p{number}" for number in group["params"]]
    torch.save(saved, folder / "optimizer.pt")


MISFITS = {
    "schedule": (_without_schedule, {}, "scheduler.pt is missing"),
    "damaged": (_damaged, {}, "optimizer.pt cannot be read: .*has other bytes than were saved"),
    "parameters": (_fewer_parameters, {}, r"has groups of \[.*\] parameters, this run's AdamW has groups of"),
    "shapes": (_other_shapes, {}, r"'.*' has shape \(3,\), the model's is \(64, 32\)"),
    "names": (_other_names, {}, "other parameters than this run's AdamW in group 1"),
    "optimizer": (lambda folder: None, {"optim": "adagrad"}, r"the states \['exp_avg', 'exp_avg_sq'\], and Adagrad"),
    "whole": (
        lambda folder: None,
        {"optim": "adafactor"},
        r"the states \['exp_avg', 'exp_avg_sq', 'step'\], and Adafactor keeps \['RMS', 'exp_avg_sq_col', ",
    ),
}


@distributed(world_size=2)
def test_what_does_not_fit_is_named_on_all_ranks(tmp_path):
    history_of(tmp_path / "stock", None, max_steps=3)
    for name, (change, arguments, words) in MISFITS.items():
        folder = tmp_path / name / "checkpoint-3"
        if torch.distributed.get_rank() == 0:
            shutil.copytree(tmp_path / "stock/checkpoint-3", folder)
            change(folder)
        torch.distributed.barrier()
        with pytest.raises(ZeroCheckpointError, match=f"rank 0 of 2 failed: .*{words}"):
            history_of(tmp_path / "ours", 3, str(folder), **arguments)


@pytest.mark.parametrize("case, system", [("deepspeed_zero3", "DeepSpeed"), ("fsdp2", "FSDP")])
@distributed(world_size=2)
def test_checkpoints_of_other_systems_are_to_be_converted(tmp_path, case, system):
    folder = GOLDEN / case / "checkpoint-3"
    with pytest.raises(ZeroCheckpointError, match=f"training state of {system}: run `hf-zero convert {folder} DST`"):
        history_of(tmp_path, 3, str(folder))


@distributed(world_size=2)
def test_a_folder_without_optimizer_state_says_so(tmp_path):
    history_of(tmp_path / "stock", None, max_steps=3, save_only_model=True)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("hf_zero.integrations.trainer_checkpoints").addHandler(handler)
    history_of(tmp_path / "ours", 3, str(tmp_path / "stock/checkpoint-3"))
    assert any("holds no optimizer state: optimizer and scheduler start afresh" in line for line in lines), lines


@distributed(world_size=2)
def test_the_loss_scale_of_torchs_scaler_goes_on(tmp_path):
    history_of(tmp_path / "stock", None, max_steps=3)
    folder = tmp_path / "stock/checkpoint-3"
    if torch.distributed.get_rank() == 0:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        scaler.scale(torch.ones(1))
        torch.save(scaler.state_dict(), folder / "scaler.pt")
    torch.distributed.barrier()
    options = {**RUN, "max_steps": 4, "save_strategy": "no"}
    trainer = make_trainer("llama", 2, tmp_path / "ours", fp16=True, **options)
    trainer.train(resume_from_checkpoint=str(folder))
    (engine,) = trainer.accelerator._engines()
    assert engine.scaler.scale in (256.0, 128.0), engine.scaler.scale  # 65536 is where a new one begins
    history_of(tmp_path / "fp32", 2, str(folder))  # which needs no scale
