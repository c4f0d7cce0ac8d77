"""A training loop written for DeepSpeed, with one line changed: it learns to reverse short sequences.

    hf-zero launch --num_gpus 2 examples/deepspeed_loop/train.py \
        --deepspeed --deepspeed_config examples/deepspeed_loop/ds_config.json
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import hf_zero.deepspeed as deepspeed


VOCABULARY, LENGTH = 16, 8


class Reverser(nn.Module):
    def __init__(self, width=32, layers=2, heads=4):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, dim_feedforward=2 * width, batch_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        hidden = self.embed(tokens) + self.position
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class Sequences(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return tokens, tokens.flip(0)


def loss_of(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--checkpoints", help="folder to save to after each epoch")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint")
    args = deepspeed.add_config_arguments(parser).parse_args(argv)

    torch.manual_seed(0)
    with deepspeed.zero.Init(config=args.deepspeed_config):
        model = Reverser()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Sequences(args.samples)
    )
    first, losses = 0, []
    if args.resume:
        _, state = engine.load_checkpoint(args.checkpoints)
        first = state["epoch"] + 1
    for epoch in range(first, args.epochs):
        loader.data_sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = loss_of(engine, inputs.to(engine.device), targets.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if engine.global_rank == 0:
            norm, rate = engine.get_global_grad_norm(), engine.get_lr()[0]
            print(f"epoch {epoch}: step {engine.global_steps}, loss {losses[-1]:.4f}, norm {norm:.3f}, lr {rate:.2e}")
        if args.checkpoints:
            # On all ranks: each of them writes the part that it has.
            engine.save_checkpoint(args.checkpoints, tag=f"epoch_{epoch}", client_state={"epoch": epoch})
    deepspeed.runtime.utils.see_memory_usage("after training", force=True)
    return engine, losses


if __name__ == "__main__":
    main()
