"""Accelerate's plugin objects mean what the same keys of a YAML mean, and errors name the field."""

import json

import pytest
import torch
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, OffloadPolicy, ShardingStrategy

from hf_zero.config import ZeroConfig
from hf_zero.config.plugins import read_deepspeed_plugin, read_fsdp_plugin
from hf_zero.config.reader import read_accelerate_dict
from hf_zero.errors import ZeroConfigError


def of_yaml(section, settings, kind):
    data = {"distributed_type": kind, section: settings, "num_processes": 2}
    return ZeroConfig.from_layers(read_accelerate_dict(data, "zero.yaml"))


@pytest.mark.parametrize(
    "fields",
    [
        {"zero_stage": 3, "zero3_init_flag": False, "gradient_clipping": 0.5},
        {"zero_stage": 2, "offload_optimizer_device": "cpu", "gradient_accumulation_steps": 4},
        {"zero_stage": 3, "offload_param_device": "cpu", "transformer_moe_cls_names": "MixtralSparseMoeBlock"},
        {"zero_stage": 3, "zero3_save_16bit_model": False, "enable_msamp": False, "offload_param_device": "none"},
    ],
)
def test_fields_of_a_deepspeed_plugin_are_the_keys_of_the_yaml(fields):
    ours = ZeroConfig.from_layers(read_deepspeed_plugin(fields))
    assert ours == of_yaml("deepspeed_config", fields, "DEEPSPEED")
    assert ours.where("zero_stage") == "DeepSpeedPlugin"


class Held:
    """As HfDeepSpeedConfig holds it."""

    def __init__(self, config):
        self.config = config


@pytest.mark.parametrize("form", ["dict", "object", "file"])
def test_the_json_of_a_deepspeed_plugin_is_read_in_each_form(tmp_path, form):
    whole = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}, "gradient_clipping": 1.0}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(whole))
    named = {"dict": whole, "object": Held(whole), "file": str(file)}[form]
    fields = {"hf_ds_config": named, "zero3_init_flag": False}
    assert ZeroConfig.from_layers(read_deepspeed_plugin(fields)) == of_yaml(
        "deepspeed_config", {"deepspeed_config_file": str(file), "zero3_init_flag": False}, "DEEPSPEED"
    )


@pytest.mark.parametrize(
    "fields, settings",
    [
        ({}, {}),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}),
        ({"reshard_after_forward": "FULL_SHARD"}, {"fsdp_reshard_after_forward": "FULL_SHARD"}),
        (
            {"fsdp_version": 2, "reshard_after_forward": False},
            {"fsdp_version": 2, "fsdp_reshard_after_forward": False},
        ),
        ({"cpu_offload": CPUOffload(offload_params=True)}, {"fsdp_offload_params": True}),
        ({"fsdp_version": 2, "cpu_offload": CPUOffloadPolicy()}, {"fsdp_version": 2, "fsdp_offload_params": True}),
        ({"fsdp_version": 2, "cpu_offload": OffloadPolicy()}, {"fsdp_version": 2}),
        ({"cpu_ram_efficient_loading": True, "limit_all_gathers": False, "auto_wrap_policy": len}, {}),
    ],
)
def test_fields_of_an_fsdp_plugin_are_the_keys_of_the_yaml(fields, settings):
    assert ZeroConfig.from_layers(read_fsdp_plugin(fields)) == of_yaml("fsdp_config", settings, "FSDP")


HALF = torch.bfloat16


@pytest.mark.parametrize(
    "policy, compute, wire",
    [
        ("bf16", "bf16", "bf16"),
        ({"param_dtype": HALF, "reduce_dtype": torch.float32, "buffer_dtype": HALF}, "bf16", "fp32"),
        (MixedPrecision(param_dtype=HALF), "bf16", "bf16"),
        (MixedPrecision(reduce_dtype=HALF), "no", "bf16"),
    ],
)
def test_a_mixed_precision_policy_is_compute_and_communication_dtype(policy, compute, wire):
    found = ZeroConfig.from_layers(read_fsdp_plugin({"mixed_precision_policy": policy}))
    assert (found.mixed_precision, found.communication_data_type) == (compute, wire)


@pytest.mark.parametrize(
    "read, fields, said",
    [
        (read_deepspeed_plugin, {"zero_stage": 7}, "zero_stage is 7 (DeepSpeedPlugin)"),
        (read_deepspeed_plugin, {"enable_msamp": True}, "DeepSpeedPlugin: enable_msamp is True: MS-AMP is not"),
        (
            read_deepspeed_plugin,
            {"hf_ds_config": "none.json"},
            "DeepSpeedPlugin: hf_ds_config: none.json: there is no",
        ),
        (
            read_deepspeed_plugin,
            {"zero_stage": 3, "hf_ds_config": {"zero_optimization": {"stage": 2}}},
            "zero_stage differs: DeepSpeedPlugin says 3, DeepSpeedPlugin: hf_ds_config says 2",
        ),
        (
            read_deepspeed_plugin,
            {"hf_ds_config": {"zero_optimization": {"stage": 2}, "fp8": {"enabled": True}}},
            "DeepSpeedPlugin: hf_ds_config: fp8.enabled is True: fp8 is not supported",
        ),
        (
            read_fsdp_plugin,
            {"ignored_modules": "embed.*"},
            "FullyShardedDataParallelPlugin: ignored_modules is 'embed.*': modules cannot be left out",
        ),
        (read_fsdp_plugin, {"activation_checkpointing": True}, "activation_checkpointing is True: set gradient_"),
        (read_fsdp_plugin, {"mixed_precision_policy": "fp8"}, "mixed_precision_policy is 'fp8': expected fp32"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_by_the_name_of_the_field(read, fields, said):
    with pytest.raises(ZeroConfigError) as error:
        ZeroConfig.from_layers(read(fields))
    assert said in str(error.value)
