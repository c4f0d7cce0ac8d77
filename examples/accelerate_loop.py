"""An Accelerate loop under ZeRO-2: hf-zero launch --num_processes 2 examples/accelerate_loop.py"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zero import ZeroAccelerator, ZeroPlugin


model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2))
loader = torch.utils.data.DataLoader(torch.arange(64).repeat(320, 1), batch_size=8)
accelerator = ZeroAccelerator(zero_plugin=ZeroPlugin(zero_stage=2))
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
for rows in loader:
    loss = model(input_ids=rows, labels=rows).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.print(f"loss {loss.item():.4f}")
accelerator.save_model(model, "outputs/accelerate_loop")
