"""Counts the bytes of a micro-batch with losses and MLPs in tiles, beside those of whole ones, and compares values.

    python -m benchmarks.benchmark_tiles
    python -m benchmarks.benchmark_tiles --tokens 2048 --vocabulary 8192 --tiles 256

One process trains one micro-batch of a small Llama in fp32 on the CPU. Every tensor that an operation makes is counted
until it goes: nothing is timed or sampled, so it may run beside other work.
"""

import argparse
import platform
from dataclasses import dataclass

import torch
import transformers

import hf_zero
from hf_zero.planning.meter import StorageMeter


ROWS = 4


@dataclass(frozen=True)
class Result:
    """Bytes of one micro-batch, and what it computed."""

    peak: int  # of all that forward and backward make, gradients included; not of the weights
    logits: int  # the most of them at one time
    loss: float
    gradients: list[torch.Tensor]


def micro_batch(options: argparse.Namespace, tile_loss: int, tile_mlp: int) -> Result:
    """Forward and backward of one micro-batch; the same weights and tokens at every call."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=options.tokens,
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(3, options.vocabulary, (ROWS, options.tokens // ROWS))
    engine = hf_zero.shard(model, None, {"hf_zero": {"tile_loss": tile_loss, "tile_mlp": tile_mlp}})
    meter = StorageMeter()
    meter.label((param.data for param in model.parameters()), "weights")
    meter.logits_width = options.vocabulary
    before = meter.live["weights"]
    with meter:
        meter.reset_peak()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
    gradients = [param.grad.detach().clone() for param in model.parameters()]
    return Result(meter.peak.nbytes - before, meter.most_logits, loss.item(), gradients)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tiles", type=int, nargs="+", default=[4096, 1024, 256])
    options = parser.parse_args()
    print(
        f"{options.tokens} tokens, vocabulary {options.vocabulary}, {options.layers} layers of width {options.hidden} "
        f"and {options.intermediate}, fp32; {platform.machine()} CPU, torch {torch.__version__}, "
        f"transformers {transformers.__version__}\n"
    )
    print("| tile_loss | tile_mlp | peak, MB | share | logits at most, MB | loss apart | gradients apart |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    whole = micro_batch(options, 0, 0)
    for tile_loss, tile_mlp in [(0, 0), *((size, mlp) for size in options.tiles for mlp in (0, size))]:
        found = micro_batch(options, tile_loss, tile_mlp) if tile_loss or tile_mlp else whole
        pairs = zip(found.gradients, whole.gradients, strict=True)
        apart = max((mine - its).norm() / its.norm() for mine, its in pairs)
        cells = [
            tile_loss or "whole",
            tile_mlp or "whole",
            f"{found.peak / 1e6:.0f}",
            f"{found.peak / whole.peak:.3f}",
        ]
        cells += [f"{found.logits / 1e6:.0f}", f"{abs(found.loss - whole.loss):.0e}", f"{apart:.0e}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
