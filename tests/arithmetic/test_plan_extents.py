"""The planner runs the same engine over nodes and replicas: what it counts is what the table of extents says."""

import pytest
import transformers

from hf_zero import ZeroConfig
from hf_zero.planning.model import build
from hf_zero.planning.trace import BatchShape, Scenario, trace


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
    model = build(
        transformers.LlamaConfig(
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=2000,
            architectures=["LlamaForCausalLM"],
        )
    )
    numel = sum(param.numel() for param in model.parameters())
    zero = ZeroConfig(zero_stage=3, mixed_precision="bf16", **config)
    found = trace(model, Scenario(config=zero, world_size=8, batch=BatchShape(rows=1, length=32)))
    assert found.peak.get("parameters", 0) == pytest.approx(kept * numel, rel=0.01)
    assert found.peak["optimizer states"] == pytest.approx(states * numel, rel=0.01)
    if "mics_shard_size" in config:
        assert found.calls["all_reduce"] == found.calls["reduce_scatter"]
    if "zero_hpz_partition_size" in config:
        assert found.calls["reduce_scatter"] % 2 == 0, "each sum has a hop inside the node and one between nodes"
