"""The Trainer under ZeRO-3: hf-zero launch --num_processes 2 examples/trainer.py"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zero import ZeroTrainer, ZeroTrainingArguments


model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2))
rows = [{"input_ids": row, "labels": row} for row in torch.arange(64).repeat(64, 1)]
args = ZeroTrainingArguments("outputs/trainer", zero_stage=3, max_steps=20, logging_steps=5, report_to="none")
trainer = ZeroTrainer(model, args, train_dataset=rows)
trainer.train()
trainer.save_model()
