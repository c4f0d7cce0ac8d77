"""A torch loop under ZeRO-3 that saves, and goes on where it was when it is started again, at any number of ranks.

torchrun --standalone --nproc-per-node 2 examples/plain_loop.py MODEL outputs/loop --steps 50
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import hf_zero


parser = argparse.ArgumentParser()
parser.add_argument("model", help="a folder or a name on the hub")
parser.add_argument("folder", type=Path, help="where the checkpoint is, and what was trained")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--save_steps", type=int, default=10)
args = parser.parse_args()

torch.distributed.init_process_group()
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
model = AutoModelForCausalLM.from_pretrained(args.model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine = hf_zero.shard(model, optimizer, {"zero_stage": 3})
step = engine.load_checkpoint(args.folder)["step"] if args.folder.exists() else 0

while step < args.steps:
    # Eight rows per step, whatever the number of ranks: each takes every `ranks`-th.
    rows = torch.randint(0, model.config.vocab_size, (8, 16), generator=torch.Generator().manual_seed(step))[
        rank::ranks
    ]
    loss = model(input_ids=rows, labels=rows).loss
    engine.backward(loss)
    engine.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % args.save_steps == 0 or step == args.steps:
        engine.save_checkpoint(args.folder, {"step": step})
        mean = engine.comm.all_reduce_scalars(loss.detach()) / ranks
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}", flush=True)
torch.distributed.destroy_process_group()
