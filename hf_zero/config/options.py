"""Every option, declared once: type, default, range, what it does, and its names in each file format.

All else derives from these declarations: readers and their key tables, checks, `hf-zero config`, the reference page,
training arguments. To add an option, add a field here or in `sharding`, which has the first half of them (and what
needs it).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hf_zero.config import values
from hf_zero.config.declare import Option, choice, folder, machine, number, option, section, size, switch, whole
from hf_zero.config.origin import Origin
from hf_zero.config.sharding import STAGE3, Auto, ShardingOptions, Size, stage3_names


OPTIMIZER_TYPES = ("AdamW", "Adam", "SGD")
SCHEDULER_TYPES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_FP16 = ("mixed_precision", "fp16")
_OFFLOADED = ("offload_optimizer_device", ("cpu", "nvme"))


@dataclass(frozen=True, kw_only=True)
class Options(ShardingOptions):
    """The fields of ``ZeroConfig``. Names are DeepSpeed's and Accelerate's where they have one."""

    # Stage 3 schedule; the defaults spend the least memory. A unit travels in one collective, so small parameters
    # ride along for free and keeping them whole only costs memory: 0, where DeepSpeed has 1e5. One unit is gathered
    # ahead (DeepSpeed: 5e7 elements), and nothing is kept after forward (DeepSpeed: what is used again within 1e9).
    stage3_prefetch_bucket_size: Size | Auto = option(
        1,
        "elements gathered ahead of their use: the next layer in any case, but none with 0",
        size(0),
        zero=stage3_names("prefetch_bucket_size"),
        needs=STAGE3,
    )
    stage3_param_persistence_threshold: Size | Auto = option(
        0,
        "parameters with fewer elements stay whole on every rank",
        size(0),
        zero=stage3_names("param_persistence_threshold"),
        needs=STAGE3,
    )
    stage3_model_persistence_threshold: int | None = option(
        None,
        "cap on all elements that stay whole",
        whole(0),
        zero=stage3_names("model_persistence_threshold"),
        needs=STAGE3,
    )
    stage3_max_live_parameters: int = option(
        1_000_000_000,
        "only the next layer is gathered ahead beyond so many unsharded elements",
        whole(0),
        zero=stage3_names("max_live_parameters"),
        needs=STAGE3,
    )
    stage3_max_reuse_distance: int = option(
        0,
        "after forward, a layer's weights stay whole if backward needs them before this many other elements",
        whole(0),
        zero=stage3_names("max_reuse_distance"),
        needs=STAGE3,
    )

    unit_size: int = option(
        0,
        "elements that are gathered in one piece: of a larger layer, each of its modules by itself; 0: whole layers",
        whole(0),
        own=True,
        argument="zero_unit_size",
        needs=STAGE3,
    )

    # Where shards live.
    offload_optimizer_device: str = option(
        "none",
        "where the optimizer states are kept",
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
    offload_step: str = option(
        "auto",
        "what steps offloaded states beside a GPU; auto: what is measured to be faster",
        choice("auto", "host", "device", parse=values.to_lower),
        own=True,
        needs=_OFFLOADED,
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
        "where the sharded weights are kept",
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
    offload_activations_device: str = option(
        "none",
        "where the inputs of checkpointed layers are kept between forward and backward",
        choice("none", "cpu", "nvme", parse=values.to_lower),
        own=True,
        argument="zero_offload_activations_device",
    )
    offload_activations_nvme_path: str | None = option(
        None, "folder of activations on disk", folder(), own=True, argument="zero_offload_activations_nvme_path"
    )
    sub_group_size: int = option(
        1 << 22,
        "elements that offloaded states are stepped and moved by, at most; more than the default changes nothing",
        whole(1),
        zero="sub_group_size",
    )

    # Tiles: what grows with the tokens of a micro-batch is computed for some of them at a time.
    tile_loss: int = option(
        0,
        "tokens whose logits and cross entropy are computed at a time; 0: of all at once",
        whole(0),
        own=True,
        argument="zero_tile_loss",
    )
    tile_mlp: int = option(
        0,
        "tokens that go through the MLP of a layer at a time, once more in backward; 0: all at once",
        whole(0),
        own=True,
        argument="zero_tile_mlp",
    )

    # Checkpoints.
    async_save: bool = option(
        False,
        "checkpoints are copied to host memory, and written while training goes on",
        switch(),
        own=True,
        argument="zero_async_save",
    )

    # The page of a run.
    report: bool = option(
        False,
        "a Trainer writes report.html into its output_dir: memory against the plan, bytes, times, losses, settings",
        switch(),
        own=True,
        argument="zero_report",
    )
    report_machine: str | None = option(
        None,
        "the machine of docs/step_time.md, or its YAML file, for which report.html draws the timeline of a step",
        machine(),
        own=True,
        argument="zero_report_machine",
        needs=("report", True),
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
