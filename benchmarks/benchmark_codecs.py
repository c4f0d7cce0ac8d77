"""Measures what quantised messages cost in loss: the demo on three seeds, four ranks as two nodes of two.

The loss of each setting is held against that of bf16 without codecs from the same seed, and the differences against
how far apart the seeds are. A coarse codec that must be worse shows whether the run could have seen a difference.
Run: `python benchmarks/benchmark_codecs.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]  # a clone that is not installed will do

NODES = {"zero_hpz_partition_size": 2, "node_size": 2, "no_sync": "node"}
WEIGHTS, GRADIENTS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
FOUR = {**GRADIENTS, "quantized_gradient_bits": 4}
COARSE = "coarse 4-bit gradients (control)"
BASE = "no codec"
ROWS = {
    BASE: NODES,
    "8-bit differences of weights": {**NODES, **WEIGHTS},
    "8-bit weights in every gather": {"node_size": 2, **WEIGHTS},
    "8-bit gradients": {**NODES, **GRADIENTS},
    "4-bit gradients": {**NODES, **FOUR},
    "4-bit gradients, error feedback": {**NODES, **FOUR, "zeropp_loco_param": {}},
    "8-bit weights and gradients": {**NODES, **WEIGHTS, **GRADIENTS},
    COARSE: {**NODES, **FOUR},
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--last", type=int, default=50, help="steps whose losses are averaged")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4, help="examples of each rank and step")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--output", type=Path, help="also write the runs here, as JSON")
    args = parser.parse_args(arguments)
    if BASE not in args.rows:
        parser.error(f"--rows needs '{BASE}', with which the others are compared")
    return args


def coarse_codec():
    """Four bits with one scale for a whole message and without a rotation: most gradients are sent as zero."""
    import torch
    from torch import Tensor

    from hf_zero.comm.codec import Codec

    class Coarse(Codec):
        def encode(self, values: Tensor, payload: Tensor) -> None:
            codes, peaks = self._parts(payload, values.numel())
            peak = values.float().abs().amax().bfloat16()
            peaks.fill_(peak)
            scale = (peak.float() / self._largest).clamp_min(torch.finfo(torch.float32).tiny)
            self._pack((values.float() / scale).round_().clamp_(-self._largest, self._largest).to(torch.int8), codes)

        def _rotate(self, blocks: Tensor) -> Tensor:
            return blocks

    return Coarse(4)


def read_data():
    """(settings of the demo, its tokenizer, the tokens of its training examples)."""
    import prepare_demo

    _, settings = prepare_demo.read_recipe(ROOT / "recipes/demo/sft/config_demo.yaml")
    train = [row["messages"] for row in prepare_demo.make_splits(settings)["train"]]
    texts = [message["content"] for messages in train for message in messages]
    tokenizer = prepare_demo.build_tokenizer(texts, settings.vocab_size)
    return settings, tokenizer, [tokenizer.apply_chat_template(each)["input_ids"] for each in train]


def run_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from hf_zero.comm.process_groups import join

    torch.set_num_threads(1)
    join("gloo", Path(folder) / "store", rank, 4)
    data = read_data()
    found = []
    for seed in range(args.seeds):
        for name in args.rows:
            found.append(train(name, seed, args, data))
            if rank == 0:
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    if rank == 0:
        (Path(folder) / "runs.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def train(name: str, seed: int, args: argparse.Namespace, data) -> dict:
    """One run: the mean loss of its last steps, and the largest errors that its meters have seen."""
    import dataclasses

    import prepare_demo
    import torch
    import torch.distributed as dist

    import hf_zero

    settings, tokenizer, examples = data
    model = prepare_demo.build_model(tokenizer, dataclasses.replace(settings, model_seed=seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, args.steps, pct_start=0.2)
    config = {"zero_stage": 3, "mixed_precision": "bf16", "quantized_error_limit": 1e6, **ROWS[name]}
    engine = hf_zero.shard(model, optimizer, config)
    if name == COARSE:
        engine.mesh.gradients.codec = coarse_codec()
    draw = torch.Generator().manual_seed(4 * seed + dist.get_rank())
    losses, errors = [], {}
    for step in range(args.steps):
        rows = [examples[index] for index in torch.randint(0, len(examples), (args.batch,), generator=draw).tolist()]
        length = max(map(len, rows))
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in rows])
        real = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
        loss = model(input_ids=ids, attention_mask=real, labels=ids.masked_fill(real == 0, -100)).loss
        engine.backward(loss)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step >= args.steps - args.last:
            losses.append(loss.item())
        for each in engine.mesh.quantised:
            if each.error is not None:
                errors[each.kind] = max(errors.get(each.kind, 0.0), each.error)
    mean = torch.tensor([statistics.mean(losses), *_off(engine)], dtype=torch.float64)
    dist.all_reduce(mean)
    engine.undo()
    off = (mean[1] / mean[2]).sqrt().item() if mean[2] else None
    return {"row": name, "seed": seed, "loss": mean[0].item() / 4, "errors": errors, "off": off}


def _off(engine) -> tuple[float, float]:
    """Sums of squares of how far what the nodes compute with is from the exact weights, and of these."""
    wrong = whole = 0.0
    for buffer in engine.buffers:
        if buffer.node_slice is not None:
            own = buffer.node_slice.own(buffer.begin, buffer.end).double()
            for start, stop, values in buffer.exact():
                wrong += (own[start:stop] - values).square().sum().item()
                whole += values.double().square().sum().item()
    return wrong, whole


def table(runs: list[dict]) -> str:
    """One line for each row: gaps from the base of the same seed, in units of how far the seeds are apart."""
    base = {run["seed"]: run["loss"] for run in runs if run["row"] == BASE}
    spread = max(base.values()) - min(base.values())
    lines = [
        f"Losses without codec: {', '.join(f'{loss:.4f}' for loss in base.values())}; {spread:.4f} apart.",
        "",
        "| setting | loss, mean | gap, mean | gap / seeds apart | largest error of a message | weights off by |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(run["row"] for run in runs):
        mine = [run for run in runs if run["row"] == name]
        gap = statistics.mean(run["loss"] - base[run["seed"]] for run in mine)
        kinds = {kind: max(run["errors"][kind] for run in mine) for kind in mine[0]["errors"]}
        errors = ", ".join(f"{kind} {100 * error:.2f} %" for kind, error in kinds.items())
        off = "" if mine[0]["off"] is None else f"{100 * max(run['off'] for run in mine):.3f} %"
        ratio = f"{gap / spread:+.2f}" if spread else ""
        loss = statistics.mean(run["loss"] for run in mine)
        lines.append(f"| {name} | {loss:.4f} | {gap:+.4f} | {ratio} | {errors} | {off} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    import torch
    from torch import multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_rank, (args, folder), nprocs=4)
        runs = json.loads((Path(folder) / "runs.json").read_text())
    if args.output is not None:
        args.output.write_text(json.dumps(runs, indent=1))
    print(f"torch {torch.__version__}, {args.steps} steps of 4 x {args.batch} examples, last {args.last} averaged")
    print(table(runs))


if __name__ == "__main__":
    main()
