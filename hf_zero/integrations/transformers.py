"""`ZeroTrainer`, its mixin for any other Trainer, and the training arguments that carry the configuration."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.training_args import OptimizerNames

from hf_zero.config.arguments import ZERO_ARGUMENTS
from hf_zero.config.builders import build_optimizer, build_scheduler
from hf_zero.config.optimizers import check_optim
from hf_zero.config.options import OPTIONS
from hf_zero.core.engine import ZeroEngine, engine_of
from hf_zero.core.tiled_loss import tiled_loss_of
from hf_zero.errors import ZeroConfigError, ZeroRuntimeError
from hf_zero.integrations.accelerate import ZeroAccelerator, ZeroPlugin
from hf_zero.integrations.reports import ZeroReportMixin
from hf_zero.integrations.sequence_trainer import SequenceTrainerMixin
from hf_zero.integrations.tensor_accelerator import TensorTrainerMixin
from hf_zero.integrations.trainer_checkpoints import ZeroCheckpointMixin
from hf_zero.launcher.environment import has_accelerator, prepare_rank_environment


logger = logging.getLogger(__name__)
_read: weakref.ref | None = None  # the arguments of the newest trainer that is hf_zero's


def _given(option: str) -> Any:
    """An argument that sets an option of the configuration where it is given."""
    known = OPTIONS[option]
    return field(default=None, metadata={"help": f"{known.help} ({known.kind.shown.replace('`', '')})"})


@dataclass
class ZeroArgumentsMixin:
    """The fields that hf_zero adds to any training arguments; what is not given comes from the launcher."""

    zero_stage: int | None = _given("zero_stage")
    zero_config: dict | str | None = field(
        default=None,
        metadata={"help": "A DeepSpeed JSON or an Accelerate YAML to configure hf_zero by (path, or dict in Python)."},
    )
    zero_param_access: str | None = _given("param_access")
    zero_memory_report: bool = field(
        default=False,
        metadata={
            "help": "Write what each rank holds after every step to output_dir/zero_memory, and compare with the plan."
        },
    )
    zero_report: bool | None = _given("report")
    zero_report_machine: str | None = _given("report_machine")
    zero_sp_size: int | None = _given("sp_size")
    zero_cp_size: int | None = _given("cp_size")
    zero_tp_size: int | None = _given("tp_size")
    zero_no_sync: str | None = _given("no_sync")
    zero_async_save: bool | None = _given("async_save")
    zero_offload_optimizer_device: str | None = _given("offload_optimizer_device")
    zero_offload_optimizer_nvme_path: str | None = _given("offload_optimizer_nvme_path")
    zero_offload_optimizer_ratio: float | None = _given("offload_optimizer_ratio")
    zero_offload_optimizer_max_in_cpu: int | None = _given("offload_optimizer_max_in_cpu")
    zero_offload_param_device: str | None = _given("offload_param_device")
    zero_offload_param_nvme_path: str | None = _given("offload_param_nvme_path")
    zero_offload_activations_device: str | None = _given("offload_activations_device")
    zero_offload_activations_nvme_path: str | None = _given("offload_activations_nvme_path")
    zero_unit_size: int | None = _given("unit_size")
    zero_tile_loss: int | None = _given("tile_loss")
    zero_tile_mlp: int | None = _given("tile_mlp")

    def __post_init__(self) -> None:
        with configuring(self):
            super().__post_init__()

    @property
    def place_model_on_device(self) -> bool:
        # What every Trainer asks when it is made, right after its accelerator, and nobody else does.
        if _read is None or _read() is not self:
            raise ZeroConfigError(
                f"{type(self).__name__} was given to a Trainer that is not hf_zero's, which would shard nothing: use "
                "hf_zero.ZeroTrainer (hf_zero.ZeroTrainerMixin in front of another class of trainers), or start the "
                "script by `hf-zero launch`, in whose ranks trainers become hf_zero's"
            )
        return False  # the engine places what each rank owns; the whole model may not fit


@contextlib.contextmanager
def configuring(args: TrainingArguments) -> Iterator[None]:
    """Around the `__post_init__` of any training arguments: what they name DeepSpeed's file configures hf_zero.

    Raises ZeroConfigError where they and the configuration disagree, and where `output_dir` cannot be written.
    """
    for line in prepare_rank_environment():
        logger.info(line)
    # Without an accelerator transformers trains on CPU anyway, but refuses bf16 unless it was asked to.
    args.use_cpu = args.use_cpu or not has_accelerator()
    # --deepspeed file.json configures hf_zero; DeepSpeed itself must not hear of it.
    given, named = args.deepspeed, getattr(args, "zero_config", None)
    if given is not None and named is not None:
        raise ZeroConfigError("both --deepspeed and --zero_config name a configuration: keep one of them")
    args.zero_config, args.deepspeed = named if given is None else given, None
    plugin = _plugin_of(args)
    if plugin.config.is_set("mixed_precision") and not (args.bf16 or args.fp16):
        # A file may also say it where no launcher has exported it.
        os.environ.setdefault("ACCELERATE_MIXED_PRECISION", plugin.config.mixed_precision)
    yield
    _check_output_dir(args.output_dir)
    _resolve(args, plugin)


def resolved_plugin(args: TrainingArguments) -> ZeroPlugin:
    """The configuration of a run with these arguments. Raises ZeroConfigError with all conflicts between the two."""
    plugin = _plugin_of(args)
    _resolve(args, plugin)
    return plugin


def _plugin_of(args: TrainingArguments) -> ZeroPlugin:
    found = {field: getattr(args, name, None) for name, field in ZERO_ARGUMENTS.items()}
    given = {field: value for field, value in found.items() if value is not None}
    plugin = ZeroPlugin(getattr(args, "zero_config", None), **given)
    if args.parallelism_config is not None:
        plugin.place(args.parallelism_config)
    return plugin


def _resolve(args: TrainingArguments, plugin: ZeroPlugin) -> None:
    names = ("gradient_accumulation_steps", "per_device_train_batch_size", "max_grad_norm", "bf16", "fp16")
    arguments = {name: getattr(args, name) for name in names}
    plugin.resolve(arguments, type(args).__name__, world_size=args.world_size)


@dataclass
class ZeroTrainingArguments(ZeroArgumentsMixin, TrainingArguments):
    """`transformers.TrainingArguments` with hf_zero's fields; `deepspeed=` is read as hf_zero's configuration."""


class ZeroTrainerMixin(ZeroReportMixin, TensorTrainerMixin, SequenceTrainerMixin, ZeroCheckpointMixin):
    """Put before any Trainer class, it trains that class's models under ZeRO: `class T(ZeroTrainerMixin, SFTTrainer)`.

    What `ZeroTrainingArguments` (or others with `ZeroArgumentsMixin`) say of the configuration wins over the launcher.
    """

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_args = super()._build_accelerator_args(**kwargs)
        stock = dict(self._accelerator_args)  # for an Accelerator that ours replaces
        stock.pop("parallelism_config", None)
        return stock

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # accelerate keeps its state process-wide, so a second Accelerator with the same arguments is the same one.
        self.accelerator = ZeroAccelerator(**self._accelerator_args, zero_plugin=resolved_plugin(self.args))
        self.accelerator.reads_sections = True
        global _read
        _read = weakref.ref(self.args)
        # The Trainer divides losses itself. Before 5.8 it told accelerate to divide them as well.
        self.accelerator.gradient_accumulation_steps = 1
        old = self.gather_function
        self.gather_function = self.accelerator.gather_for_metrics
        if isinstance(old, functools.partial):
            self.gather_function = functools.partial(self.gather_function, *old.args, **old.keywords)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not (self.accelerator.zero_plugin.config.zero_stage == 3 and self.accelerator.num_processes > 1):
            super()._move_model_to_device(model, device)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)
        except RuntimeError as error:
            engine = engine_of(self.model)
            if self.args.auto_find_batch_size and engine is not None and should_reduce_batch_size(error):
                _shrink_together(engine, error)
            raise

    # -- the loss in tiles ------------------------------------------------------------------------------------------

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        tiles = tiled_loss_of(model)
        if tiles is None or not (model.training or tiles.in_evaluation):
            return super().compute_loss(model, inputs, *args, **kwargs)
        if self.compute_loss_func is not None:
            raise ZeroConfigError(
                "compute_loss_func is called with whole logits, and there are none: leave zero_tile_loss out, or it"
            )
        smoother = self.label_smoother
        if smoother is None or "labels" not in inputs:
            return super().compute_loss(model, inputs, *args, **kwargs)
        if tiles.name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            raise ZeroConfigError(
                f"label_smoothing_factor: Trainer does not shift the labels of {tiles.name}, which transformers does "
                "not list as a causal language model, so its smoothed loss is another one: leave zero_tile_loss out"
            )
        self.label_smoother, tiles.label_smoothing = None, smoother.epsilon  # so that the model gets the labels
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self.label_smoother, tiles.label_smoothing = smoother, 0.0

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        tiles = tiled_loss_of(model)
        if tiles is None:
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)
        tiles.in_evaluation = prediction_loss_only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)
        finally:
            tiles.in_evaluation = False

    # -- DeepSpeed's optimizer and scheduler sections -----------------------------------------------------------------

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        config = self.accelerator.zero_plugin.config
        if config.optimizer is None or self.optimizer is not None:
            if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
                check_optim(OptimizerNames(self.args.optim).value)
            return super().create_optimizer(*args, **kwargs)
        params = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = build_optimizer(
            config.optimizer, params, arguments=vars(self.args), where=config.where("optimizer")
        )
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        config = self.accelerator.zero_plugin.config
        if config.scheduler is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        arguments = {
            **vars(self.args),
            "max_steps": num_training_steps,
            "warmup_steps": self.args.get_warmup_steps(num_training_steps),
        }
        # A prepared optimizer is accelerate's wrapper; schedulers belong to the user's own.
        target = getattr(optimizer or self.optimizer, "optimizer", optimizer or self.optimizer)
        self.lr_scheduler = build_scheduler(
            config.scheduler, target, arguments=arguments, where=config.where("scheduler")
        )
        self._created_lr_scheduler = True
        return self.lr_scheduler


def _shrink_together(engine: ZeroEngine, error: RuntimeError) -> None:
    """Let Trainer begin anew with smaller batches where all ranks do so, after the same collectives.

    Raises ZeroRuntimeError where they do not: a rank that goes on with its pass waits for those that have given it up.
    """
    place = f"giving up a batch size after {engine.comm.traffic.calls.total()} collectives"
    try:
        engine.comm.meet(place, engine.config.hang_timeout_s)
    except ZeroRuntimeError:
        # Not with the words of `error`, by which Trainer would know it as one that smaller batches help against.
        raise ZeroRuntimeError(
            f"auto_find_batch_size: rank {engine.comm.rank} has no memory left, and not every rank has come to that "
            "at the same place, so they cannot try a smaller batch together: lower per_device_train_batch_size"
        ) from error


class ZeroTrainer(ZeroTrainerMixin, Trainer):
    """`transformers.Trainer` under ZeRO."""


def _check_output_dir(output_dir: str | None) -> None:
    """Fail before training, not at the first save. Raises ZeroConfigError where the folder cannot be written."""
    if output_dir is None:
        return
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=output_dir):
            pass
    except OSError as error:
        raise ZeroConfigError(
            f"output_dir '{output_dir}' cannot be written ({error.strerror}): choose a folder that you may write to"
        ) from error
