"""Writes what the demo trains from: arithmetic problems with worked answers, a tokenizer and an untrained model.

    python scripts/prepare_demo.py --config recipes/demo/sft/config_demo.yaml

The same settings always give the same files. Nothing is downloaded.
"""

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml


PHRASES = {
    "+": ("What is {a} + {b}?", "Compute {a} + {b}.", "Add {a} and {b}."),
    "-": ("What is {a} - {b}?", "Compute {a} - {b}.", "Subtract {b} from {a}."),
}

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK_START, THINK_END = "<think>", "</think>"

# The generation markers tell TRL which tokens are the assistant's own; the end of the turn is one of them,
# otherwise the model never learns to stop.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "{{- '<|im_start|>assistant\n' -}}"
    "{%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}"
    "{{- '\n' -}}"
    "{%- else -%}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The `demo` section of the recipe."""

    data_seed: int
    train_examples: int
    test_examples: int
    max_digits: int
    min_accuracy: float
    vocab_size: int
    model_seed: int
    model: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("train_examples", "test_examples", "max_digits"):
            if getattr(self, name) < 1:
                raise ValueError(f"demo.{name} must be at least 1, got {getattr(self, name)}.")
        wanted, available = self.train_examples + self.test_examples, count_problems(self.max_digits)
        # Problems are drawn until enough different ones are found, so a share close to all would never end.
        if wanted > available // 4:
            raise ValueError(
                f"demo.train_examples + demo.test_examples = {wanted}, but numbers of up to {self.max_digits} digits "
                f"give room for {available // 4} different problems: raise demo.max_digits or ask for fewer examples."
            )


def count_problems(max_digits: int) -> int:
    """How many different problems there are: sums and differences of unordered pairs."""
    numbers = 10**max_digits
    return numbers * (numbers + 1)


def read_recipe(path: str | Path) -> tuple[dict[str, Any], DemoSettings]:
    """The whole recipe and its checked `demo` section."""
    recipe = yaml.safe_load(Path(path).read_text())
    section = recipe.get("demo") if isinstance(recipe, dict) else None
    if not isinstance(section, dict):
        raise ValueError(f"{path} has no `demo:` section; recipes/demo/sft/config_demo.yaml shows one.")
    known = {f.name for f in fields(DemoSettings)}
    if wrong := (set(section) ^ known) - {"model"}:
        raise ValueError(
            f"{path}: section `demo` has unknown or missing keys {sorted(wrong)}; known: {sorted(known)}."
        )
    return recipe, DemoSettings(**section)


def work_out(a: int, op: str, b: int) -> list[str]:
    """One line for each column, lowest digit first, as it is done on paper."""
    digits_a, digits_b = str(a)[::-1], str(b)[::-1]
    lines, carry = [], 0
    for i in range(max(len(digits_a), len(digits_b))):
        x = int(digits_a[i]) if i < len(digits_a) else 0
        y = int(digits_b[i]) if i < len(digits_b) else 0
        moved = f"{op}1" if carry else ""
        if op == "+":
            total = x + y + carry
            carry = total // 10
            lines.append(f"{x}+{y}{moved}={total}" + (", carry 1" if carry else ""))
        else:
            borrow = int(x - y - carry < 0)
            x += 10 * borrow
            lines.append(f"{x}-{y}{moved}={x - y - carry}" + (", borrow 1" if borrow else ""))
            carry = borrow
    return lines


def make_example(a: int, op: str, b: int, phrase: str) -> dict[str, Any]:
    """A conversation in the format of chat data sets."""
    answer = a + b if op == "+" else a - b
    reply = "\n".join([THINK_START, *work_out(a, op, b), THINK_END, "", f"Answer: {answer}"])
    return {
        "messages": [
            {"role": "user", "content": phrase.format(a=a, b=b)},
            {"role": "assistant", "content": reply},
        ]
    }


def draw_examples(rng: random.Random, max_digits: int) -> Iterator[dict[str, Any]]:
    """Endless examples, each a problem that has not come before (385 + 247 and 247 + 385 are the same one)."""
    lengths = range(1, max_digits + 1)
    seen = set()

    def draw_number() -> int:
        # Long numbers often, short ones now and then.
        length = rng.choices(lengths, weights=[4**n for n in lengths])[0]
        return rng.randrange(10 ** (length - 1) if length > 1 else 0, 10**length)

    while True:
        op, a, b = rng.choice("+-"), draw_number(), draw_number()
        key = (op, max(a, b), min(a, b))
        if key in seen:
            continue
        seen.add(key)
        if op == "-":
            a, b = max(a, b), min(a, b)
        yield make_example(a, op, b, rng.choice(PHRASES[op]))


def make_splits(settings: DemoSettings) -> dict[str, list[dict[str, Any]]]:
    """The training and the held-out examples; no problem is in both."""
    examples = draw_examples(random.Random(settings.data_seed), settings.max_digits)
    test = [next(examples) for _ in range(settings.test_examples)]
    return {"train": [next(examples) for _ in range(settings.train_examples)], "test": test}


def build_tokenizer(texts: list[str], vocab_size: int):
    """A byte-level BPE tokenizer trained on the texts, one token for each digit, with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    # Plain tokens, not special ones: decoding keeps them.
    bpe.add_tokens([THINK_START, THINK_END])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer, settings: DemoSettings):
    """An untrained Qwen3-style decoder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **settings.model,
    )
    torch.manual_seed(settings.model_seed)
    return Qwen3ForCausalLM(config)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the file under its final name only when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.replace(path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="the recipe, with a `demo` section")
    recipe, settings = read_recipe(parser.parse_args(argv).config)

    splits = make_splits(settings)
    data_dir, model_dir = Path(recipe["dataset_name"]), Path(recipe["model_name_or_path"])
    for name, rows in splits.items():
        write_jsonl(data_dir / f"{name}.jsonl", rows)

    texts = ["\n".join(m["role"] + "\n" + m["content"] for m in row["messages"]) for row in splits["train"]]
    tokenizer = build_tokenizer(texts, settings.vocab_size)
    model = build_model(tokenizer, settings)
    model.save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)
    print(f"{data_dir}: {len(splits['train'])} training and {len(splits['test'])} held-out problems")
    print(f"{model_dir}: untrained decoder, {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
