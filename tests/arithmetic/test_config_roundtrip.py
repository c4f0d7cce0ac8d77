"""Any configuration survives the ways it travels: JSON and YAML files, the launcher's variable, a copy."""

import dataclasses
import json

import yaml
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.config import ZeroConfig
from hf_zero.config.options import OPTIONS


counts = st.integers(1, 10**10)
sizes = st.one_of(
    counts, st.just("auto"), st.builds("{}{}".format, st.integers(1, 999), st.sampled_from(["KB", "MB", "GiB"]))
)
owned = st.one_of(st.integers(1, 512), st.just("auto"))
fractions = st.floats(1e-3, 1e6, allow_nan=False)

FIELDS = {
    "zero_stage": st.integers(0, 3),
    "param_access": st.sampled_from(["gather", "raise"]),
    "zero3_init_flag": st.booleans(),
    "zero3_save_16bit_model": st.booleans(),
    "mixed_precision": st.sampled_from(["no", "bf16", "fp16"]),
    "communication_data_type": st.sampled_from(["fp32", "bf16", "fp16"]),
    "gradient_accumulation_steps": owned,
    "gradient_clipping": st.one_of(fractions, st.just("auto"), st.just(0.0)),
    "train_micro_batch_size_per_gpu": owned,
    "overlap_comm": st.booleans(),
    "deterministic_reduce": st.booleans(),
    "peer_memory": st.booleans(),
    "async_save": st.booleans(),
    "report": st.booleans(),
    "report_machine": st.sampled_from(["h100", "here.yaml"]),
    "no_sync": st.sampled_from(["reduce", "node", "local"]),
    "reduce_bucket_size": sizes,
    "allgather_bucket_size": sizes,
    "hang_timeout_s": fractions,
    "zero_hpz_partition_size": st.integers(1, 64),
    "mics_shard_size": st.one_of(st.integers(0, 64), st.just("auto")),
    "zero_quantized_weights": st.booleans(),
    "zero_quantized_gradients": st.booleans(),
    "quantized_gradient_bits": st.sampled_from([8, 4]),
    "zeropp_loco_param": st.fixed_dictionaries(
        {}, optional={"err_beta": st.floats(0, 0.99), "reset_T": st.integers(1, 4096)}
    ),
    "zero_quantized_nontrainable_weights": st.booleans(),
    "quantized_error_limit": st.one_of(fractions, st.just("auto")),
    "rank_weights": st.lists(st.floats(0.01, 100), min_size=1, max_size=8),
    "sp_size": st.integers(1, 64),
    "node_size": st.one_of(st.integers(1, 64), st.just("auto")),
    "stage3_prefetch_bucket_size": sizes,
    "stage3_param_persistence_threshold": sizes,
    "stage3_model_persistence_threshold": counts,
    "stage3_max_live_parameters": counts,
    "stage3_max_reuse_distance": counts,
    "offload_optimizer_ratio": st.floats(0, 1),
    "offload_optimizer_max_in_cpu": counts,
    "offload_buffer_count": st.integers(2, 64),
    "offload_step": st.sampled_from(["auto", "host", "device"]),
    "sub_group_size": counts,
    "unit_size": counts,
    "tile_loss": counts,
    "tile_mlp": counts,
    "loss_scale": fractions,
    "initial_scale_power": st.integers(0, 30),
    "loss_scale_window": st.integers(1, 10**4),
    "hysteresis": st.integers(1, 8),
    "min_loss_scale": fractions,
    "consecutive_hysteresis": st.booleans(),
    "check_grad_overflow": st.booleans(),
    "max_consecutive_skips": st.integers(1, 100),
    "steps_per_print": counts,
    "wall_clock_breakdown": st.booleans(),
}
# Fields with one legal value today, or whose values depend on one another.
FIXED = {
    "cp_size",
    "tp_size",
    "grad_accum_dtype",
    "offload_optimizer_device",
    "offload_optimizer_nvme_path",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_activations_device",
    "offload_activations_nvme_path",
    "optimizer",
    "scheduler",
    "train_batch_size",
}
settings = st.fixed_dictionaries({}, optional=FIELDS)


def test_the_strategy_covers_every_field():
    assert set(FIELDS) | FIXED == set(OPTIONS)
    assert not set(FIELDS) & FIXED


@given(settings)
def test_the_launchers_variable(values):
    for config in (ZeroConfig(**values), ZeroConfig.from_any(values)):
        copy = ZeroConfig.from_json(config.to_json())
        assert copy == config
        assert copy.origins == config.origins
        assert copy.to_json() == config.to_json()


@given(settings)
def test_reading_equals_building(values):
    assert ZeroConfig.from_any(values) == ZeroConfig(**values)


@given(settings)
def test_yaml_and_json_say_the_same(values):
    from_yaml = ZeroConfig.from_any(yaml.safe_load(yaml.safe_dump(values)))
    from_json = ZeroConfig.from_any(json.loads(json.dumps(values)))
    assert from_yaml == from_json == ZeroConfig(**values)


@given(settings)
def test_numbers_written_as_text_are_the_same_numbers(values):
    written = {
        name: str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
        for name, value in values.items()
    }
    assert ZeroConfig.from_any(written) == ZeroConfig(**values)


@given(settings)
def test_a_copy_through_its_own_values(values):
    config = ZeroConfig(**values)
    assert ZeroConfig(**config.to_dict()) == config
    assert dataclasses.replace(config) == config
