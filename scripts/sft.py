"""Supervised fine-tuning with TRL's SFTTrainer under ZeRO: one script for every stage, model and data set.

    accelerate launch --config_file recipes/accelerate_configs/zero3.yaml --num_processes 2 \
        scripts/sft.py --config recipes/demo/sft/config_demo.yaml

Every field of TRL's ScriptArguments, SFTConfig and ModelConfig can stand in the recipe or on the command line, where
the command line wins. A run that finds checkpoints in its output folder goes on from the newest.
"""

import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import transformers
from datasets import load_dataset
from transformers import set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from hf_zero.trl import ZeroSFTConfig, ZeroSFTTrainer


logger = logging.getLogger("sft")


def read_arguments(*kinds: type, words: Sequence[str] | None = None) -> tuple:
    """The arguments of a script (of this process), one object for each kind.

    Recipes say `gradient_checkpointing`, which all supported versions of transformers know. The newest have another
    name for it and warn of the old one on every rank, even of TRL's own default.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`gradient_checkpointing", FutureWarning)
        return TrlParser(kinds).parse_args_and_config(args=words)


@dataclass
class SFTScriptArguments(ScriptArguments):
    """TRL's script arguments, and room for the settings of the demo."""

    demo: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "Settings of scripts/prepare_demo.py, kept in the same recipe; the training ignores them."},
    )


def check_local_path(option: str, name: str) -> None:
    """Raises if `name` can only be a folder on this machine and is not there; hub names have at most one slash."""
    looks_local = name.startswith((".", "~", os.sep)) or name.count("/") > 1
    if looks_local and not Path(name).exists():
        raise ValueError(
            f"{option}: {name!r} does not exist (looked in {Path(name).absolute()}). Correct the path, or write the "
            "files first; for the demo that is `python scripts/prepare_demo.py --config <recipe>`."
        )


def load_splits(script_args: ScriptArguments, *, with_eval: bool) -> tuple[Any, Any]:
    """The training split and, if wanted, the evaluation split, of a local folder or a data set on the hub."""
    name = script_args.dataset_name
    if name is None:
        raise ValueError("dataset_name is missing: give a folder or a name on the hub, in the recipe or as an option.")
    check_local_path("dataset_name", name)
    try:
        loaded = load_dataset(name, name=script_args.dataset_config, streaming=script_args.dataset_streaming)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"dataset_name: {name!r} could not be loaded. {type(error).__name__}: {error}") from error

    wanted = {"dataset_train_split": script_args.dataset_train_split}
    if with_eval:
        wanted["dataset_test_split"] = script_args.dataset_test_split
    for option, split in wanted.items():
        if split not in loaded:
            raise ValueError(f"{option}: {name!r} has no split {split!r}; it has {sorted(loaded)}.")
    return loaded[script_args.dataset_train_split], loaded[script_args.dataset_test_split] if with_eval else None


def set_up_logging(training_args: ZeroSFTConfig) -> None:
    """One format and one level for this script and the libraries, as the training arguments ask."""
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    level = training_args.get_process_log_level()
    logger.setLevel(level)
    datasets.utils.logging.set_verbosity(level)
    transformers.utils.logging.set_verbosity(level)


def find_checkpoint(training_args: ZeroSFTConfig) -> str | None:
    """The checkpoint that was asked for, else the newest one in the output folder."""
    if training_args.resume_from_checkpoint is not None:
        return training_args.resume_from_checkpoint
    if not os.path.isdir(training_args.output_dir):
        return None
    checkpoint = get_last_checkpoint(training_args.output_dir)
    if checkpoint is not None:
        logger.warning("Going on from %s; give another output_dir to start afresh.", checkpoint)
    return checkpoint


def train_and_save(trainer: Any, script_args: ScriptArguments, checkpoint: str | None) -> None:
    """What every script does with its trainer: train, save, evaluate, and push where that was asked for."""
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()

    # Training switches the cache off for gradient checkpointing; what is saved should generate at full speed.
    trainer.model.config.use_cache = True
    trainer.save_model(trainer.args.output_dir)
    trainer.create_model_card(dataset_name=script_args.dataset_name)
    trainer.accelerator.print(f"Model saved to {trainer.args.output_dir}")

    if trainer.args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    if trainer.args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)

    # Ends the trackers and the process group; ranks that exit without it can die in their last moment.
    trainer.accelerator.end_training()


def main(script_args: SFTScriptArguments, training_args: ZeroSFTConfig, model_args: ModelConfig) -> None:
    set_up_logging(training_args)
    set_seed(training_args.seed)
    if model_args.load_in_4bit or model_args.load_in_8bit:
        raise ValueError(
            "load_in_4bit / load_in_8bit: quantised base weights cannot be sharded; leave the option out."
        )
    if model_args.model_name_or_path is None:
        raise ValueError("model_name_or_path is missing: give a folder or a name on the hub.")
    check_local_path("model_name_or_path", model_args.model_name_or_path)
    train_dataset, eval_dataset = load_splits(script_args, with_eval=training_args.do_eval)

    checkpoint = find_checkpoint(training_args)
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    trainer = ZeroSFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=get_peft_config(model_args),
    )
    train_and_save(trainer, script_args, checkpoint)


if __name__ == "__main__":
    main(*read_arguments(SFTScriptArguments, ZeroSFTConfig, ModelConfig))
