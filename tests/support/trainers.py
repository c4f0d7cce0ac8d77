"""Builds stock and ZeRO trainers over the same tiny data, and collects what they logged and saved."""

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from packaging.version import Version
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

import hf_zero
from tests.support import zoo


# Until transformers 5.7 the Trainer divides by the number of micro-batches, and then Accelerate does it once more.
DIVIDES_TWICE = Version(transformers.__version__) < Version("5.8")


def make_data(name, count, seed=5):
    """Examples of equal length whose number of counted labels differs."""
    examples = []
    for number in range(count):
        one = {key: value[0] for key, value in zoo.batch(name, seed, number).items()}
        if one["labels"].ndim:
            one["labels"][: 1 + number % 5] = -100
        examples.append(one)
    return examples


def forget_accelerate():
    """Let the next trainer of this process start from nothing, as in a process of its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


def make_trainer(
    name, stage, folder, *, model=None, trainer_class=None, arguments_class=None, others=None, **arguments
):
    """A trainer at a ZeRO stage; `stage=None` is the stock Trainer under DDP.

    `arguments` go to the training arguments, `others` to the trainer itself.
    """
    forget_accelerate()
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        # With the usual 1e-8, rounding noise in gradients that should be zero becomes whole steps.
        "adam_epsilon": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **arguments,
    }
    given = {
        "model": zoo.build(name) if model is None else model,
        "train_dataset": make_data(name, 22),
        "eval_dataset": make_data(name, 6, seed=6),
    }
    given |= others or {}
    if stage is None:
        trainer = (trainer_class or Trainer)(args=(arguments_class or TrainingArguments)(**settings), **given)
        if DIVIDES_TWICE:
            trainer.accelerator.gradient_accumulation_steps = 1
    else:
        args = (arguments_class or hf_zero.ZeroTrainingArguments)(zero_stage=stage, **settings)
        trainer = (trainer_class or hf_zero.ZeroTrainer)(args=args, **given)
    assert trainer.accelerator.num_processes == dist.get_world_size(), "the ranks would train alone"
    return trainer


def saved_weights(trainer, folder):
    """What the trainer writes, by name; the writer's rank is the only one with files, so all ranks wait for it."""
    trainer.save_model(str(folder))
    trainer.accelerator.wait_for_everyone()
    return load_file(folder / "model.safetensors")


COMPARED = {"loss": 1e-6, "eval_loss": 1e-6, "learning_rate": 1e-9, "grad_norm": None, "epoch": 0.0}


def compare_logs(ours, stock, what):
    """Fail unless two log histories agree: losses to 1e-6, gradient norms to 1e-5 relative."""
    assert len(ours) == len(stock), f"{what}: {len(ours)} log entries, not {len(stock)}"
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine.keys() == theirs.keys(), f"{what}: {mine} {theirs}"
        for key in COMPARED.keys() & theirs.keys():
            limit = 1e-5 * theirs[key] if key == "grad_norm" else COMPARED[key] * max(1.0, abs(theirs[key]))
            near = abs(float(mine[key]) - float(theirs[key])) <= limit
            assert near, f"{what}: {key} of step {theirs['step']} is {mine[key]!r}, not {theirs[key]!r}"


def compare_weights(ours, stock, what, tolerance=1e-6):
    assert ours.keys() == stock.keys(), f"{what}: {ours.keys() ^ stock.keys()}"
    for name, weight in stock.items():
        assert ours[name].dtype == weight.dtype and ours[name].shape == weight.shape, f"{what}: {name}"
        apart = (ours[name].double() - weight.double()).abs().max().item()
        assert apart <= tolerance, f"{what}: {name} differs by {apart:.3e}"


def without_times(history):
    """A log history without what depends on the clock."""
    return [{k: v for k, v in entry.items() if "time" not in k and "per_second" not in k} for entry in history]


def train(name, stage, folder, **arguments):
    """Train one epoch and return (log history, saved weights)."""
    torch.manual_seed(0)
    trainer = make_trainer(name, stage, folder, **arguments)
    trainer.train()
    return without_times(trainer.state.log_history), saved_weights(trainer, folder)
