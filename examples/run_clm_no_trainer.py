"""Fine-tunes a causal language model in a loop of its own on the stock `Accelerator`, with checkpoints.

    accelerate launch --config_file zero3.yaml examples/run_clm_no_trainer.py --model_name_or_path MODEL \
        --train_file text.jsonl --output_dir outputs
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, get_scheduler


def parse_args():
    parser = argparse.ArgumentParser()
    for name in ("model_name_or_path", "train_file", "output_dir"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--block_size", type=int, default=32)
    parser.add_argument("--resume_from_checkpoint")
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)

    def tokenize(rows):
        made = tokenizer(rows["text"], truncation=True, padding="max_length", max_length=args.block_size)
        labels = [[token if token != tokenizer.pad_token_id else -100 for token in ids] for ids in made["input_ids"]]
        return {**made, "labels": labels}

    with accelerator.main_process_first():
        rows = load_dataset("json", data_files=args.train_file, split="train")
        rows = rows.map(tokenize, batched=True, remove_columns=["text"])
    loader = DataLoader(rows, shuffle=True, batch_size=2, collate_fn=default_data_collator)

    biases = [param for name, param in model.named_parameters() if name.endswith(("bias", "norm.weight"))]
    kept = {id(param) for param in biases}
    groups = [
        {"params": [param for param in model.parameters() if id(param) not in kept], "weight_decay": 0.01},
        {"params": biases, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=100)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)

    model.train()
    total = torch.zeros((), device=accelerator.device)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            total += loss.detach()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses = accelerator.gather_for_metrics(torch.stack([model(**batch).loss for batch in loader]))
    accelerator.print(f"train loss {total.item() / len(loader):.4f}, loss behind it {losses.mean().item():.4f}")

    accelerator.save_state(f"{args.output_dir}/last")
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
