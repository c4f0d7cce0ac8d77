"""The classic tables follow from the formulas; the engine's counted bytes follow the formulas for 1 to 64 ranks."""

from pathlib import Path

import pytest
import transformers

from benchmarks.zero_formulas import NO_MASTER, PAPER, engine_state_bytes, sent_bytes, state_bytes
from hf_zero.config import ZeroConfig
from hf_zero.planning.model import BatchShape, build
from hf_zero.planning.trace import Scenario, trace


PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


@pytest.mark.parametrize(
    "billions, ranks, stage, accounting, gigabytes",
    [
        (7, 4, 0, PAPER, 112),
        (7, 4, 1, PAPER, 49),
        (7, 4, 2, PAPER, 38.5),
        (7, 4, 3, PAPER, 28),
        (175, 4, 0, NO_MASTER, 2100),
        (175, 4, 1, NO_MASTER, 1050),
        (175, 4, 2, NO_MASTER, 787.5),
        (175, 4, 3, NO_MASTER, 525),
        (175, 8, 3, NO_MASTER, 262.5),
    ],
)
def test_the_classic_tables(billions, ranks, stage, accounting, gigabytes):
    assert state_bytes(billions * 1e9, ranks, stage, accounting) == gigabytes * 1e9
    row = f"| {billions}B | {ranks} | {stage} | {accounting.weight} + {accounting.gradient} + {accounting.optimizer} "
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith(row)]
    assert len(rows) == 1 and f" {gigabytes:,} " in rows[0], rows


@pytest.mark.parametrize("stage, times", [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_communication_in_models_per_step(stage, times):
    # With gradients as wide as weights, and as many ranks as make (N - 1) / N one.
    assert sent_bytes(1.0, 10**9, stage, weight=2, gradient=2) / 2 == pytest.approx(times)


@pytest.fixture(scope="module")
def model():
    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=2,
        num_attention_heads=8,
        vocab_size=8192,
        architectures=["LlamaForCausalLM"],
    )
    return build(config)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_counted_bytes_follow_the_formulas(model, ranks, stage):
    scenario = Scenario(
        config=ZeroConfig(zero_stage=stage, mixed_precision="bf16", stage3_prefetch_bucket_size=1),
        world_size=ranks,
        batch=BatchShape(rows=1, length=8),
    )
    found = trace(model, scenario)
    numel = sum(param.numel() for param in model.parameters())
    effective = stage if ranks > 1 else 0
    assert found.resident_bytes + found.gradients == pytest.approx(
        engine_state_bytes(numel, ranks, effective), rel=0.01
    )
    once = 2 * model.lm_head.weight.numel()
    sent = sum(count for kind, count in found.sent.items() if kind != "scalars")
    assert sent == pytest.approx(sent_bytes(numel, ranks, effective, gathered_once=once), rel=0.01)
