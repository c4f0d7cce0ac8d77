"""Every option, declared once: type, default, range, what it does, and its names in each file format.

All else derives from these declarations: readers and their key tables, checks, `hf-zero config`, the reference page,
training arguments. To add an option, add a field here (and what needs it).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hf_zero.config import values
from hf_zero.config.declare import Option, choice, folder, number, one_of, option, section, size, switch, whole
from hf_zero.config.origin import Origin


Auto = str  # the literal "auto"; readable type hints below
Size = int | str  # a count of elements, or a byte size such as "25MB"
OPTIMIZER_TYPES = ("AdamW", "Adam", "SGD")
SCHEDULER_TYPES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_STAGE3, _FP16 = ("zero_stage", 3), ("mixed_precision", "fp16")
_OFFLOADED = ("offload_optimizer_device", ("cpu", "nvme"))


def _stage3_names(name: str) -> str:
    """DeepSpeed knows these with a prefix and without."""
    return f"stage3_{name} {name}"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The fields of ``ZeroConfig``. Names are DeepSpeed's and Accelerate's where they have one."""

    # What is sharded.
    zero_stage: int = option(
        2,
        "what is sharded: 0 nothing, 1 optimizer states, 2 + gradients, 3 + parameters",
        whole(0, at_most=3, expected="0 (nothing sharded), 1 (optimizer states), 2 (+ gradients) or 3 (+ parameters)"),
        deepspeed="zero_optimization.stage",
        accelerate="zero_stage",
        argument="zero_stage",
    )
    param_access: str = option(
        "gather",
        "reading a sharded parameter or gradient outside its module gathers it, or raises",
        choice("gather", "raise"),
        own=True,
        argument="zero_param_access",
    )
    zero3_init_flag: bool | None = option(
        None,
        "build the model already sharded (on where the stage is 3)",
        switch(),
        accelerate="zero3_init_flag",
        needs=_STAGE3,
    )
    zero3_save_16bit_model: bool = option(
        True,
        "write the weights in 16 bit; saving always gives a complete folder",
        switch(),
        zero=_stage3_names("gather_16bit_weights_on_model_save") + " stage3_gather_fp16_weights_on_model_save",
        accelerate="zero3_save_16bit_model",
    )

    # Precision of compute, of the wire and of the accumulator.
    mixed_precision: str = option(
        "no",
        "compute dtype; master weights, accumulator and states stay fp32",
        choice("no", "bf16", "fp16", parse=values.to_precision),
        shared=True,
    )
    communication_data_type: str = option(
        "fp32",
        "dtype of gradients on the wire; they are summed in fp32",
        choice("fp32", "bf16", "fp16", parse=values.to_dtype),
        both="communication_data_type",
    )
    grad_accum_dtype: str = option(
        "fp32",
        "dtype that gradients are accumulated in",
        choice("fp32", parse=values.to_dtype),
        deepspeed="data_types.grad_accum_dtype",
    )

    # Values with another owner (TrainingArguments, Accelerator): compared, never silently overruled.
    gradient_accumulation_steps: int | Auto = option(
        values.AUTO,
        "micro-batches per update; owned by the arguments, compared here",
        whole(1, auto=True),
        both="gradient_accumulation_steps",
        argument="gradient_accumulation_steps",
        shared=True,
    )
    gradient_clipping: float | Auto = option(
        values.AUTO,
        "limit of the global gradient norm, 0 for none; owned by the arguments",
        number(
            lambda norm: norm >= 0,
            'a norm of at least 0 (0 switches clipping off) or "auto"',
            shown="from 0",
            auto=True,
        ),
        both="gradient_clipping",
        argument="max_grad_norm",
        shared=True,
    )
    train_micro_batch_size_per_gpu: int | Auto = option(
        values.AUTO,
        "samples per rank and micro-batch; owned by the arguments",
        whole(1, auto=True),
        both="train_micro_batch_size_per_gpu",
        argument="per_device_train_batch_size",
        shared=True,
    )
    train_batch_size: int | Auto = option(
        values.AUTO,
        "samples per update: micro-batch x accumulation x ranks; checked",
        whole(1, auto=True),
        both="train_batch_size",
        shared=True,
    )

    # Communication.
    overlap_comm: bool = option(
        True, "communicate while computing; the numbers stay the same", switch(), zero="overlap_comm"
    )
    deterministic_reduce: bool = option(
        False, "sum gradients in rank order, so that stages agree bit for bit", switch(), own=True
    )
    peer_memory: bool = option(
        True, "CPU ranks of one machine read each other's memory instead of sending", switch(), own=True
    )
    no_sync: str = option(
        "reduce",
        "stages 2-3 under no_sync: reduce every micro-batch, as far as the node, or keep local gradients",
        choice("reduce", "node", "local"),
        own=True,
        argument="zero_no_sync",
    )
    reduce_bucket_size: Size | Auto = option(
        500_000_000,
        "elements per gradient reduction (stages 0-2)",
        size(1),
        zero="reduce_bucket_size allreduce_bucket_size",
    )
    allgather_bucket_size: Size | Auto = option(
        500_000_000, "elements per all-gather of updated weights (stages 1-2)", size(1), zero="allgather_bucket_size"
    )
    zero_hpz_partition_size: int | Auto = option(
        1,
        "ranks of a node, which keeps all weights, so that gathers stay inside; 1: no node does; auto: each machine",
        whole(1, auto=True),
        zero="zero_hpz_partition_size",
        needs=_STAGE3,
    )
    mics_shard_size: int | Auto = option(
        0,
        "ranks that share one copy of the state, others replicate it; 0 for all ranks, auto for those of a machine",
        whole(0, auto=True, parse=values.to_count),
        zero="mics_shard_size",
    )
    node_size: int | Auto = option(
        values.AUTO,
        "ranks on one machine, for what counts as traffic between nodes; auto: LOCAL_WORLD_SIZE",
        whole(1, auto=True),
        own=True,
    )
    zero_quantized_weights: bool = option(
        False,
        "send weights in 8 bits: as differences between nodes, directly where all ranks are on one node",
        switch(),
        zero="zero_quantized_weights",
        needs=_STAGE3,
    )
    zero_quantized_gradients: bool = option(
        False, "send gradients in quantized_gradient_bits; sums are in fp32", switch(), zero="zero_quantized_gradients"
    )
    quantized_gradient_bits: int = option(
        8, "bits of quantised gradients; 4 with a rotation that spreads outliers", one_of(8, 4), own=True
    )
    quantized_error_limit: float | Auto = option(
        values.AUTO,
        "relative error of three steps in a row that ends quantisation; auto: 0.05, and 0.25 with 4 bits",
        number(lambda limit: limit > 0, 'a number above 0 or "auto"', shown="above 0", auto=True),
        own=True,
    )
    hang_timeout_s: float = option(
        120.0,
        "seconds after which ranks that wait for each other are named and stopped",
        number(lambda seconds: seconds > 0, "a number of seconds above 0", shown="above 0"),
        own=True,
    )

    # Stage 3 schedule; the defaults spend the least memory. A unit travels in one collective, so small parameters
    # ride along for free and keeping them whole only costs memory: 0, where DeepSpeed has 1e5. One unit is gathered
    # ahead (DeepSpeed: 5e7 elements), and nothing is kept after forward (DeepSpeed: what is used again within 1e9).
    stage3_prefetch_bucket_size: Size | Auto = option(
        1,
        "elements gathered ahead of their use: the next layer in any case, but none with 0",
        size(0),
        zero=_stage3_names("prefetch_bucket_size"),
        needs=_STAGE3,
    )
    stage3_param_persistence_threshold: Size | Auto = option(
        0,
        "parameters with fewer elements stay whole on every rank",
        size(0),
        zero=_stage3_names("param_persistence_threshold"),
        needs=_STAGE3,
    )
    stage3_model_persistence_threshold: int | None = option(
        None,
        "cap on all elements that stay whole",
        whole(0),
        zero=_stage3_names("model_persistence_threshold"),
        needs=_STAGE3,
    )
    stage3_max_live_parameters: int = option(
        1_000_000_000,
        "only the next layer is gathered ahead beyond so many unsharded elements",
        whole(0),
        zero=_stage3_names("max_live_parameters"),
        needs=_STAGE3,
    )
    stage3_max_reuse_distance: int = option(
        0,
        "after forward, weights that backward needs before this many others stay whole",
        whole(0),
        zero=_stage3_names("max_reuse_distance"),
        needs=_STAGE3,
    )

    # Where shards live.
    offload_optimizer_device: str = option(
        "none",
        "home of the optimizer states",
        choice("none", "cpu", "nvme", parse=values.to_lower),
        deepspeed="zero_optimization.offload_optimizer.device",
        accelerate="offload_optimizer_device",
        argument="zero_offload_optimizer_device",
    )
    offload_optimizer_nvme_path: str | None = option(
        None,
        "folder of optimizer states on disk",
        folder(),
        deepspeed="zero_optimization.offload_optimizer.nvme_path",
        accelerate="offload_optimizer_nvme_path",
        argument="zero_offload_optimizer_nvme_path",
    )
    offload_optimizer_ratio: float = option(
        1.0,
        "share of the optimizer states that is offloaded; the first ones stay on the device",
        number(lambda share: 0 <= share <= 1, "a share from 0 to 1", shown="from 0 to 1"),
        deepspeed="zero_optimization.offload_optimizer.ratio",
        accelerate="offload_optimizer_ratio",
        argument="zero_offload_optimizer_ratio",
        needs=_OFFLOADED,
    )
    offload_optimizer_max_in_cpu: int = option(
        0,
        "elements of each rank whose states stay in host memory although others are on disk",
        whole(0),
        deepspeed="zero_optimization.offload_optimizer.max_in_cpu",
        accelerate="offload_optimizer_max_in_cpu",
        argument="zero_offload_optimizer_max_in_cpu",
        needs=("offload_optimizer_device", "nvme"),
    )
    offload_buffer_count: int = option(
        4,
        "buffers of host memory for states and for weights that come from disk or go there",
        whole(2),
        deepspeed="zero_optimization.offload_optimizer.buffer_count",
        accelerate="offload_buffer_count",
    )
    offload_param_device: str = option(
        "none",
        "home of the sharded weights",
        choice("none", "cpu", "nvme", parse=values.to_lower),
        deepspeed="zero_optimization.offload_param.device",
        accelerate="offload_param_device",
        argument="zero_offload_param_device",
    )
    offload_param_nvme_path: str | None = option(
        None,
        "folder of weights on disk",
        folder(),
        deepspeed="zero_optimization.offload_param.nvme_path",
        accelerate="offload_param_nvme_path",
        argument="zero_offload_param_nvme_path",
    )
    sub_group_size: int = option(
        1 << 22,
        "elements that offloaded states are stepped and moved by, at most; more than the default changes nothing",
        whole(1),
        zero="sub_group_size",
    )

    # Checkpoints.
    async_save: bool = option(
        False,
        "checkpoints are copied to host memory, and written while training goes on",
        switch(),
        own=True,
        argument="zero_async_save",
    )

    # fp16 loss scale and skipped steps.
    loss_scale: float = option(
        0.0,
        "fp16: fixed loss scale, 0 for dynamic",
        number(lambda scale: scale >= 0, "0 (dynamic) or a fixed scale above 0", shown="from 0"),
        deepspeed="fp16.loss_scale",
        needs=_FP16,
    )
    initial_scale_power: int = option(
        16,
        "fp16: the first dynamic scale is 2 to this power",
        whole(0),
        deepspeed="fp16.initial_scale_power",
        needs=_FP16,
    )
    loss_scale_window: int = option(
        1000, "fp16: good steps before the scale doubles", whole(1), deepspeed="fp16.loss_scale_window", needs=_FP16
    )
    hysteresis: int = option(
        2, "fp16: overflows before the scale halves", whole(1), deepspeed="fp16.hysteresis", needs=_FP16
    )
    min_loss_scale: float = option(
        1.0,
        "fp16: smallest scale",
        number(lambda scale: scale > 0, "a number above 0", shown="above 0"),
        deepspeed="fp16.min_loss_scale",
        needs=_FP16,
    )
    consecutive_hysteresis: bool = option(
        False,
        "fp16: good steps restore the hysteresis",
        switch(),
        deepspeed="fp16.consecutive_hysteresis",
        needs=_FP16,
    )
    check_grad_overflow: bool = option(
        True, "skip a step whose gradients hold inf or nan", switch(), deepspeed="bf16.check_grad_overflow"
    )
    max_consecutive_skips: int = option(
        20, "skipped steps in a row before training stops with an error", whole(1), own=True
    )

    # DeepSpeed's own optimizer and scheduler sections, {"type": ..., "params": {...}}.
    optimizer: dict[str, Any] | None = option(
        None,
        "DeepSpeed's optimizer section, built as the torch optimizer",
        section(*OPTIMIZER_TYPES),
        deepspeed="optimizer",
    )
    scheduler: dict[str, Any] | None = option(
        None,
        "DeepSpeed's scheduler section, built as a torch scheduler",
        section(*SCHEDULER_TYPES),
        deepspeed="scheduler",
    )

    # Reporting.
    steps_per_print: int | None = option(
        None, "steps between reports", whole(1, parse=values.to_interval), both="steps_per_print"
    )
    wall_clock_breakdown: bool = option(False, "add timings to the step report", switch(), both="wall_clock_breakdown")

    # Where each value came from and what the reader wants to say; no part of a run's identity.
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def default(cls, name: str) -> Any:
        return cls.__dataclass_fields__[name].default

    def is_set(self, name: str) -> bool:
        """Whether somebody wrote this value (True), or it is the default (False)."""
        return name in self.origins

    def chosen(self) -> tuple[str, ...]:
        """The fields that somebody set, in a file or (without an origin) in Python."""
        return tuple(name for name in OPTIONS if self.is_set(name) or getattr(self, name) != self._unset(name))

    def _unset(self, name: str) -> Any:
        return self.zero_stage == 3 if name == "zero3_init_flag" else self.default(name)

    def where(self, name: str) -> str:
        """The place a value came from, for messages: "zero3.yaml:7", "the keyword arguments" or "default"."""
        return self.origins[name].where if name in self.origins else "default"


OPTIONS: dict[str, Option] = {spec.name: spec.metadata["option"] for spec in fields(Options) if spec.metadata}
