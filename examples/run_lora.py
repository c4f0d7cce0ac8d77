"""Trains low-rank adapters of PEFT in a loop on the stock `Accelerator`, and saves them.

    accelerate launch --config_file zero3.yaml examples/run_lora.py --model_name_or_path MODEL \
        --train_file text.jsonl --output_dir outputs
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator


def main():
    parser = argparse.ArgumentParser()
    for name in ("model_name_or_path", "train_file", "output_dir"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    accelerator = Accelerator()
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
    model = get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=16, lora_dropout=0.0))

    def tokenize(rows):
        made = tokenizer(rows["text"], truncation=True, padding="max_length", max_length=32)
        return {**made, "labels": made["input_ids"]}

    rows = load_dataset("json", data_files=args.train_file, split="train")
    rows = rows.map(tokenize, batched=True, remove_columns=["text"])
    loader = DataLoader(rows, shuffle=True, batch_size=2, collate_fn=default_data_collator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.4f}")
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir,
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
    )


if __name__ == "__main__":
    main()
