"""`ZeroPlugin` and `ZeroAccelerator`: the engine behind accelerate's own interface."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    get_mixed_precision_context_manager,
)
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import Tensor, nn

from hf_zero.checkpoint import saving
from hf_zero.checkpoint.background import BackgroundSaves
from hf_zero.checkpoint.model_folder import mixins_for
from hf_zero.config import ZeroConfig
from hf_zero.config.consistency import (
    Claim,
    argument_claims,
    check_consistency,
    config_claims,
    hidden_size_of,
    resolve_auto,
)
from hf_zero.config.origin import Origin
from hf_zero.core import grad_norm, guard
from hf_zero.core.build import check_model
from hf_zero.core.engine import ZeroEngine, engine_of
from hf_zero.core.loss_scale import LossScaler
from hf_zero.core.placement import STAGES, Placement
from hf_zero.errors import ZeroConfigError, ZeroLaunchError
from hf_zero.integrations import accelerate_state, stock_plugins
from hf_zero.integrations.accelerate_optimizer import ZeroOptimizer
from hf_zero.integrations.compilation import by_layers
from hf_zero.integrations.sequence_accelerator import SequenceAccelerator, ranks_of_a_batch, sizes_of
from hf_zero.integrations.tensor_accelerator import TensorAccelerator
from hf_zero.launcher.environment import (
    check_ranks_started,
    lone_process,
    prepare_rank_environment,
    resolve_from_environment,
)


logger = logging.getLogger(__name__)


class ZeroPlugin:
    """The configuration of hf_zero for an `Accelerator` or a `Trainer`.

    Args:
        config: a path to a DeepSpeed JSON or an Accelerate YAML, a dict, or a `ZeroConfig`. Where it says nothing, the
            launcher's configuration holds (`accelerate launch --config_file zero3.yaml`, `HF_ZERO_CONFIG_FILE`).
        **overrides: any field of `ZeroConfig`, such as `zero_stage=3`; they win over everything else.

    Raises:
        ZeroConfigError: with every problem found in the configuration.
    """

    def __init__(self, config: Any = None, **overrides: Any) -> None:
        explicit = ZeroConfig.from_any(config, **overrides) if config is not None or overrides else None
        resolved = resolve_from_environment(explicit)
        self._given: ZeroConfig = resolved.config  # with every `auto` as it was written
        self._claims: list[Claim] = []  # what arguments have said so far
        self.config: ZeroConfig = resolved.config
        self.source: str = resolved.source
        self.launched: ZeroConfig | None = resolved.launched

    def __repr__(self) -> str:
        return f"ZeroPlugin(zero_stage={self.config.zero_stage}, source={self.source!r})"

    def place(self, given: ParallelismConfig) -> None:
        """Take over the sizes that accelerate's own object says. Raises ZeroConfigError where others were written."""
        sizes, label = sizes_of(given), "ParallelismConfig"
        for name, size in sizes.items():
            other = getattr(self._given, name)
            if self._given.is_set(name) and other != size:
                raise ZeroConfigError(
                    f"{name} is {other} ({self._given.where(name)}), but ParallelismConfig says {size}: remove one"
                )
        self._given = self.config = self._given.replace(origin=Origin(label=label), **sizes)

    def resolve(self, arguments: dict[str, Any], label: str, *, world_size: int) -> None:
        """Compare with what `arguments` say, and replace every `auto`; raises ZeroConfigError with all conflicts.

        `world_size` is the number of all ranks, of which several may share a batch.
        """
        world_size = max(1, world_size // ranks_of_a_batch(self._given))
        said = self._claims + argument_claims(arguments, label)
        written = [config for config in (self._given, self.launched) if config is not None]
        claims = [claim for config in written for claim in config_claims(config)] + said
        agreed = check_consistency(claims, world_size=world_size)
        self._claims = said
        self._resolved = functools.partial(resolve_auto, self._given, agreed=agreed, world_size=world_size)
        self.config = self._resolved()

    def config_for(self, model: nn.Module) -> ZeroConfig:
        """The configuration of one model: sizes written as `auto` follow its width, as DeepSpeed's do."""
        config = self._resolved(hidden_size=hidden_size_of(getattr(model, "config", None)))
        return config.replace(mixed_precision=self.config.mixed_precision)


def _check_not_alone(num_processes: int) -> None:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1 and num_processes == 1:
        raise ZeroLaunchError(
            f"{world_size} ranks were started, but accelerate sees one process, so each would train alone: its state "
            "was made before hf_zero could choose the CPU backend. Create ZeroAccelerator (or ZeroTrainingArguments) "
            "first, or set ACCELERATE_USE_CPU=true"
        )


def _check_no_hook(handler: DistributedDataParallelKwargs | None) -> None:
    hook = DDPCommunicationHookType.NO if handler is None else handler.comm_hook
    if hook != DDPCommunicationHookType.NO:
        raise ZeroConfigError(
            f"comm_hook={hook.value} would have no effect: models are not wrapped in DistributedDataParallel, which "
            "calls it. Leave it out; `communication_data_type: bf16` in the configuration sends gradients in 16 bit"
        )


def _check_no_stand_in(prepared: tuple) -> None:
    stand_ins = {
        DummyOptim: ("optimizer", "torch.optim.AdamW(model.parameters(), lr=...)"),
        DummyScheduler: ("scheduler", "transformers.get_scheduler(...)"),
    }
    for kind, (section, example) in stand_ins.items():
        if any(isinstance(item, kind) for item in prepared):
            raise ZeroConfigError(
                f"{kind.__name__} stands for the {section} section of a DeepSpeed file, which only ZeroTrainer reads: "
                f"make the {section} in the script, such as {example}"
            )


def _check_no_section(config: ZeroConfig, optimizer: torch.optim.Optimizer) -> None:
    for name in ("optimizer", "scheduler"):
        if getattr(config, name) is not None:
            raise ZeroConfigError(
                f"{config.where(name)}: the {name} section would have no effect: only ZeroTrainer reads it, and this "
                f"script prepares its own {type(optimizer).__name__}. Remove the section, and write what it says there"
            )


def _keep_in_lockstep(model: nn.Module) -> None:
    """Set transformers' switch for models whose ranks must call the same modules.

    Ranks that are done generating then go on calling forward, and models with LayerDrop run a dropped layer and ignore
    what it gives. They look at the model itself and at the modules that hold the layers.
    """
    for module in model.modules():
        if module is model or any(isinstance(child, nn.ModuleList) for child in module.children()):
            module._is_fsdp_managed_module = True


class ZeroAccelerator(TensorAccelerator, SequenceAccelerator):
    """`accelerate.Accelerator` with models sharded by hf_zero instead of wrapped in DDP.

    Takes the arguments of `Accelerator`, and `zero_plugin` (default: what the launcher configured; in adopted ranks
    also what a plugin for DeepSpeed or FSDP says). Prepared models stay the same objects.
    """

    reads_sections = False  # whether whoever uses it makes the optimizer and scheduler that a DeepSpeed file describes

    def __init__(self, *args: Any, zero_plugin: ZeroPlugin | None = None, **kwargs: Any) -> None:
        for line in prepare_rank_environment():
            logger.info(line)
        kwargs = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        written = stock_plugins.take_config(kwargs, with_own=zero_plugin is not None)
        plugin = zero_plugin or ZeroPlugin(written)
        parallelism = kwargs.pop("parallelism_config", None)  # accelerate would want DeepSpeed or FSDP for it
        if parallelism is not None:
            plugin.place(parallelism)
        asked = kwargs.get("gradient_accumulation_steps")
        if kwargs.get("mixed_precision") is None and plugin.config.is_set("mixed_precision"):
            kwargs["mixed_precision"] = plugin.config.mixed_precision
        steps = plugin.config.gradient_accumulation_steps
        if asked is None and isinstance(steps, int) and kwargs.get("gradient_accumulation_plugin") is None:
            kwargs["gradient_accumulation_steps"] = steps
        super().__init__(**kwargs)
        stock_plugins.keep_config(self.state, written)
        check_ranks_started()
        _check_not_alone(self.num_processes)
        _check_no_hook(self.ddp_handler)
        claims = {"gradient_accumulation_steps": asked}
        if self.mixed_precision in ("bf16", "fp16"):
            claims[self.mixed_precision] = True
        plugin.resolve(claims, "Accelerator", world_size=self.num_processes)
        plugin.config = plugin.config.replace(mixed_precision=self.mixed_precision)
        self.zero_plugin = self.state.zero_plugin = plugin
        self._share_batches(parallelism)
        # The engine runs forward under autocast, with weights that have the compute dtype already, and scales losses.
        self.native_amp, self.scaler = False, None
        self.leaves_out_state_dicts = False
        self.saves = BackgroundSaves()
        self._scaler: LossScaler | None = None
        if self.num_processes == 1 and plugin.config.zero_stage > 0:
            self.print(lone_process(plugin.config.zero_stage))

    # -- prepare --------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        _check_no_stand_in(args)
        result = super().prepare(*args, device_placement=device_placement)
        for optimizer in self._optimizers:
            self._link(optimizer)
        return result

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        engine = engine_of(model)
        if engine is not None and (engine.trainable or evaluation_mode):
            if model not in self._models:
                self._models.append(model)
            return model
        config = self.zero_plugin.config_for(model)
        # A model that is explicitly put on the device for evaluation stays whole: ranks call reward models unevenly.
        shards_weights = STAGES[config.zero_stage].parameter is Placement.SHARDED
        stays_whole = evaluation_mode and (not shards_weights or device_placement is True) and config.sp_size == 1
        if not stays_whole:
            check_model(model, self.device)
        if engine is not None:
            engine.undo()  # it was prepared for evaluation only, and now it is to be trained
        model._is_accelerate_prepared = False  # the same, at stages that leave an evaluated model alone
        # No rank puts a model on its device whose weights are sharded; otherwise accelerate does as it always does.
        sharded = shards_weights and self.num_processes > 1 and not stays_whole
        placement = False if sharded else device_placement
        if model in self._models:
            self._models.remove(model)
        with contextlib.nullcontext() if stays_whole else by_layers(self.state, model):
            model = super().prepare_model(model, device_placement=placement, evaluation_mode=True)
        if not stays_whole:
            self._share_out(model)
            engine = ZeroEngine(
                model,
                config,
                device=self.device,
                trainable=not evaluation_mode,
                scaler=self._scaler,
                mixins=(*self._sequence_mixins(model), *mixins_for(model)),
            )
            self._join_sequences(engine)
            self._scaler = self._scaler or engine.scaler  # a loss may reach several models: they share one scale
            if shards_weights:
                _keep_in_lockstep(model)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> ZeroOptimizer:
        if isinstance(optimizer, ZeroOptimizer):
            if optimizer not in self._optimizers:
                self._optimizers.append(optimizer)
            return optimizer
        if not self.reads_sections:
            _check_no_section(self.zero_plugin.config, optimizer)
        prepared = ZeroOptimizer(optimizer, self.zero_plugin.config)
        self._optimizers.append(prepared)
        return prepared

    def _engines(self) -> list[ZeroEngine]:
        engines = (engine_of(model) for model in self._models)
        return [engine for engine in engines if engine is not None and engine.trainable]

    def _link(self, optimizer: ZeroOptimizer) -> None:
        """Hand the optimizer to the engine that owns its parameters."""
        engines = self._engines()
        if optimizer.linked or not engines:
            return
        self._follow_parts(optimizer.optimizer)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        owner = next((engine for engine in engines if any(engine.owns(param) for param in params)), engines[-1])
        owner.attach_optimizer(optimizer.optimizer)
        optimizer.linked = True

    # -- the training step ----------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        kwargs.pop("learning_rate", None)  # Trainer passes it for optimizers that step inside backward
        try:
            scale = 1.0 if self._scaler is None else self._scaler.scale
            (loss * scale / self.gradient_accumulation_steps).backward(**kwargs)
        except BaseException as error:
            for engine in self._engines():
                engine.abort()
            guard.raise_if_released(error)
            raise

    @contextlib.contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """As accelerate's, for code outside of a model's forward, which runs under it anyway."""
        mixed = self.mixed_precision in ("bf16", "fp16")
        with get_mixed_precision_context_manager(mixed, autocast_handler or self.autocast_handler):
            yield

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        engine = engine_of(model)
        with engine.no_sync() if engine is not None else contextlib.nullcontext():
            yield

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip the gradients of the models that own `parameters`; returns their common norm before clipping."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        engines = [engine for engine in self._engines() if any(engine.owns(param) for param in params)]
        if not engines:
            return super().clip_grad_norm_(params, max_norm, norm_type)
        if math.isfinite(max_norm):
            for optimizer in self._optimizers:
                if optimizer.linked and optimizer.engine in engines:
                    optimizer.leave_clipping_to_script(max_norm)
        if len(engines) == 1:
            return engines[0].clip_grad_norm_(max_norm, norm_type)
        norms = torch.stack([engine.clip_grad_norm_(math.inf, norm_type) for engine in engines])
        norm = torch.linalg.vector_norm(norms, float(norm_type))
        grad_norm.clip_([master for engine in engines for master in engine.masters], norm, max_norm)
        return norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        raise ZeroConfigError(
            "clip_grad_value_ is not supported: it would gather all gradients on every rank. Clip by norm instead "
            "(clip_grad_norm_), or call torch.nn.utils.clip_grad_value_ on the parameters, which does gather them"
        )

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing to do: gradients are scaled by the engine, and unscaled when it reduces them."""

    # -- saving ---------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor] | None:
        """The whole state dict on the CPU of the main process, None on the others; call it on all ranks."""
        if engine_of(model) is None:
            return super().get_state_dict(model, unwrap=unwrap)
        if self.leaves_out_state_dicts:
            return None  # save_state asks, and its hook writes the weights without gathering them
        return saving.consolidated_state_dict(model, keep=self.is_main_process)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights as safetensors, each rank what it owns; call it on all ranks."""
        if engine_of(model) is None or not safe_serialization:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
        else:
            accelerate_state.save_model(self, model, save_directory, max_shard_size)

    def save_state(
        self, output_dir: str | os.PathLike | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """As `Accelerator.save_state`; a folder that exists is replaced when the new one is complete, not before."""
        stock = functools.partial(super().save_state, safe_serialization=safe_serialization, **kwargs)
        if not self._engines():
            return stock(output_dir)
        asynchronous = self.zero_plugin.config.async_save
        with self.saves.save(self._engines()[0].comm, accelerate_state.is_main(self), asynchronous) as job:
            return accelerate_state.save_state(self, stock, output_dir, job)

    def end_training(self) -> None:
        self.saves.wait()
        super().end_training()

    def load_state(self, input_dir: str | None = None, load_kwargs: dict | None = None, **kwargs: Any) -> None:
        self.saves.wait()
        if self._engines():
            accelerate_state.finish_interrupted(self, input_dir)
        with accelerate_state.loading_state(self):
            super().load_state(input_dir, load_kwargs, **kwargs)

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: list, even_batches: bool | None = None) -> Iterator[None]:
        if any(engine_of(model) is not None for model in joinables) and self.num_processes > 1:
            raise ZeroConfigError(
                "join_uneven_inputs is not supported: ranks shard the model, so all must take part in every step. "
                "Use even_batches=True (the default) instead"
            )
        with super().join_uneven_inputs(joinables, even_batches=even_batches):
            yield
