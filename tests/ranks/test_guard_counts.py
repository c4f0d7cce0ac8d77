"""A guard on size and speed that cannot be noisy: per step it counts collectives, bytes, Python calls, allocations."""

import contextlib
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.comm.transport.reads import CACHED
from tests.support.harness import distributed


sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from benchmark_formulas import Traffic, gathered_bytes, reduced_bytes  # noqa: E402


PACKAGE = str(Path(hf_zero.__file__).parent)
LAYERS = 4

# Calls of hf_zero's Python functions, at most: for a step, for each layer of 9 parameters, for each further parameter.
# Whoever adds work in steady state has to raise a number here; whoever removes some lowers it.
CALLS = {
    0: (503, 165, 4),
    1: (551, 187, 4),
    2: (551, 187, 4),
    3: (623, 261, 4),
}


BIASES = 7  # parameters that a layer has more with biases than without


def build(layers, biases):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        attention_bias=biases,
        mlp_bias=biases,
    )
    return LlamaForCausalLM(config)


class Run:
    """A small model that trains; `window` is one optimizer step."""

    def __init__(self, stage, *, layers=LAYERS, biases=False, accumulation=1, **settings):
        self.model, self.accumulation = build(layers, biases), accumulation
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.engine = hf_zero.shard(self.model, self.optimizer, {"zero_stage": stage, **settings})
        self.units = self.engine.units

    def window(self):
        for micro in range(self.accumulation):
            ids = torch.randint(0, 128, (1, 8))
            last = micro == self.accumulation - 1
            with contextlib.nullcontext() if last else self.engine.no_sync():
                self.engine.backward(self.model(input_ids=ids, labels=ids).loss)
        self.engine.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self):
        """Steps until nothing is done for the first time: states are made, the order of units is known."""
        for _ in range(3):
            self.window()
        self.engine.comm.traffic.clear()
        return self


# -- collectives and bytes ------------------------------------------------------------------------------------------


def expected_calls(stage, buffers, accumulation, local):
    """One collective per unit, whose parameters have one dtype here."""
    reductions = buffers * (accumulation if stage >= 2 and not local else 1)
    if stage == 0:
        return {"all_reduce": buffers}
    # At stage 3 the embedding and the head are gathered once per micro-batch, all others twice.
    gathers = buffers if stage < 3 else accumulation * (2 * buffers - 2)
    return {"all_gather": gathers, "reduce_scatter": reductions, "scalars": 1}


def check_traffic(stage, accumulation, local, precision, wire):
    run = Run(
        stage,
        accumulation=accumulation,
        no_sync="local" if local else "reduce",
        mixed_precision=precision,
        communication_data_type=wire,
    ).settle()
    run.window()
    counts, ranks = run.engine.comm, dist.get_world_size()
    assert dict(counts.traffic.calls) == expected_calls(stage, len(run.units), accumulation, local)
    padded = [sum(buffer.layout.padded_numel for buffer in unit.buffers) for unit in run.units]
    traffic = Traffic(
        units=padded,
        kept=(padded[0], padded[-1]),
        ranks=ranks,
        accumulation=accumulation,
        weight_bytes=2 if precision == "bf16" else 4,
        gradient_bytes=2 if wire == "bf16" else 4,
        local=local,
    )
    gradients = "all_reduce" if stage == 0 else "reduce_scatter"
    expected = {"all_gather": gathered_bytes(stage, traffic), gradients: reduced_bytes(stage, traffic)}
    if stage:
        expected["scalars"] = 8 * (ranks - 1)  # the norm, in fp64
    found = dict(counts.traffic.bytes_sent)
    assert found == {kind: sent for kind, sent in expected.items() if sent}, (found, expected)
    # Padding is small where parameters are not: at most 128 elements for each of them.
    whole = sum(param.numel() for param in run.model.parameters())
    assert sum(padded) <= 1.01 * whole, (sum(padded), whole)


@pytest.mark.parametrize("stage, accumulation, local", [(0, 1, False), (1, 1, False), (1, 4, False), (2, 1, False),
                                                        (2, 4, False), (2, 4, True), (3, 1, False), (3, 4, False),
                                                        (3, 4, True)])  # fmt: skip
@distributed(world_size=2)
def test_collectives_and_bytes_of_a_step(stage, accumulation, local):
    check_traffic(stage, accumulation, local, "no", "fp32")


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_collectives_and_bytes_of_a_step_in_bf16(stage, wire):
    check_traffic(stage, 2, False, "bf16", wire)


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=4)
def test_collectives_and_bytes_of_a_step_on_four_ranks(stage):
    check_traffic(stage, 1, False, "no", "fp32")


# -- Python calls -----------------------------------------------------------------------------------------------------


def python_calls(action):
    """How often each function of the package is entered on the calling thread while `action` runs."""
    entered = Counter()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered[frame.f_code] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
    return entered


def check_python_calls(stage):
    counts = {}
    for layers, biases in ((2, False), (6, False), (6, True)):
        # Sent messages take the same calls every time; how often a rank looks for a peer's offer is chance.
        run = Run(stage, layers=layers, biases=biases, peer_memory=False).settle()
        counts[layers, biases] = sum(python_calls(run.window).values())
    per_param = (counts[6, True] - counts[6, False]) / (6 * BIASES)
    per_layer = (counts[6, False] - counts[2, False]) / 4
    per_step = counts[2, False] - 2 * per_layer
    found = (per_step, per_layer, per_param)
    assert all(value > 0 for value in found), f"stage {stage}: nothing was counted: {found}"
    assert all(value <= bound for value, bound in zip(found, CALLS[stage], strict=True)), (
        f"stage {stage}: (per step, per layer, per parameter) {found} calls, at most {CALLS[stage]} allowed"
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_python_calls_of_a_step(stage):
    check_python_calls(stage)


# -- allocations ------------------------------------------------------------------------------------------------------


def allocations(action, folder):
    """The sizes in bytes of all tensor storages that are allocated while `action` runs, and how often each."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    trace = folder / f"trace-{dist.get_rank()}.json"
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    sizes = (event["args"]["Bytes"] for event in events if event.get("name") == "[memory]")
    return Counter(size for size in sizes if size > 0)


@pytest.mark.parametrize("peer_memory", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_flat_storages_allocated_in_a_step(stage, peer_memory, tmp_path):
    """A layer's gradients are collected in one storage and received in one slice from each other rank; where ranks
    read each other's memory they stay where they are, and only a part of the slice is put together and read at a time
    (here: all of it), in memory that all reductions share. The masters' gradients are one slice per layer. At stage 3
    a layer's weights get one storage in forward and one in backward."""
    run = Run(stage, peer_memory=peer_memory).settle()
    layers = [buffer.layout.padded_numel * 4 for unit in run.units[1:-1] for buffer in unit.buffers]
    smallest = min(layers) // 2
    largest_gradient = max(param.numel() for param in run.model.model.layers.parameters()) * 4
    assert largest_gradient < smallest, (largest_gradient, smallest)
    found = allocations(run.window, tmp_path)
    whole = (2 if stage == 3 else 0) + (0 if peer_memory else 1)
    # The sum, which is made in what is read of rank 0; and on rank 0, which copies its own there, what is read.
    wanted = Counter({4 * CACHED: (1 if dist.get_rank() else 2) if peer_memory else 0})
    for layer in layers:
        wanted.update({layer: whole, layer // 2: 2})
    flat = {size: count for size, count in found.items() if size >= smallest}
    assert flat == +wanted, f"bytes: times allocated {flat}, expected {wanted}"
