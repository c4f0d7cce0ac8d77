"""The key tables: every key that DeepSpeed and Accelerate users write, and what it does here.

Four treatments: *honoured* (sets a ``ZeroConfig`` field), *checked* (must agree with the training arguments, which set
the value), *accepted* (no effect here, one note says why) and *refused* (would change the numbers or the memory in a
way that is not carried out; the reason is the message). A key that is in no table is an error with the nearest name.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_zero.config import values


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a configuration file and its meaning here."""

    path: str
    field: str | None = None
    parse: Callable[[Any], Any] = values.to_text
    doc: str = ""
    note: str | None = None
    refusal: str | None = None
    neutral: tuple[Any, ...] = ()  # values that ask for nothing: neither noted nor refused
    shared: bool = False  # the training arguments own the value

    @property
    def treatment(self) -> str:
        if self.field is not None:
            return "checked" if self.shared else "honoured"
        return "refused" if self.refusal is not None else "accepted"


def honoured(path: str, field: str, parse: Callable[[Any], Any], doc: str) -> Key:
    return Key(path=path, field=field, parse=parse, doc=doc)


def checked(field: str, doc: str) -> Key:
    """A number that the training arguments set, under the field's own name."""
    return Key(path=field, field=field, parse=values.to_int, doc=doc, shared=True)


def accepted(path: str, note: str, *neutral: Any) -> Key:
    return Key(path=path, note=note, neutral=(None, *neutral))


def refused(path: str, refusal: str, *neutral: Any) -> Key:
    return Key(path=path, refusal=refusal, neutral=(None, False, "auto", *neutral))


def table(*keys: Key) -> dict[str, Key]:
    table = {key.path: key for key in keys}
    assert len(table) == len(keys), "a key stands in its table twice"
    return table


# Pseudo-fields: read first, then combined into real fields by the reader.
FP16_ENABLED = "_fp16_enabled"
BF16_ENABLED = "_bf16_enabled"
CPU_OFFLOAD = "_cpu_offload"

_NO_ENGINE_KNOB = "an internal switch of DeepSpeed's engine; nothing here needs it"
_OFFLOAD_TUNING = "tuning of offload, which is not available yet"
_MONITOR = "use report_to of the training arguments"

_OWNED = "must agree with the training arguments, which set it"
CHECKED = (
    checked("train_micro_batch_size_per_gpu", _OWNED),
    checked("gradient_accumulation_steps", _OWNED),
    checked("train_batch_size", "must be micro-batch x accumulation x ranks"),
)

