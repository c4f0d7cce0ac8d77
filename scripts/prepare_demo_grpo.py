"""Writes the data for a deliberately weak checkpoint: the SFT demo's problems, most of them answered without work.

    python scripts/prepare_demo_grpo.py --config recipes/demo/grpo/config_sft_weak.yaml \
        --source outputs/demo/data

A model that is trained on them can work a problem out, and seldom does: what GRPO then has to find. The same settings
always give the same files.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from prepare_demo import read_recipe, write_jsonl


def leave_out_work(example: dict[str, Any]) -> dict[str, Any]:
    """The same conversation with an empty <think> block."""
    question, reply = example["messages"]
    thought, answer = reply["content"].split("</think>")
    opening = thought.splitlines()[0]
    return {"messages": [question, {**reply, "content": f"{opening}\n</think>{answer}"}]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="the recipe; the data go to its dataset_name")
    parser.add_argument("--source", required=True, help="the folder that scripts/prepare_demo.py has written")
    parser.add_argument("--share", type=float, default=0.6, help="of the replies that leave out the work")
    args = parser.parse_args(argv)
    recipe, settings = read_recipe(args.config)

    rng = random.Random(settings.data_seed)
    for split in ("train", "test"):
        lines = Path(args.source, f"{split}.jsonl").read_text().splitlines()
        examples = [json.loads(line) for line in lines]
        rows = [leave_out_work(example) if rng.random() < args.share else example for example in examples]
        write_jsonl(Path(recipe["dataset_name"], f"{split}.jsonl"), rows)
    print(f"{recipe['dataset_name']}: {args.share:.0%} of the replies leave out the work")


if __name__ == "__main__":
    main()
