"""The key tables of Accelerate's YAML: the top level, ``deepspeed_config`` and ``fsdp_config``."""

from typing import Any

from hf_zero.config import values
from hf_zero.config.keys import (
    CPU_CHECKPOINTING,
    FP16_ENABLED,
    MOE_BLOCKS,
    ZERO_KEYS,
    Key,
    accepted,
    combined,
    keys_of,
    passed_on,
    refused,
    table,
)
from hf_zero.config.options import OPTIONS


# Pseudo-fields, combined by the reader.
DEEPSPEED_CONFIG_FILE = "_deepspeed_config_file"
FSDP_STRATEGY = "_fsdp_sharding_strategy"
FSDP_RESHARD = "_fsdp_reshard_after_forward"
FSDP_OFFLOAD = "_fsdp_offload_params"


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
    *(keys_of(name, option.accelerate) for name, option in OPTIONS.items()),
    combined("deepspeed_config_file", DEEPSPEED_CONFIG_FILE, values.to_text, "a DeepSpeed JSON, read as well"),
    accepted("deepspeed_multinode_launcher", "every machine runs its own launcher (torchrun)", "standard"),
    accepted("deepspeed_hostfile", "every machine runs its own launcher: use num_machines and machine_rank", "none"),
    accepted(
        "deepspeed_inclusion_filter deepspeed_exclusion_filter", "use num_machines, num_processes and gpu_ids", "none"
    ),
    accepted("deepspeed_moe_layer_cls_names transformer_moe_cls_names", MOE_BLOCKS, "none"),
    accepted("is_train_batch_min", "the batch size is never taken from a loader", True),
    refused("enable_msamp", "MS-AMP is not supported: use mixed_precision bf16"),
    accepted("msamp_opt_level", "only has a meaning with MS-AMP"),
    ZERO_KEYS.values(),
)

FSDP_KEYS: dict[str, Key] = table(
    combined("fsdp_sharding_strategy", FSDP_STRATEGY, to_strategy, "FULL_SHARD 3, SHARD_GRAD_OP 2, NO_SHARD 0"),
    combined("fsdp_reshard_after_forward", FSDP_RESHARD, to_reshard, "true: stage 3, false: stage 2"),
    combined("fsdp_offload_params", FSDP_OFFLOAD, values.to_bool, "weights and optimizer states in host memory"),
    combined("fsdp_cpu_offload", FSDP_OFFLOAD, values.to_bool, "name in FSDP2"),
    accepted("fsdp_version", "both versions mean the same stages here", 1, 2, "1", "2"),
    accepted(
        "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_transformer_cls_names_to_wrap "
        "fsdp_min_num_params",
        "units are found from the model: one per decoder layer",
    ),
    accepted(
        "fsdp_backward_prefetch fsdp_backward_prefetch_policy fsdp_forward_prefetch",
        "FSDP's own machinery; prefetch and order are planned from the first step here",
    ),
    accepted("fsdp_use_orig_params", "parameters always keep their names, shapes and identity", True),
    accepted("fsdp_sync_module_states", "rank 0's weights are always sent to all ranks", True),
    accepted("fsdp_cpu_ram_efficient_loading", "each rank loads only its own slices", True),
    accepted("fsdp_state_dict_type", "checkpoints are Hugging Face folders that load at any number of ranks"),
    refused(
        "fsdp_activation_checkpointing",
        "set gradient_checkpointing in the training arguments instead, so that it has one owner",
    ),
    combined(
        "fsdp_activation_checkpointing_offload",
        CPU_CHECKPOINTING,
        values.to_bool,
        "inputs of checkpointed layers in host memory (`offload_activations_device` cpu)",
    ),
    refused("fsdp_ignored_modules", "modules cannot be left out of sharding: remove the key", ""),
    accepted("fsdp_mixed_precision_policy", "use mixed_precision"),
)

PARALLELISM = "parallelism_config.parallelism_config_"

# Keys of the top level. Those with a field are configuration; the others belong to the launcher and pass through.
TOP_KEYS: dict[str, Key] = table(
    keys_of("mixed_precision", ("mixed_precision",)),
    combined("fp16", FP16_ENABLED, values.to_bool, "old form of mixed_precision fp16"),
    passed_on(
        "compute_environment distributed_type num_processes num_machines machine_rank main_process_ip "
        "main_process_port main_training_function rdzv_backend same_network use_cpu gpu_ids debug enable_cpu_affinity "
        "downcast_bf16 dynamo_backend dynamo_config mpirun_config tpu_name tpu_zone tpu_use_cluster tpu_use_sudo "
        "tpu_env tpu_vm command_file commands",
        "used by the launcher",
    ),
    refused("fp8_config", "fp8 is not supported: use mixed_precision bf16", {}),
    refused("megatron_lm_config", "Megatron-LM runs are not hf_zero runs: remove the section", {}),
    *(keys_of(name, (f"{PARALLELISM}{name}",)) for name in ("sp_size", "cp_size", "tp_size")),
    accepted(f"{PARALLELISM}sp_backend", "Ulysses is hf_zero's own and needs no DeepSpeed", "hf_zero"),
    refused(f"{PARALLELISM}cp_backend", "the only one is torch's ring attention: set it to torch", "torch"),
    refused(
        f"{PARALLELISM}cp_comm_strategy",
        "a file cannot say it: pass ParallelismConfig(cp_handler=TorchContextParallelConfig(...)) in Python",
        "allgather",
    ),
    accepted(
        f"{PARALLELISM}sp_seq_length {PARALLELISM}sp_seq_length_is_variable {PARALLELISM}sp_attn_implementation",
        "sequences may have any length, and the attention is the model's own",
    ),
    accepted(f"{PARALLELISM}dp_shard_size", "every rank keeps a share of the state (mics_shard_size: of a group)"),
    refused(
        f"{PARALLELISM}dp_replicate_size",
        "set mics_shard_size to the number of ranks that share one copy of the state, and this to 1",
        1,
    ),
)

# hf_zero's own fields: written flat in Python, in deepspeed_config, or in an "hf_zero" section of a JSON.
OWN_KEYS: dict[str, Key] = table(*(keys_of(name, (name,)) for name, option in OPTIONS.items() if option.own))

# Keyword arguments and flat dicts: every option under its own name, and all that deepspeed_config may hold.
FLAT_KEYS: dict[str, Key] = {
    **DEEPSPEED_SECTION_KEYS,
    **table(*(keys_of(name, (name,)) for name in OPTIONS)),
}

LAUNCH_NUMBERS = ("num_processes", "num_machines", "machine_rank", "main_process_port")
SECTIONS = ("deepspeed_config", "fsdp_config")

DISTRIBUTED_TYPES = ("DEEPSPEED", "FSDP", "MULTI_GPU", "MULTI_CPU", "NO")
OTHER_ACCELERATORS = ("MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON")
