"""The key tables: every key that DeepSpeed and Accelerate users write, and what it does here.

Four treatments: *honoured* (sets a ``ZeroConfig`` field), *checked* (sets one, and must agree with the training
arguments where they set it, too), *accepted* (no effect here, one note says why) and *refused* (would change the
numbers or the memory in a way that is not carried out; the reason is the message). A key that is in no table is an
error with the nearest name. Keys of the first two treatments come from the declarations in options.py.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hf_zero.config import values
from hf_zero.config.options import OPTIONS


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


def keys_of(field: str, paths: tuple[str, ...]) -> list[Key]:
    """The keys that set one field; all but the first are other names of it."""
    option = OPTIONS[field]
    return [
        Key(
            path=path,
            field=field,
            parse=option.kind.parse,
            doc=option.help if path == paths[0] else f"another name of `{paths[0].rpartition('.')[2]}`",
            shared=option.shared,
        )
        for path in paths
    ]


def combined(path: str, field: str, parse: Callable[[Any], Any], doc: str) -> list[Key]:
    """A key that the reader turns into a field together with others."""
    return [Key(path=path, field=field, parse=parse, doc=doc)]


def accepted(paths: str, note: str, *neutral: Any) -> list[Key]:
    """Keys, with blanks between, that have no effect."""
    return [Key(path=path, note=note, neutral=(None, *neutral)) for path in paths.split()]


def passed_on(paths: str, doc: str) -> list[Key]:
    """Keys, with blanks between, that others read."""
    return [Key(path=path, doc=doc) for path in paths.split()]


def refused(path: str, refusal: str, *neutral: Any) -> list[Key]:
    return [Key(path=path, refusal=refusal, neutral=(None, False, "auto", *neutral))]


def table(*groups: Iterable[Key]) -> dict[str, Key]:
    keys = [key for group in groups for key in group]
    table = {key.path: key for key in keys}
    assert len(table) == len(keys), "a key stands in its table twice"
    return table


# Pseudo-fields: read first, then combined into real fields by the reader.
FP16_ENABLED = "_fp16_enabled"
BF16_ENABLED = "_bf16_enabled"
CPU_OFFLOAD = "_cpu_offload"
CPU_OFFLOAD_PARAMS = "_cpu_offload_params"
CPU_CHECKPOINTING = "_cpu_checkpointing"

_NO_ENGINE_KNOB = "an internal switch of DeepSpeed's engine; nothing here needs it"
MOE_BLOCKS = "MoE blocks are found from the model's structure"

# Keys of DeepSpeed's zero_optimization section that set nothing. Accelerate users write the same names inside
# deepspeed_config (stock Accelerate drops them there), so the table is used for both.
ZERO_KEYS: dict[str, Key] = table(
    combined("cpu_offload", CPU_OFFLOAD, values.to_bool, "old name of offload_optimizer device cpu"),
    combined("cpu_offload_params", CPU_OFFLOAD_PARAMS, values.to_bool, "old name of offload_param device cpu"),
    accepted("contiguous_gradients", "the transport decides whether gradients are packed", True),
    accepted("reduce_scatter", "stages 2 and 3 always reduce-scatter", True),
    accepted("allgather_partitions", "partitions are always all-gathered", True),
    accepted("round_robin_gradients", "gradient slices are balanced over the ranks already", False),
    accepted("leaf_module", MOE_BLOCKS),
    accepted("ignore_unused_parameters", "unused parameters reduce zeros, so the ranks never diverge", True),
    accepted(
        "memory_efficient_linear override_module_apply load_from_fp32_weights legacy_stage1 "
        "module_granularity_threshold use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params "
        "allgather_sequential stage3_allgather_sequential use_multi_rank_bucket_allreduce log_trace_cache_warnings "
        "enable_sanity_checks save_muon_momentum_buffer_in_memory",
        _NO_ENGINE_KNOB,
    ),
    accepted("use_pin_memory cpu_offload_use_pin_memory", "host memory is pinned where copies to a GPU gain by it"),
    accepted("elastic_checkpoint", "checkpoints load at any number of ranks"),
    accepted("pipeline_loading_checkpoint", "each rank reads only its own slices"),
    accepted("mics_hierarchical_params_gather", "a shard group is gathered in one collective", False),
    refused("zenflow", "ZenFlow updates weights late and changes the numbers: remove the section"),
)

_DEEPSPEED_REST: dict[str, Key] = table(
    accepted(
        "zero_optimization.offload_optimizer.buffer_size zero_optimization.offload_param.buffer_size "
        "zero_optimization.offload_param.buffer_count",
        "buffers are made to fit what they hold",
    ),
    accepted(
        "zero_optimization.offload_optimizer.pipeline zero_optimization.offload_optimizer.pipeline_read "
        "zero_optimization.offload_optimizer.pipeline_write",
        "reads are always begun ahead, and writes finished behind",
        True,
    ),
    accepted("zero_optimization.offload_param.max_in_cpu", "weights on disk are read ahead, and none kept", 0),
    accepted("zero_optimization.offload_optimizer.fast_init", "states are written when they exist"),
    accepted(
        "zero_optimization.offload_optimizer.super_offload zero_optimization.offload_optimizer.cpuadam_cores_perc",
        "the step runs beside the passes in any case, exactly, with clipping",
        False,
    ),
    accepted(
        "zero_optimization.offload_optimizer.pin_memory zero_optimization.offload_param.pin_memory",
        "host memory is pinned where copies to a GPU gain by it",
        True,
    ),
    accepted("aio", "requests of 8 MiB pass the page cache, several at a time: nothing is to be tuned"),
    combined("fp16.enabled", FP16_ENABLED, values.to_bool, "fp16 compute, fp32 master weights"),
    accepted("fp16.fp16_master_weights_and_grads", "master weights stay fp32", False),
    combined("bf16.enabled", BF16_ENABLED, values.to_bool, "bf16 compute, fp32 master weights"),
    accepted(
        "bf16.immediate_grad_update bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states",
        "accumulator, master weights and states stay fp32",
        False,
    ),
    accepted("bf16.loss_scale", "bf16 needs no loss scale", 0, 0.0),
    accepted("fp16.auto_cast bf16.auto_cast", "float inputs are cast to the compute dtype", False),
    combined("bfloat16.enabled", BF16_ENABLED, values.to_bool, "old name of bf16.enabled"),
    accepted(
        "seq_parallel_communication_data_type",
        "heads are exchanged in the dtype of computation, and gradients are summed in communication_data_type",
        "fp32",
    ),
    accepted("prescale_gradients", "gradients are averaged in fp32, where the order does not matter", False),
    accepted("gradient_predivide_factor", "gradients are averaged in fp32, where the order does not matter", 1, 1.0),
    accepted("sparse_gradients", "gradients are dense", False),
    refused("gradient_allreduce_op", "gradients are averaged over the ranks: set it to mean", "mean"),
    accepted("managed_gradient_accumulation", "Accelerate owns the accumulation boundary"),
    accepted("zero_allow_untested_optimizer", "any torch optimizer is allowed whose step needs no closure", True),
    accepted("zero_force_ds_cpu_optimizer", "the optimizer is your torch optimizer", False),
    accepted("dump_state", "see hf-zero config", False),
    accepted("memory_breakdown", "see the step report", False),
    accepted("dataloader_drop_last", "set it on the DataLoader or in the training arguments", False),
    accepted("tensorboard wandb csv_monitor comet monitor_config", "use report_to of the training arguments"),
    accepted("comms_logger comms_config flops_profiler timers", "use a profiler of your choice"),
    accepted("disable_allgather graph_harvesting", _NO_ENGINE_KNOB, False),
    accepted("use_data_before_expert_parallelism", "there is no expert parallelism here", False),
    accepted("vocabulary_size", "only has a meaning for DeepSpeed's own checks"),
    accepted("log_level", "set the level of Python's logging"),
    combined(
        "activation_checkpointing.cpu_checkpointing",
        CPU_CHECKPOINTING,
        values.to_bool,
        "offload_activations_device cpu; gradient_checkpointing of the training arguments makes the checkpoints",
    ),
    accepted(
        "activation_checkpointing.partition_activations",
        "ranks split what they share, and data-parallel ranks share no activations",
        False,
    ),
    accepted(
        "activation_checkpointing.contiguous_memory_optimization activation_checkpointing.number_checkpoints",
        "nothing has to be set aside for checkpoints: their memory is not fragmented",
        False,
    ),
    accepted("activation_checkpointing.synchronize_checkpoint_boundary", _NO_ENGINE_KNOB, False),
    accepted("activation_checkpointing.profile", "use a profiler of your choice", False),
    accepted("checkpoint", "checkpoints are Hugging Face folders that load at any number of ranks"),
    accepted("nebula datastates_ckpt", "checkpoints are Hugging Face folders"),
    accepted("data_types.param_dtype", "the compute dtype follows bf16.enabled and fp16.enabled"),
    accepted("data_types.buffer_dtype", "buffers keep the dtype of the model"),
    accepted("autotuning", "hf-zero config shows what each key does", False),
    refused("amp.enabled", "apex AMP is not supported: use bf16.enabled or fp16.enabled"),
    accepted("amp.opt_level", "only has a meaning with apex AMP"),
    refused("torch_autocast.enabled", "use bf16.enabled or fp16.enabled (16-bit compute, fp32 master weights)"),
    accepted(
        "torch_autocast.dtype torch_autocast.lower_precision_safe_modules",
        "only has a meaning with torch_autocast.enabled",
    ),
    refused("compile.deepcompile", "whole-model compilation is not supported: set it to false"),
    accepted("compile", "compile single layers with torch.compile"),
    *(
        accepted(f"tensor_parallel.{name}", why)
        for name, why in (
            ("dtype", "weights have the dtype of computation"),
            ("keep_module_on_host", "each rank keeps its own part only"),
            ("preset_model", "the plan is that of the model's class in transformers (tp_plan)"),
        )
    ),
    refused(
        "tensor_parallel.partition_config",
        "the plan is that of the model's class: give its configuration a base_model_tp_plan instead",
    ),
    refused("tensor_parallel.tp.tp_size", "write tensor_parallel.autotp_size", 1),
    refused("expert_parallel.enabled", "expert parallelism is not supported: set it to false"),
    accepted("expert_parallel", "there is no expert parallelism here"),
    refused("fp8.enabled", "fp8 is not supported: use bf16.enabled"),
    accepted("fp8", "there is no fp8 here"),
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
    *(keys_of(name, option.deepspeed) for name, option in OPTIONS.items()),
    _DEEPSPEED_REST.values(),
    (dataclasses.replace(key, path=f"zero_optimization.{key.path}") for key in ZERO_KEYS.values()),
)
