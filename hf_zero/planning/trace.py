"""Trains a model for two steps on the meta device, with the real engine, and counts bytes in memory and on the wire.

Nothing here says what a stage keeps: the engine that trains is the engine that is measured, so a change of its
schedule changes the plan too.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_zero.comm.communicator import Communicator
from hf_zero.config import ZeroConfig
from hf_zero.core.engine import ZeroEngine
from hf_zero.core.extents import arrange
from hf_zero.planning.disk import planned_homes
from hf_zero.planning.meter import ACTIVATIONS, StorageMeter
from hf_zero.planning.model import BatchShape, PlanError, make_batch, vocabulary
from hf_zero.tools.memory import bytes_elsewhere, tensors_by_category


# State tensors per weight, of the optimizers that Trainer knows by these names.
OPTIMIZER_STATES = {
    "adamw": 2,
    "adam": 2,
    "nadam": 2,
    "radam": 2,
    "lion": 1,
    "rmsprop": 1,
    "adagrad": 1,
    "sgd_momentum": 1,
    "sgd": 0,
}

# What rests where the optimizer state does. (Unreduced gradients are not sharded: they stay on the device.)
OPTIMIZER_CATEGORIES = ("gradients", "master weights", "optimizer states")

_STEPS = 2  # the first records the order of units and makes the optimizer states; the second is like all others


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One way to train: everything that the bytes depend on."""

    config: ZeroConfig
    world_size: int
    batch: BatchShape
    checkpointing: bool = False
    accumulation: int = 1
    optimizer_states: int = 2  # tensors per weight
    backend: str = "nccl"


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one rank: what rests between steps, what is live at the worst moment, what a step sends.

    `resident` and `peak` are on the device, `host` and `disk` are what rests elsewhere.
    """

    resident: dict[str, int]
    peak: dict[str, int]
    peak_without_optimizer: dict[str, int] = field(
        default_factory=dict
    )  # the worst moment if its state were elsewhere
    sent: dict[str, int]
    calls: dict[str, int]
    largest_unit: int
    gradients: int  # after the last backward, on top of what rests
    activations: int  # what one micro-batch's forward leaves for its backward, logits included
    logits: int  # all copies of them at one time
    trained_slices: int = 0  # this rank's share of the trained weights, in the dtype of computation
    frozen_slices: int = 0  # the same of the frozen ones
    host: dict[str, int] = field(default_factory=dict)
    disk: dict[str, int] = field(default_factory=dict)
    pcie_bytes: int = 0  # between device and host in a step, both ways
    disk_traffic: int = 0  # read and written in a step

    @property
    def resident_bytes(self) -> int:
        return sum(self.resident.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def disk_bytes(self) -> int:
        return sum(self.disk.values())

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    @property
    def sent_bytes(self) -> int:
        return sum(self.sent.values())


class _FlashAttention(TorchFunctionMode):
    """Keeps attention from falling back to the quadratic form, which no device takes where a fused kernel fits."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        return func(*args, **kwargs)


def _attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if attn_mask is not None and attn_mask.requires_grad:  # a learned bias: no fused kernel takes one
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return out


class _PlannedOptimizer(torch.optim.Optimizer):
    """Holds as many state tensors per weight as the optimizer that it stands for, and steps without temporaries."""

    def __init__(self, groups: list, states: int) -> None:
        super().__init__(groups, {"lr": 0.1})
        self.states = states

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    for number in range(len(state), self.states):
                        state[f"state_{number}"] = torch.zeros_like(weight)
                    weight.add_(weight.grad, alpha=-group["lr"])


def trace(model: nn.Module, scenario: Scenario, inputs: dict[str, Tensor] | None = None) -> Footprint:
    """Train `model` (on meta, not prepared) as the scenario says; it is an ordinary model again afterwards.

    `inputs` (on meta) take the place of a batch that is made to the scenario's measure.

    Raises PlanError where the model's code asks for values, which there are none of.
    """
    _set_checkpointing(model, scenario.checkpointing)
    meter = StorageMeter(elsewhere=OPTIMIZER_CATEGORIES)
    topology = arrange(scenario.config, scenario.world_size, 0)
    comm = Communicator.imagine(
        scenario.world_size,
        scenario.backend,
        deterministic=scenario.config.deterministic_reduce,
        peer_memory=scenario.config.peer_memory,
        together=topology.machine == topology.size,
        on_buffer=lambda tensors: meter.label(tensors, "communication"),
    )
    with meter:
        homes = planned_homes(scenario.config, scenario.backend)
        engine = ZeroEngine(model, scenario.config, group=comm, device=torch.device("meta"), homes=homes)
    try:
        optimizer = _PlannedOptimizer(_groups(model), scenario.optimizer_states)
        with meter:
            engine.attach_optimizer(optimizer)
        meter.resizable = lambda: (buffer.unsharded for buffer in engine.buffers)
        meter.before_peak = lambda: _label_states(meter, engine)
        with meter, _FlashAttention():
            return _train(model, engine, optimizer, meter, scenario, inputs)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError) as error:
        reason = str(error).strip().splitlines()[0][:160]
        raise PlanError(f"{type(model).__name__} cannot be traced without values: {reason}") from error
    finally:
        engine.abort()
        engine.undo()


