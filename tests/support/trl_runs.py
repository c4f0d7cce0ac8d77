"""Tiny chat data, a tokenizer and a policy for TRL's trainers, and the comparison of what they logged."""

import functools
import math

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from hf_zero.trl import ZeroGRPOConfig, ZeroGRPOTrainer, ZeroSFTConfig, ZeroSFTTrainer
from scripts.prepare_demo import build_tokenizer, make_example
from tests.support.trainers import make_trainer, saved_weights, without_times


# (stock trainer, its arguments, ours, ours)
SFT = (SFTTrainer, SFTConfig, ZeroSFTTrainer, ZeroSFTConfig)
GRPO = (GRPOTrainer, GRPOConfig, ZeroGRPOTrainer, ZeroGRPOConfig)
CONVERSATIONS = [
    make_example(7 * n % 90, "+-"[n % 2], 3 * n % 50, ("What is {a} + {b}?", "Take {b} from {a}.")[n % 2])["messages"]
    for n in range(24)
]


@functools.cache
def tokenizer():
    texts = ["\n".join(message["content"] for message in messages) for messages in CONVERSATIONS]
    return build_tokenizer(texts, 290)


def policy(seed=0, **changes):
    words = tokenizer()
    settings = {
        "vocab_size": len(words),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": words.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": words.eos_token_id,
        "initializer_range": 0.1,
        **changes,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**settings))


def conversations(count=24):
    return Dataset.from_list([{"messages": messages} for messages in CONVERSATIONS[:count]])


def prompts(count=16):
    return Dataset.from_list(
        [{"prompt": messages[:1], "solution": messages[1]["content"]} for messages in CONVERSATIONS[:count]]
    )


def digit_share(completions, **kwargs):
    """The share of digits in a reply."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter.isdigit() for letter in text) / (len(text) + 1) for text in texts]


def shortness(completion_ids, **kwargs):
    return [-0.1 * len(ids) for ids in completion_ids]


def make(kind, stage, folder, *, others=None, model=None, data=None, **arguments):
    """A trainer of one of the kinds above; `stage=None` is the stock one under DDP."""
    stock, stock_arguments, ours, our_arguments = kind
    given = {
        "processing_class": tokenizer(),
        "train_dataset": data if data is not None else conversations(),
        "eval_dataset": None,
        **(others or {}),
    }
    return make_trainer(
        None,
        stage,
        folder,
        model=model if model is not None else policy(),
        trainer_class=stock if stage is None else ours,
        arguments_class=stock_arguments if stage is None else our_arguments,
        others=given,
        **{"gradient_checkpointing": False, "bf16": False, "learning_rate": 5e-3, **arguments},
    )


def make_grpo(stage, folder, *, rewards=(digit_share,), others=None, **arguments):
    settings = {
        "num_generations": 4,
        "max_completion_length": 6,
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "lr_scheduler_type": "constant",
        **arguments,
    }
    others = {"reward_funcs": list(rewards), **(others or {})}
    return make(GRPO, stage, folder, others=others, data=prompts(), **settings)


def outcome(trainer, folder):
    """Train, and return (log history, saved weights)."""
    trainer.train()
    return without_times(trainer.state.log_history), saved_weights(trainer, folder)


def compare(ours, stock, what, tolerance=1e-5):
    """Fail unless two outcomes agree in every logged number and every saved weight."""
    (logs, weights), (stock_logs, stock_weights) = ours, stock
    assert len(logs) == len(stock_logs), f"{what}: {len(logs)} log entries, not {len(stock_logs)}"
    for mine, theirs in zip(logs, stock_logs, strict=True):
        assert mine.keys() == theirs.keys(), f"{what}: {mine.keys() ^ theirs.keys()}"
        for key, value in theirs.items():
            if key in ("total_flos", "step_time") or not isinstance(value, (int, float)) or math.isnan(value):
                continue
            near = abs(mine[key] - value) <= tolerance * max(1.0, abs(value))
            assert near, f"{what}: {key} of step {theirs['step']} is {mine[key]!r}, not {value!r}"
    assert weights.keys() == stock_weights.keys(), f"{what}: {weights.keys() ^ stock_weights.keys()}"
    for name, weight in stock_weights.items():
        apart = (weights[name].double() - weight.double()).abs().max().item()
        assert apart <= tolerance, f"{what}: {name} differs by {apart:.3e}"
