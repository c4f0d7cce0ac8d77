"""Loads a saved model in a plain Transformers process and prints its exact-match accuracy on the held-out problems.

    python scripts/evaluate_arithmetic.py --config recipes/demo/sft/config_demo.yaml

It reads the recipe for the paths, generates greedily, and exits with an error below `demo.min_accuracy`.
"""

import argparse
import os
import re
import sys
from typing import Any


ANSWER = re.compile(r"Answer:\s*(-?\d+)")


def extract_answer(text: str) -> int | None:
    """The number after the last `Answer:`, or None where there is none."""
    found = ANSWER.findall(text)
    return int(found[-1]) if found else None


def exact_match(replies: list[str], references: list[str]) -> float:
    """The share of replies whose answer is the reference's."""
    if len(replies) != len(references) or not references:
        raise ValueError(f"Need one reply for each reference and at least one: {len(replies)=}, {len(references)=}.")
    right = [
        extract_answer(ref) is not None and extract_answer(ref) == extract_answer(reply)
        for reply, ref in zip(replies, references, strict=True)
    ]
    return sum(right) / len(right)


def generate_replies(model: Any, tokenizer: Any, prompts: list[list[dict]], max_new_tokens: int, batch_size: int):
    """Greedy replies to chat prompts, in their order."""
    import torch

    replies = []
    for start in range(0, len(prompts), batch_size):
        inputs = tokenizer.apply_chat_template(
            prompts[start : start + batch_size],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        ).to(model.device)
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        replies += tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return replies


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="the recipe, with a `demo` section")
    parser.add_argument("--model", help="folder of the model; the recipe's output_dir if not given")
    parser.add_argument("--batch_size", type=int, default=100)
    args = parser.parse_args(argv)

    import torch
    from datasets import load_dataset
    from prepare_demo import read_recipe
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe, settings = read_recipe(args.config)
    folder = args.model or recipe["output_dir"]
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")

    problems = load_dataset(recipe["dataset_name"], split=recipe["dataset_test_split"])
    prompts = [messages[:-1] for messages in problems["messages"]]
    references = [messages[-1]["content"] for messages in problems["messages"]]
    longest = max(len(ids) for ids in tokenizer(references)["input_ids"])
    replies = generate_replies(model, tokenizer, prompts, longest + 8, args.batch_size)
    assert "hf_zero" not in sys.modules, "this process must stand for one where hf_zero is not installed"

    for prompt, reply in list(zip(prompts, replies, strict=True))[:3]:
        print(f"{prompt[-1]['content']}\n{reply}\n")
    accuracy = exact_match(replies, references)
    print(f"Held-out exact match of {folder}: {round(accuracy * len(replies))} of {len(replies)} = {accuracy:.3f}")
    if accuracy < settings.min_accuracy:
        sys.exit(f"Below {settings.min_accuracy}, the least that the recipe's demo.min_accuracy accepts.")


if __name__ == "__main__":
    # `import torch` would load the installed launcher hook of hf_zero; here nothing of it shall take part.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    main()
