"""The checkpoints under tests/golden: their models and data, and runs of our trainer and the stock one from them."""

import json
import math
from pathlib import Path

import pytest
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

import hf_zero
from hf_zero.cli import main
from tests.support.make_golden_checkpoints import CASES, SAVED, make_data, make_model
from tests.support.trainers import forget_accelerate


GOLDEN = Path(__file__).parents[1] / "golden"
LOOPS = [case for case in CASES if "loop" in CASES[case]]
ADAPTERS = [case for case in CASES if "lora" in CASES[case]]
DEEPSPEED = [case for case in CASES if "deepspeed" in CASES[case] and not {"loop", "lora"} & CASES[case].keys()]


def source(case):
    return GOLDEN / case / f"checkpoint-{SAVED}"


def told(case):
    """What the system said about its own run."""
    return json.loads((GOLDEN / case / "expected.json").read_text())


def told_losses(case):
    """The losses of a Trainer's run after its checkpoint; skips the test where this Trainer averages otherwise."""
    if Version(transformers.__version__) < Version("5.10"):
        pytest.skip("until transformers 5.9 the Trainer averaged losses over one label more per row")
    return told(case)["resumed"]


def told_tensors(case):
    return load_file(GOLDEN / case / "expected.safetensors")


def convert(*words):
    """Run the command. Its exit status; argparse leaves by SystemExit."""
    return main(["convert", *map(str, words)])


def converted(case, folder):
    config = ("--config", GOLDEN / "deepspeed_zero2/checkpoint-3") if case == "fsdp2" else ()
    assert convert(source(case), folder, *config) == 0
    return folder


def resume(case, run, checkpoint, batch, stage=None, optimizer=None, **more):
    """The losses after the third step, by step; `stage=None` is the stock Trainer, no `checkpoint` the whole run.

    `optimizer`, a class, takes the place of the case's.
    """
    forget_accelerate()
    arguments = {
        "output_dir": str(run),
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": CASES[case].get("bf16", False),
        "save_strategy": "no",
        **{key: value for key, value in told(case)["arguments"].items() if key != "save_steps"},
        "per_device_train_batch_size": batch,
        **more,
    }
    model, data = make_model(case), make_data()
    own = {} if optimizer is None else {"optimizer_cls_and_kwargs": (optimizer, {})}
    if stage is None:
        trainer = Trainer(model=model, args=TrainingArguments(**arguments), train_dataset=data, **own)
    else:
        if "scheduler" in CASES[case].get("more", {}):
            arguments["deepspeed"] = {"scheduler": CASES[case]["more"]["scheduler"]}
        args = hf_zero.ZeroTrainingArguments(zero_stage=stage, **arguments)
        trainer = hf_zero.ZeroTrainer(model=model, args=args, train_dataset=data, **own)
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    history = trainer.state.log_history
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry and entry["step"] > SAVED}


def compare(losses, wanted, tolerance):
    wanted = {int(step): loss for step, loss in wanted.items()}
    assert losses.keys() == wanted.keys(), (losses, wanted)
    for step, loss in wanted.items():
        assert math.isclose(losses[step], loss, rel_tol=tolerance), (step, losses[step], loss)
