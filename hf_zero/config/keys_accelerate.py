"""The key tables of Accelerate's YAML: the top level, ``deepspeed_config`` and ``fsdp_config``."""

import dataclasses
from typing import Any

from hf_zero.config import values
from hf_zero.config.keys import (
    CHECKED,
    DEEPSPEED_KEYS,
    FP16_ENABLED,
    ZERO_KEYS,
    Key,
    accepted,
    honoured,
    refused,
    table,
)


# Pseudo-fields, combined by the reader.
DEEPSPEED_CONFIG_FILE = "_deepspeed_config_file"
FSDP_STRATEGY = "_fsdp_sharding_strategy"
FSDP_RESHARD = "_fsdp_reshard_after_forward"
FSDP_OFFLOAD = "_fsdp_offload_params"

_MULTINODE = ("standard",)

FP16_FIELDS = (
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)


def to_strategy(value: Any) -> str:
    """FSDP's strategy by name or by the number that older files hold."""
    names = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
    text = str(value).strip().upper()
    if text.isdigit() and 1 <= int(text) <= len(names):
        return names[int(text) - 1]
    if text not in names:
        raise ValueError("expected " + ", ".join(names))
    return text


def to_reshard(value: Any) -> bool | str:
    """``reshard_after_forward``: a switch in FSDP2, a strategy name in files converted from FSDP1."""
    try:
        return values.to_bool(value)
    except ValueError:
        return to_strategy(value)


DEEPSPEED_SECTION_KEYS: dict[str, Key] = table(
    honoured("zero_stage", "zero_stage", values.to_int, "what is sharded"),
    honoured("zero3_init_flag", "zero3_init_flag", values.to_bool, "build the model already sharded"),
    honoured("zero3_save_16bit_model", "zero3_save_16bit_model", values.to_bool, "weights are saved in 16 bit"),
    honoured("offload_optimizer_device", "offload_optimizer_device", values.to_lower, "home of optimizer states"),
    honoured("offload_optimizer_nvme_path", "offload_optimizer_nvme_path", values.to_path, "their folder"),
    honoured("offload_param_device", "offload_param_device", values.to_lower, "home of the weights"),
    honoured("offload_param_nvme_path", "offload_param_nvme_path", values.to_path, "their folder"),
    honoured("gradient_clipping", "gradient_clipping", values.to_float, "global norm limit; only if asked"),
    *CHECKED,
    honoured("communication_data_type", "communication_data_type", values.to_dtype, "dtype of gradients on the wire"),
    honoured("steps_per_print", "steps_per_print", values.to_interval, "steps between reports"),
    honoured("wall_clock_breakdown", "wall_clock_breakdown", values.to_bool, "timings in the step report"),
    honoured("deepspeed_config_file", DEEPSPEED_CONFIG_FILE, values.to_text, "a DeepSpeed JSON, read as well"),
    accepted("deepspeed_multinode_launcher", "every machine runs its own launcher (torchrun)", *_MULTINODE),
    accepted("deepspeed_hostfile", "every machine runs its own launcher: use num_machines and machine_rank", "none"),
    accepted("deepspeed_inclusion_filter", "use num_machines, num_processes and gpu_ids", "none"),
    accepted("deepspeed_exclusion_filter", "use num_machines, num_processes and gpu_ids", "none"),
    accepted("deepspeed_moe_layer_cls_names", "MoE blocks are found from the model's structure", "none"),
    accepted("transformer_moe_cls_names", "MoE blocks are found from the model's structure", "none"),
    accepted("is_train_batch_min", "the batch size is never taken from a loader", True),
    refused("enable_msamp", "MS-AMP is not supported: use mixed_precision bf16"),
    accepted("msamp_opt_level", "only has a meaning with MS-AMP"),
    *ZERO_KEYS.values(),
)

_FSDP_GONE = "FSDP's own machinery; prefetch and order are planned from the first step here"
_FSDP_UNITS = "units are found from the model: one per decoder layer"