# Keys of DeepSpeed's zero_optimization section. Accelerate users write the same names inside deepspeed_config
# (stock Accelerate drops them there; they are honoured here), so the table is used for both.
ZERO_KEYS: dict[str, Key] = table(
    honoured("overlap_comm", "overlap_comm", values.to_bool, "communication runs beside the computation"),
    honoured("reduce_bucket_size", "reduce_bucket_size", values.to_size, "gradient bucket of stages 0-2"),
    honoured("allreduce_bucket_size", "reduce_bucket_size", values.to_size, "old name of reduce_bucket_size"),
    honoured("allgather_bucket_size", "allgather_bucket_size", values.to_size, "all-gather bucket of stages 1-2"),
    accepted("sub_group_size", "the optimizer steps flat tensors of one layer each; there are no tiles"),
    honoured("stage3_prefetch_bucket_size", "stage3_prefetch_bucket_size", values.to_size, "gathered ahead"),
    honoured("prefetch_bucket_size", "stage3_prefetch_bucket_size", values.to_size, "name without prefix"),
    honoured(
        "stage3_param_persistence_threshold",
        "stage3_param_persistence_threshold",
        values.to_size,
        "parameters with fewer elements stay whole",
    ),
    honoured(
        "param_persistence_threshold", "stage3_param_persistence_threshold", values.to_size, "name without prefix"
    ),
    honoured(
        "stage3_model_persistence_threshold",
        "stage3_model_persistence_threshold",
        values.to_int,
        "cap on all elements that stay whole",
    ),
    honoured(
        "model_persistence_threshold", "stage3_model_persistence_threshold", values.to_int, "name without prefix"
    ),
    honoured("stage3_max_live_parameters", "stage3_max_live_parameters", values.to_int, "cap on unsharded elements"),
    honoured("max_live_parameters", "stage3_max_live_parameters", values.to_int, "name without prefix"),
    honoured(
        "stage3_max_reuse_distance", "stage3_max_reuse_distance", values.to_int, "kept whole if used again this soon"
    ),
    honoured("max_reuse_distance", "stage3_max_reuse_distance", values.to_int, "name without prefix"),
    honoured(
        "stage3_gather_16bit_weights_on_model_save",
        "zero3_save_16bit_model",
        values.to_bool,
        "weights are saved in 16 bit (saving always works)",
    ),
    honoured("gather_16bit_weights_on_model_save", "zero3_save_16bit_model", values.to_bool, "name without prefix"),
    honoured("stage3_gather_fp16_weights_on_model_save", "zero3_save_16bit_model", values.to_bool, "old name"),
    honoured("cpu_offload", CPU_OFFLOAD, values.to_bool, "old name of offload_optimizer device cpu"),
    accepted("contiguous_gradients", "the transport decides whether gradients are packed", True),
    accepted("reduce_scatter", "stages 2 and 3 always reduce-scatter", True),
    accepted("allgather_partitions", "partitions are always all-gathered", True),
    accepted("round_robin_gradients", "gradient slices are balanced over the ranks already", False),
    accepted("leaf_module", "MoE blocks are found from the model's structure"),
    accepted("ignore_unused_parameters", "unused parameters reduce zeros, so the ranks never diverge", True),
    *(
        accepted(name, _NO_ENGINE_KNOB)
        for name in (
            "memory_efficient_linear",
            "override_module_apply",
            "load_from_fp32_weights",
            "legacy_stage1",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "stage3_use_all_reduce_for_fetch_params",
            "allgather_sequential",
            "stage3_allgather_sequential",
            "use_multi_rank_bucket_allreduce",
            "log_trace_cache_warnings",
            "enable_sanity_checks",
            "save_muon_momentum_buffer_in_memory",
            "use_pin_memory",
            "cpu_offload_params",
            "cpu_offload_use_pin_memory",
        )
    ),
    accepted("elastic_checkpoint", "checkpoints load at any number of ranks"),
    accepted("pipeline_loading_checkpoint", "each rank reads only its own slices"),
    refused("zero_hpz_partition_size", "hierarchical partitioning (ZeRO++ hpZ) is not available yet: set it to 1", 1),
    refused("zero_quantized_weights", "quantised communication (ZeRO++ qwZ) is not available yet: set it to false"),
    refused("zero_quantized_gradients", "quantised communication (ZeRO++ qgZ) is not available yet: set it to false"),
    refused("zero_quantized_nontrainable_weights", "quantised frozen weights are not available: set it to false"),
    refused("zeropp_loco_param", "quantised communication (LoCo) is not available: remove the section"),
    refused("mics_shard_size", "sharding inside subgroups (MiCS) is not available: set it to -1", -1, 0),
    accepted("mics_hierarchical_params_gather", "only has a meaning with MiCS", False),
    refused("zenflow", "ZenFlow updates weights late and changes the numbers: remove the section"),
)

