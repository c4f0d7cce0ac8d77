"""The planner runs the same engine over nodes and replicas: what it counts is what the table of extents says."""

import pytest
import transformers

from hf_zero import ZeroConfig
from hf_zero.errors import ZeroError
from hf_zero.planning.command import _bandwidth
from hf_zero.planning.model import build
from hf_zero.planning.plan import Request, make_plan
from hf_zero.planning.report import write_yaml
from hf_zero.planning.trace import BatchShape, Scenario, trace


CONFIG = transformers.LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=2000,
    architectures=["LlamaForCausalLM"],
)
QUANTISED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


@pytest.mark.parametrize(
    "config, kept, states",
    [
        ({}, 0, 8 / 8),
        ({"zero_hpz_partition_size": 4}, 2 / 4, 8 / 8),
        ({"zero_hpz_partition_size": 4, **QUANTISED}, 2 / 4, 8 / 8),
        ({"mics_shard_size": 4}, 0, 8 / 4),
    ],
)
def test_planned_bytes_at_rest_are_those_of_the_formula(config, kept, states):
    model = build(CONFIG)
    numel = sum(param.numel() for param in model.parameters())
    zero = ZeroConfig(zero_stage=3, mixed_precision="bf16", **config)
    found = trace(model, Scenario(config=zero, world_size=8, batch=BatchShape(rows=1, length=32)))
    assert found.peak.get("parameters", 0) == pytest.approx(kept * numel, rel=0.01)
    assert found.peak["optimizer states"] == pytest.approx(states * numel, rel=0.01)
    if "mics_shard_size" in config:
        assert found.calls["all_reduce"] == found.calls["reduce_scatter"]
    if "zero_hpz_partition_size" in config:
        assert found.calls["reduce_scatter"] % 2 == 0, "each sum has a hop inside the node and one between nodes"


def _request(**changes):
    known = {
        "name": "a",
        "config": ZeroConfig(mixed_precision="bf16"),
        "gpus": 4,
        "nodes": 2,
        "link": 10**9,
        "gpu_memory": 10**9,
        "batch": BatchShape(rows=1, length=16),
        "accumulation": 8,
        "optimizer": "adamw",
        "backend": "nccl",
        "checkpointing": False,
    }
    return Request(**{**known, **changes})


@pytest.mark.slow
def test_each_way_over_nodes_sends_what_the_table_says_and_the_least_is_taken(tmp_path):
    request = _request()
    plan = make_plan(build(CONFIG), request)
    per_rank = plan.parameters / request.world_size
    found = {(row.stage, row.spread.name): row.footprint.between_nodes / per_rank for row in plan.rows}
    # Bytes between two nodes for each element that a rank owns, with w = 2 and g = 4.
    assert found[1, "all ranks"] == pytest.approx(2 + 4, rel=0.02)
    assert found[3, "weights each node, states all ranks"] == pytest.approx(2 + 4, rel=0.02)
    assert found[3, "the same in 8 bits"] == pytest.approx(2 * (1 + 2 / 256), rel=0.02)
    assert found[3, "each node, replicated"] == pytest.approx(2 * 4, rel=0.02)
    assert 8 * (2 + 4) < found[3, "all ranks"] <= 8 * (2 * 2 + 4)  # the last layer is gathered once
    assert plan.recommended.stage == 1

    # Where whole weights do not fit, the nodes keep one copy each.
    low = max(row.footprint.peak_bytes for row in plan.rows if row.stage == 3)
    high = min(row.footprint.peak_bytes for row in plan.rows if row.stage < 3)
    tight = make_plan(build(CONFIG), _request(gpu_memory=int(max(low, 0.99 * high) / 0.9)))
    if low < high:
        assert tight.recommended.spread.settings == {"zero_hpz_partition_size": 4, "no_sync": "node"}
        write_yaml(tight, tmp_path / "planned.yaml")
        written = ZeroConfig.from_any(tmp_path / "planned.yaml")
        assert (written.zero_stage, written.zero_hpz_partition_size, written.no_sync) == (3, 4, "node")


def test_without_a_link_nothing_is_planned_for_nodes():
    plan = make_plan(build(CONFIG), _request(link=None))
    assert {row.spread.name for row in plan.rows} == {"all ranks"} and len(plan.rows) == 4


def test_a_link_is_written_in_bytes_or_bits_per_second():
    assert _bandwidth("50GB/s") == _bandwidth("400Gb/s") == 50 * 10**9
    for wrong in ("50", "50GB", "fast", "50GB/h"):
        with pytest.raises(ZeroError, match="50GB/s or 400Gb/s"):
            _bandwidth(wrong)
