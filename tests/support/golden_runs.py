"""The checkpoints under tests/golden: their models and data, and runs of our trainer and the stock one from them."""

import json
import math
from pathlib import Path

from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

import hf_zero
from hf_zero.convert.command import main
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


def told_tensors(case):
    return load_file(GOLDEN / case / "expected.safetensors")


def convert(*words):
    """Run the command. Its exit status; argparse leaves by SystemExit."""
    return main([str(word) for word in words])


def converted(case, folder):
    config = ("--config", GOLDEN / "deepspeed_zero2/checkpoint-3") if case == "fsdp2" else ()
    assert convert(source(case), folder, *config) == 0
    return folder


def resume(case, run, checkpoint, batch, stage=None, **more):
    """The losses after the third step, by step; `stage=None` is the stock Trainer, no `checkpoint` the whole run."""
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
    if stage is None:
        trainer = Trainer(model=model, args=TrainingArguments(**arguments), train_dataset=data)
    else:
        if "scheduler" in CASES[case].get("more", {}):
            arguments["deepspeed"] = {"scheduler": CASES[case]["more"]["scheduler"]}
        args = hf_zero.ZeroTrainingArguments(zero_stage=stage, **arguments)
        trainer = hf_zero.ZeroTrainer(model=model, args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    history = trainer.state.log_history
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry and entry["step"] > SAVED}


def compare(losses, wanted, tolerance):
    wanted = {int(step): loss for step, loss in wanted.items()}
    assert losses.keys() == wanted.keys(), (losses, wanted)
    for step, loss in wanted.items():
        assert math.isclose(losses[step], loss, rel_tol=tolerance), (step, losses[step], loss)
