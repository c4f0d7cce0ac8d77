"""Reinforcement learning with TRL's GRPOTrainer under ZeRO, rewarded by functions that the recipe names.

    accelerate launch --config_file recipes/accelerate_configs/zero3.yaml --num_processes 2 \
        scripts/grpo.py --config recipes/demo/grpo/config_demo.yaml

Every field of TRL's ScriptArguments, GRPOConfig and ModelConfig can stand in the recipe or on the command line, where
the command line wins. A run that finds checkpoints in its output folder goes on from the newest.
"""

from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from rewards import find_reward
from sft import (
    SFTScriptArguments,
    check_local_path,
    find_checkpoint,
    load_splits,
    read_arguments,
    set_up_logging,
    train_and_save,
)
from transformers import set_seed
from trl import ModelConfig, get_peft_config

from hf_zero.trl import ZeroGRPOConfig, ZeroGRPOTrainer


@dataclass
class GRPOScriptArguments(SFTScriptArguments):
    """What the data set's columns mean and how replies are rewarded."""

    reward_funcs: list[str] = field(
        default_factory=lambda: ["accuracy", "format"],
        metadata={
            "help": "Rewards by name (accuracy, format, tag_count, reasoning_steps, length) or "
            "path/to/file.py:function."
        },
    )
    dataset_prompt_column: str = field(
        default="prompt",
        metadata={"help": "The column with the question, as text or as messages; a last reply in them is cut off."},
    )
    dataset_solution_column: str | None = field(
        default=None,
        metadata={"help": "The column with the solution. Default: 'solution', or the last reply of the messages."},
    )
    system_prompt: str | None = field(default=None, metadata={"help": "Put before every question."})


def to_prompts(rows: Dataset, script_args: GRPOScriptArguments) -> Dataset:
    """The columns `prompt` (messages) and `solution` that trainer and rewards read; others are kept."""
    column = script_args.dataset_prompt_column
    solution_column = script_args.dataset_solution_column or "solution"
    present = rows.column_names
    if present is not None and column not in present:
        raise ValueError(f"dataset_prompt_column: the data set has no column {column!r}; it has {sorted(present)}.")

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        question = row[column]
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        converted = {}
        if messages[-1]["role"] == "assistant":
            converted["solution"] = messages.pop()["content"]
        if solution_column in row:
            converted["solution"] = str(row[solution_column])
        if script_args.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": script_args.system_prompt})
        return {"prompt": messages, **converted}

    return rows.map(convert, remove_columns=["messages"] if "messages" in (present or ()) else None)


def main(script_args: GRPOScriptArguments, training_args: ZeroGRPOConfig, model_args: ModelConfig) -> None:
    set_up_logging(training_args)
    set_seed(training_args.seed)
    if model_args.load_in_4bit or model_args.load_in_8bit:
        raise ValueError(
            "load_in_4bit / load_in_8bit: quantised base weights cannot be sharded; leave the option out."
        )
    if model_args.model_name_or_path is None:
        raise ValueError("model_name_or_path is missing: give a folder or a name on the hub.")
    check_local_path("model_name_or_path", model_args.model_name_or_path)
    rewards = [find_reward(name) for name in script_args.reward_funcs]
    train_rows, eval_rows = load_splits(script_args, with_eval=training_args.do_eval)

    checkpoint = find_checkpoint(training_args)
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    trainer = ZeroGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=rewards,
        args=training_args,
        train_dataset=to_prompts(train_rows, script_args),
        eval_dataset=to_prompts(eval_rows, script_args) if eval_rows is not None else None,
        peft_config=get_peft_config(model_args),
    )
    train_and_save(trainer, script_args, checkpoint)


if __name__ == "__main__":
    main(*read_arguments(GRPOScriptArguments, ZeroGRPOConfig, ModelConfig))