FSDP_KEYS: dict[str, Key] = table(
    honoured("fsdp_sharding_strategy", FSDP_STRATEGY, to_strategy, "FULL_SHARD 3, SHARD_GRAD_OP 2, NO_SHARD 0"),
    honoured("fsdp_reshard_after_forward", FSDP_RESHARD, to_reshard, "true: stage 3, false: stage 2"),
    honoured("fsdp_offload_params", FSDP_OFFLOAD, values.to_bool, "weights and optimizer states in host memory"),
    honoured("fsdp_cpu_offload", FSDP_OFFLOAD, values.to_bool, "name in FSDP2"),
    accepted("fsdp_version", "both versions mean the same stages here", 1, 2, "1", "2"),
    accepted("fsdp_auto_wrap_policy", _FSDP_UNITS),
    accepted("fsdp_transformer_layer_cls_to_wrap", _FSDP_UNITS),
    accepted("fsdp_transformer_cls_names_to_wrap", _FSDP_UNITS),
    accepted("fsdp_min_num_params", _FSDP_UNITS),
    accepted("fsdp_backward_prefetch", _FSDP_GONE),
    accepted("fsdp_backward_prefetch_policy", _FSDP_GONE),
    accepted("fsdp_forward_prefetch", _FSDP_GONE),
    accepted("fsdp_use_orig_params", "parameters always keep their names, shapes and identity", True),
    accepted("fsdp_sync_module_states", "rank 0's weights are always sent to all ranks", True),
    accepted("fsdp_cpu_ram_efficient_loading", "each rank loads only its own slices", True),
    accepted("fsdp_state_dict_type", "checkpoints are Hugging Face folders that load at any number of ranks"),
    refused(
        "fsdp_activation_checkpointing",
        "set gradient_checkpointing in the training arguments instead, so that it has one owner",
    ),
    refused("fsdp_activation_checkpointing_offload", "activation offload is not supported: set it to false"),
    refused("fsdp_ignored_modules", "modules cannot be left out of sharding: remove the key", ""),
    accepted("fsdp_mixed_precision_policy", "use mixed_precision"),
)

_LAUNCH = "used by the launcher"

# Keys of the top level. Those with a field are configuration; the others belong to the launcher and pass through.
TOP_KEYS: dict[str, Key] = table(
    honoured("mixed_precision", "mixed_precision", values.to_precision, "compute dtype; master weights are fp32"),
    honoured("fp16", FP16_ENABLED, values.to_bool, "old form of mixed_precision fp16"),
    *(
        Key(path=name, note=_LAUNCH)
        for name in (
            "compute_environment",
            "distributed_type",
            "num_processes",
            "num_machines",
            "machine_rank",
            "main_process_ip",
            "main_process_port",
            "main_training_function",
            "rdzv_backend",
            "same_network",
            "use_cpu",
            "gpu_ids",
            "debug",
            "enable_cpu_affinity",
            "downcast_bf16",
            "dynamo_backend",
            "dynamo_config",
            "mpirun_config",
            "tpu_name",
            "tpu_zone",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "tpu_env",
            "tpu_vm",
            "command_file",
            "commands",
        )
    ),
    refused("fp8_config", "fp8 is not supported: use mixed_precision bf16", {}),
    refused("megatron_lm_config", "Megatron-LM runs are not hf_zero runs: remove the section", {}),
    refused("parallelism_config", "tensor, context and sequence parallelism are not supported: remove it", {}),
)

# hf_zero's own fields: written flat in Python, in deepspeed_config, or in an "hf_zero" section of a JSON.
OWN_KEYS: dict[str, Key] = table(
    honoured("param_access", "param_access", values.to_text, "reading a sharded weight: gather it or raise"),
    honoured("no_sync", "no_sync", values.to_text, "stages 2-3 under no_sync: reduce, or keep local gradients"),
    honoured("deterministic_reduce", "deterministic_reduce", values.to_bool, "gradients summed in rank order"),
    honoured("peer_memory", "peer_memory", values.to_bool, "CPU ranks of one machine read each other's memory"),
    honoured("async_save", "async_save", values.to_bool, "checkpoints are written while training goes on"),
    honoured("max_consecutive_skips", "max_consecutive_skips", values.to_int, "skipped steps before an error"),
    honoured("hang_timeout_s", "hang_timeout_s", values.to_float, "seconds before a waiting rank is named"),
)

# Keyword arguments and flat dicts: every ZeroConfig field under its own name.
FLAT_KEYS: dict[str, Key] = table(
    *(key for key in DEEPSPEED_SECTION_KEYS.values()),
    *OWN_KEYS.values(),
    TOP_KEYS["mixed_precision"],
    *(dataclasses.replace(DEEPSPEED_KEYS[f"fp16.{name}"], path=name) for name in FP16_FIELDS),
    honoured("check_grad_overflow", "check_grad_overflow", values.to_bool, "inf or nan skips the step"),
    honoured("grad_accum_dtype", "grad_accum_dtype", values.to_dtype, "dtype gradients are summed in"),
    DEEPSPEED_KEYS["optimizer"],
    DEEPSPEED_KEYS["scheduler"],
)

LAUNCH_NUMBERS = ("num_processes", "num_machines", "machine_rank", "main_process_port")
SECTIONS = ("deepspeed_config", "fsdp_config")

DISTRIBUTED_TYPES = ("DEEPSPEED", "FSDP", "MULTI_GPU", "MULTI_CPU", "NO")
OTHER_ACCELERATORS = ("MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON")