_DEEPSPEED_OWN: tuple[Key, ...] = (
    honoured("zero_optimization.stage", "zero_stage", values.to_int, "what is sharded"),
    honoured(
        "zero_optimization.offload_optimizer.device",
        "offload_optimizer_device",
        values.to_lower,
        "home of the optimizer states",
    ),
    honoured(
        "zero_optimization.offload_optimizer.nvme_path", "offload_optimizer_nvme_path", values.to_path, "their folder"
    ),
    honoured("zero_optimization.offload_param.device", "offload_param_device", values.to_lower, "home of the weights"),
    honoured("zero_optimization.offload_param.nvme_path", "offload_param_nvme_path", values.to_path, "their folder"),
    *(
        accepted(f"zero_optimization.offload_optimizer.{name}", _OFFLOAD_TUNING)
        for name in (
            "buffer_count",
            "buffer_size",
            "pin_memory",
            "pipeline",
            "pipeline_read",
            "pipeline_write",
            "fast_init",
            "ratio",
            "super_offload",
            "cpuadam_cores_perc",
            "max_in_cpu",
        )
    ),
    *(
        accepted(f"zero_optimization.offload_param.{name}", _OFFLOAD_TUNING)
        for name in ("buffer_count", "buffer_size", "max_in_cpu", "pin_memory")
    ),
    accepted("aio", "tuning of NVMe offload, which is not available yet"),
    *CHECKED,
    honoured("gradient_clipping", "gradient_clipping", values.to_float, "global norm limit; only if asked"),
    honoured("fp16.enabled", FP16_ENABLED, values.to_bool, "fp16 compute, fp32 master weights"),
    honoured("fp16.loss_scale", "loss_scale", values.to_float, "0: dynamic"),
    honoured("fp16.initial_scale_power", "initial_scale_power", values.to_int, "first scale is 2 to this power"),
    honoured("fp16.loss_scale_window", "loss_scale_window", values.to_int, "good steps before the scale doubles"),
    honoured("fp16.hysteresis", "hysteresis", values.to_int, "overflows before the scale halves"),
    honoured("fp16.consecutive_hysteresis", "consecutive_hysteresis", values.to_bool, "refilled on a good step"),
    honoured("fp16.min_loss_scale", "min_loss_scale", values.to_float, "floor of the scale"),
    accepted("fp16.auto_cast", "float inputs are cast to the compute dtype", False),
    accepted("fp16.fp16_master_weights_and_grads", "master weights stay fp32", False),
    honoured("bf16.enabled", BF16_ENABLED, values.to_bool, "bf16 compute, fp32 master weights"),
    honoured("bf16.check_grad_overflow", "check_grad_overflow", values.to_bool, "inf or nan skips the step"),
    *(
        accepted(f"bf16.{name}", "accumulator, master weights and states stay fp32", False)
        for name in ("immediate_grad_update", "bf16_master_weights_and_grads", "bf16_optimizer_states")
    ),
    accepted("bf16.loss_scale", "bf16 needs no loss scale", 0, 0.0),
    accepted("bf16.auto_cast", "float inputs are cast to the compute dtype", False),
    honoured("bfloat16.enabled", BF16_ENABLED, values.to_bool, "old name of bf16.enabled"),
    honoured("communication_data_type", "communication_data_type", values.to_dtype, "dtype of gradients on the wire"),
    honoured("data_types.grad_accum_dtype", "grad_accum_dtype", values.to_dtype, "dtype gradients are summed in"),
    refused(
        "seq_parallel_communication_data_type",
        "the file is for sequence parallelism (ALST/Ulysses), where several ranks share a sequence; that is not "
        "supported: remove the key to train each sequence on one rank",
        "fp32",
    ),
    accepted("prescale_gradients", "gradients are averaged in fp32, where the order does not matter", False),
    accepted("gradient_predivide_factor", "gradients are averaged in fp32, where the order does not matter", 1, 1.0),
    accepted("sparse_gradients", "gradients are dense", False),
    refused("gradient_allreduce_op", "gradients are averaged over the ranks: set it to mean", "mean"),
    accepted("managed_gradient_accumulation", "Accelerate owns the accumulation boundary"),
    accepted("zero_allow_untested_optimizer", "any elementwise torch optimizer is allowed", True),
    accepted("zero_force_ds_cpu_optimizer", "the optimizer is your torch optimizer", False),
    honoured("optimizer", "optimizer", values.to_mapping, "built as the torch equivalent"),
    honoured("scheduler", "scheduler", values.to_mapping, "built as the torch equivalent"),
    honoured("steps_per_print", "steps_per_print", values.to_interval, "steps between reports"),
    honoured("wall_clock_breakdown", "wall_clock_breakdown", values.to_bool, "timings in the step report"),
    accepted("dump_state", "see hf-zero config", False),
    accepted("memory_breakdown", "see the step report", False),
    accepted("dataloader_drop_last", "set it on the DataLoader or in the training arguments", False),
    *(accepted(name, _MONITOR) for name in ("tensorboard", "wandb", "csv_monitor", "comet", "monitor_config")),
    *(
        accepted(name, "use a profiler of your choice")
        for name in ("comms_logger", "comms_config", "flops_profiler", "timers")
    ),
    *(accepted(name, _NO_ENGINE_KNOB, False) for name in ("disable_allgather", "graph_harvesting")),
    accepted("use_data_before_expert_parallelism", "there is no expert parallelism here", False),
    accepted("vocabulary_size", "only has a meaning for DeepSpeed's own checks"),
    accepted("log_level", "set the level of Python's logging"),
    accepted("activation_checkpointing", "use gradient_checkpointing of the training arguments"),
    accepted("checkpoint", "checkpoints are Hugging Face folders that load at any number of ranks"),
    *(accepted(name, "checkpoints are Hugging Face folders") for name in ("nebula", "datastates_ckpt")),
    accepted("data_types.param_dtype", "the compute dtype follows bf16.enabled and fp16.enabled"),
    accepted("data_types.buffer_dtype", "buffers keep the dtype of the model"),
    accepted("autotuning", "hf-zero config shows what each key does", False),
    refused("amp.enabled", "apex AMP is not supported: use bf16.enabled or fp16.enabled"),
    accepted("amp.opt_level", "only has a meaning with apex AMP"),
    refused("torch_autocast.enabled", "use bf16.enabled or fp16.enabled (16-bit compute, fp32 master weights)"),
    accepted("torch_autocast.dtype", "only has a meaning with torch_autocast.enabled"),
    accepted("torch_autocast.lower_precision_safe_modules", "only has a meaning with torch_autocast.enabled"),
    refused("compile.deepcompile", "whole-model compilation is not supported: set it to false"),
    accepted("compile", "compile single layers with torch.compile"),
    refused("tensor_parallel.autotp_size", "tensor parallelism is not supported: set it to 0", 0, 1),
    accepted("tensor_parallel", "there is no tensor parallelism here"),
    refused("expert_parallel.enabled", "expert parallelism is not supported: set it to false"),
    accepted("expert_parallel", "there is no expert parallelism here"),
    refused("fp8.enabled", "fp8 is not supported: use bf16.enabled"),
    accepted("fp8", "there is no fp8 here"),
    refused("sequence_parallel_size", "sequence parallelism is not supported: set it to 1", 1),
    *(
        refused(name, f"{what} changes training itself and is not supported: remove the section", {})
        for name, what in (
            ("sparse_attention", "sparse attention"),
            ("compression_training", "compression training"),
            ("progressive_layer_drop", "progressive layer drop"),
            ("curriculum_learning", "curriculum learning"),
            ("data_efficiency", "data sampling by DeepSpeed"),
            ("quantize_training", "quantised training"),
            ("weight_quantization", "quantised weights"),
            ("elasticity", "batch elasticity"),
            ("hybrid_engine", "the hybrid engine"),
            ("eigenvalue", "eigenvalue scheduling"),
            ("pipeline", "pipeline parallelism"),
        )
    ),
)

DEEPSPEED_KEYS: dict[str, Key] = table(
    *_DEEPSPEED_OWN,
    *(dataclasses.replace(key, path=f"zero_optimization.{key.path}") for key in ZERO_KEYS.values()),
)