def _set_checkpointing(model: nn.Module, wanted: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in transformers 5.23, whose Trainer still calls it
        if wanted:
            if not getattr(model, "supports_gradient_checkpointing", False):
                raise PlanError(f"{type(model).__name__} does not support gradient checkpointing")
            # torch suspends a function mode inside backward, where the recomputation runs.
            kwargs = {"use_reentrant": False, "context_fn": lambda: (contextlib.nullcontext(), _FlashAttention())}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        elif getattr(model, "is_gradient_checkpointing", False):
            model.gradient_checkpointing_disable()


def _groups(model: nn.Module) -> list[dict]:
    """Two groups, weights that decay and vectors that do not, as Trainer makes them."""
    trained = [param for param in model.parameters() if param.requires_grad]
    split = ([p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1])
    return [{"params": params} for params in split if params]


def _train(
    model: nn.Module,
    engine: ZeroEngine,
    optimizer: torch.optim.Optimizer,
    meter: StorageMeter,
    scenario: Scenario,
    inputs: dict[str, Tensor] | None,
) -> Footprint:
    meter.logits_width = vocabulary(model)
    batch = make_batch(model, scenario.batch) if inputs is None else inputs
    if engine.precision.dtype is not None:  # autocast would do that, which the meta device has not
        batch = {k: v.to(engine.precision.dtype) if v.is_floating_point() else v for k, v in batch.items()}
    for _ in range(_STEPS):
        meter.reset_peak()
        engine.comm.traffic.clear()
        for micro in range(scenario.accumulation):
            last = micro == scenario.accumulation - 1
            with contextlib.nullcontext() if last else engine.no_sync():
                loss = _loss(model, batch)
                activations = meter.live[ACTIVATIONS] + meter.live["logits"]
                engine.backward(loss)
                del loss
            _label_states(meter, engine)
        gradients = meter.live["gradients"]
        optimizer.step()
        optimizer.zero_grad()
    _label_states(meter, engine)
    meter.refresh()
    # The gather of updated weights that a step has begun belongs to it: its values may be read before the next one.
    for unit in engine.units:
        unit.unshard() if not unit.sharded else None
    elsewhere = bytes_elsewhere(engine)
    resident = {name: count for name, count in meter.live.items() if name != ACTIVATIONS and count}
    whole = {trained: [b.unsharded for b in engine.buffers if b.trainable is trained] for trained in (True, False)}
    trained, frozen = (
        sum(full.numel() * full.itemsize for full in whole[kind]) // engine.comm.world_size for kind in (True, False)
    )
    return Footprint(
        resident=resident,
        peak={name: count for name, count in meter.peak.live.items() if count},
        peak_without_optimizer={name: count for name, count in meter.peak_without.live.items() if count},
        sent=dict(engine.comm.traffic.bytes_sent),
        calls=dict(engine.comm.traffic.calls),
        largest_unit=max(
            sum(b.unsharded.numel() * b.unsharded.itemsize for b in unit.buffers) for unit in engine.units
        ),
        gradients=gradients,
        activations=activations,
        logits=meter.most_logits,
        trained_slices=trained,
        frozen_slices=frozen,
        disk=elsewhere.get("disk", {}),
        host={"buffers": engine.homes.buffer_bytes} if "disk" in elsewhere else {},
    )


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch)
    loss = getattr(output, "loss", None)
    return output[0].float().sum() if loss is None else loss


def _label_states(meter: StorageMeter, engine: ZeroEngine) -> None:
    """Tell the meter what the engine holds."""
    for category, tensors in tensors_by_category(engine).items():
        meter.label(tensors, category)
