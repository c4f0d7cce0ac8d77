"""Trains a model for two steps on the meta device, with the real engine, and counts bytes in memory and on the wire.

Nothing here says what a stage keeps: the engine that trains is the engine that is measured, so a change of its
schedule changes the plan too.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from hf_zero.comm.communicator import Communicator
from hf_zero.config import ZeroConfig
from hf_zero.core.engine import ZeroEngine
from hf_zero.core.extents import arrange
from hf_zero.core.placement import Place
from hf_zero.planning.enqueued import Enqueued
from hf_zero.planning.homes import ELSEWHERE, PlannedActivations, PlannedDisk, planned_homes
from hf_zero.planning.meter import ACTIVATIONS, StorageMeter
from hf_zero.planning.model import BatchShape, PlanError, make_batch, vocabulary
from hf_zero.planning.optimizers import Kept
from hf_zero.planning.sharing import Sharing, sharing
from hf_zero.tools.memory import bytes_elsewhere, gradients_by_category, tensors_apart, tensors_by_category


# What rests where the optimizer state does. (Unreduced gradients are not sharded: they stay on the device.)
OPTIMIZER_CATEGORIES = ("gradients", "master weights", "optimizer states")

_STEPS = 2  # the first records the order of units and makes the optimizer states; the second is like all others
_STEPS_THAT_MOVE = 3  # states: steps are made in the forward pass after them, so the second makes them


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One way to train: everything that the bytes depend on."""

    config: ZeroConfig
    world_size: int
    batch: BatchShape
    checkpointing: bool = False
    accumulation: int = 1
    kept: Kept = Kept()
    backend: str = "nccl"


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one rank: what rests between steps, what is live at the worst moment, what a step sends.

    `resident` and `peak` are on the device, `host` and `disk` are what rests elsewhere.
    """

    resident: dict[str, int]
    peak: dict[str, int]
    sent: dict[str, int]
    calls: dict[str, int]
    between_nodes: int = 0  # of what is sent
    largest_unit: int
    gradients: int  # after the last backward, on top of what rests
    activations: int  # what one micro-batch's forward leaves for its backward, logits included
    logits: int  # all copies of them at one time
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
        return (_attend if func is F.scaled_dot_product_attention else func)(*args, **(kwargs or {}))


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


@contextlib.contextmanager
def _no_autocast_on_meta() -> Iterator[None]:
    """Inside, whoever asks hears that autocast is off on the meta device, where torch raises instead.

    Rotary embeddings of transformers 5.3 ask, and so do the losses that TRL puts behind a model's last layer.
    """
    stock = torch.is_autocast_enabled
    torch.is_autocast_enabled = lambda *device: False if device == ("meta",) else stock(*device)
    try:
        yield
    finally:
        torch.is_autocast_enabled = stock


class _PlannedOptimizer(torch.optim.Optimizer):
    """Holds as many state tensors per weight as the optimizer that it stands for, and steps without temporaries.

    A group that is `whole` takes steps by what the whole tensor is, and says by shape what it keeps.
    """

    def __init__(self, groups: list, fused: bool) -> None:
        super().__init__(groups, {"lr": 0.1, "states": 0, "whole": None})
        self.stands_for_fused = fused

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    like = [(weight.shape, weight.dtype)] * group["states"]
                    kept = like if group["whole"] is None else group["whole"].get(weight.shape, ())
                    for number, (shape, dtype) in list(enumerate(kept))[len(state) :]:
                        state[f"state_{number}"] = torch.zeros(shape, dtype=dtype, device=weight.device)
                    if group["whole"] is not None:
                        weight.addcmul_(weight.grad, weight.grad.norm(), value=-group["lr"])
                        continue
                    # One operation that reads and writes what a fused step does.
                    changed = [weight, *state.values()]
                    torch._foreach_add_(changed, [weight.grad] * len(changed), alpha=-group["lr"])


def trace(
    model: nn.Module,
    scenario: Scenario,
    inputs: dict[str, Any] | None = None,
    log: Enqueued | None = None,
) -> Footprint:
    """Train `model` (on meta, not prepared) as the scenario says; it is an ordinary model again afterwards.

    `inputs` (tensors on meta) take the place of a batch that is made to the scenario's measure; what is enqueued goes
    to `log`.

    Raises PlanError where the model's code asks for values, which there are none of.
    """
    with sharing(model, scenario.config, scenario.backend, log) as share:
        return _trace(share, scenario, inputs, log)


def _trace(share: Sharing, scenario: Scenario, inputs: dict[str, Any] | None, log: Enqueued | None) -> Footprint:
    model, width = share.model, scenario.config.tp_size
    _set_checkpointing(model, scenario.checkpointing)
    meter = StorageMeter(without=(ELSEWHERE,))
    topology = arrange(scenario.config, scenario.world_size // width, 0, (), width)
    comm = Communicator.imagine(
        scenario.world_size,
        scenario.backend,
        deterministic=scenario.config.deterministic_reduce,
        peer_memory=scenario.config.peer_memory,
        together=width == 1 and topology.machine == topology.size,
        on_buffer=lambda tensors: meter.label(tensors, "communication"),
        around=None if log is None else log.noting,
    )
    if log is not None:
        log.is_apart = functools.partial(meter.is_in, ELSEWHERE)
    with meter:
        homes = planned_homes(
            scenario.config, scenario.backend, meter.label, checkpointing=scenario.checkpointing, log=log
        )
        engine = ZeroEngine(
            model, scenario.config, group=comm, device=torch.device("meta"), homes=homes, mixins=share.mixins
        )
    try:
        share.join(engine)
        optimizer = _PlannedOptimizer(_groups(model, scenario), scenario.kept.fused and scenario.backend == "nccl")
        with meter:
            engine.attach_optimizer(optimizer)
        released = [buffer for buffer in engine.buffers if buffer.sharded]
        meter.resizable = lambda: [buffer.unsharded for buffer in released]
        recording = contextlib.nullcontext() if log is None else log.recording()
        # The meter makes results that it remembers by itself: what is written down has to be seen before that.
        with meter, recording, share.noting(), _FlashAttention(), _no_autocast_on_meta():
            return _train(share, engine, optimizer, meter, scenario, inputs, log or Enqueued())
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


def _groups(model: nn.Module, scenario: Scenario) -> list[dict]:
    """Two groups, weights that decay and vectors that do not, as Trainer makes them."""
    trained = [param for param in model.parameters() if param.requires_grad]
    split = ([p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1])
    kept = scenario.kept
    wholes = (kept.whole, kept.whole if kept.vectors else None)
    groups: list[dict] = []
    for params, whole in zip(split, wholes, strict=True):
        found = None if whole is None else {param.shape: whole(tuple(param.shape)) for param in params}
        groups.append({"params": params, "states": kept.flat, "whole": found})
    return [group for group in groups if group["params"]]


def _train(
    share: Sharing,
    engine: ZeroEngine,
    optimizer: torch.optim.Optimizer,
    meter: StorageMeter,
    scenario: Scenario,
    inputs: dict[str, Any] | None,
    log: Enqueued,
) -> Footprint:
    model = share.model
    meter.logits_width = vocabulary(model)
    batch = share.cut(make_batch(model, scenario.batch)) if inputs is None else inputs
    if engine.precision.dtype is not None:  # autocast would do that, which the meta device has not
        batch = tree_map_only(Tensor, _floats_to(engine.precision.dtype), batch)
    moves_states = engine.homes.step_place.on_device or not engine.homes.optimizer.keeps_memory
    steps = _STEPS_THAT_MOVE if moves_states else _STEPS
    for step in range(steps):
        log.mark("step")
        _label_states(meter, engine)
        meter.reset_peak()
        meter.watches = step == steps - 1
        for counts in (engine.comm.traffic, share.traffic, *_moved(engine)):
            counts.clear()
        for micro in range(scenario.accumulation):
            last = micro == scenario.accumulation - 1
            with contextlib.nullcontext() if last else engine.no_sync():
                log.mark("forward")
                meter.before_peak = _labels(meter, engine, "forward")
                loss = _loss(model, batch)
                engine.homes.land()
                activations = meter.live[ACTIVATIONS] + meter.live["logits"]
                log.mark("backward")
                meter.before_peak = _labels(meter, engine, "backward")
                engine.backward(loss)
                del loss
            _label_states(meter, engine)
        gradients, summed = meter.live["gradients"], Counter(bytes_elsewhere(engine).get("host", {}))
        log.mark("optimizer")
        meter.before_peak = _labels(meter, engine, "optimizer")
        engine.clip_grad_norm_(1.0)  # as Trainer does
        optimizer.step()
        optimizer.zero_grad()
    log.mark("step")
    _label_states(meter, engine)
    meter.refresh()
    # The gather of updated weights that a step has begun belongs to it: its values may be read before the next one.
    for unit in engine.units:
        unit.unshard() if not unit.sharded else None
    elsewhere, crosses = bytes_elsewhere(engine), engine.homes.host.courier.crosses
    host = summed | Counter(elsewhere.get("host", {}))  # the most of each
    resident = {name: count for name, count in meter.live.items() if name not in (ACTIVATIONS, ELSEWHERE) and count}
    disk = Counter(elsewhere.get("disk", {}))
    kept = engine.homes.activations
    if isinstance(kept, PlannedActivations) and not kept.is_near:
        (host if kept.place is Place.HOST else disk)["activations"] = kept.most
    copied, *files = _moved(engine)
    apart = {} if not share.name else {share.name: share.traffic}
    return Footprint(
        resident=resident,
        peak={name: count for name, count in meter.peak.live.items() if count},
        sent=engine.comm.traffic.bytes_sent | {name: each.bytes_sent.total() for name, each in apart.items()},
        calls=engine.comm.traffic.calls | {name: each.calls.total() for name, each in apart.items()},
        between_nodes=engine.comm.traffic.bytes_between_nodes + share.traffic.bytes_between_nodes,
        largest_unit=max(
            sum(b.unsharded.numel() * b.unsharded.itemsize for b in unit.buffers) for unit in engine.units
        ),
        gradients=gradients,
        activations=activations,
        logits=meter.most_logits,
        disk=dict(disk),
        # A CPU rank has the rest of it in the memory that it computes in.
        host={name: count for name, count in host.items() if count and (crosses or name == "buffers")},
        pcie_bytes=copied.total() if crosses else 0,
        disk_traffic=sum(moved.total() for moved in files),
    )


def _moved(engine: ZeroEngine) -> list[Counter[str]]:
    """Counts of bytes between device and host, and of those to and from files."""
    homes = engine.homes
    away = homes.activations.home if isinstance(homes.activations, PlannedActivations) else None
    disks = {home for home in (homes.optimizer, homes.parameters, away) if isinstance(home, PlannedDisk)}
    return [homes.host.courier.moved, *(disk.moved for disk in disks)]


def _floats_to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def _loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    output = model(**batch)
    loss = getattr(output, "loss", None)
    return output[0].float().sum() if loss is None else loss


def _labels(meter: StorageMeter, engine: ZeroEngine, phase: str) -> Callable[[], None]:
    """What tells the meter of all that the engine may have come to hold in a phase of a step.

    Where all state rests on the device, that is nothing in forward, and gradients in backward.
    """
    homes = engine.homes
    if phase == "optimizer" or homes.optimizer is not homes.device or homes.parameters is not homes.device:
        return lambda: _label_states(meter, engine)
    return (lambda: None) if phase == "forward" else lambda: _label(meter, gradients_by_category(engine))


def _label_states(meter: StorageMeter, engine: ZeroEngine) -> None:
    """Tell the meter what the engine holds."""
    _label(meter, tensors_by_category(engine))
    meter.label(tensors_apart(engine), ELSEWHERE)


def _label(meter: StorageMeter, tensors: dict[str, list[Tensor]]) -> None:
    for category, held in tensors.items():
        meter.label(held, category)
