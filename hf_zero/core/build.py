"""Builds the parts of an engine from its configuration: units with their buffers, limits, loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from hf_zero.comm import dtensors
from hf_zero.comm.communicator import Communicator
from hf_zero.comm.mesh import Mesh
from hf_zero.comm.process_groups import global_ranks, place_in
from hf_zero.comm.topology import Topology
from hf_zero.comm.transport.alone import Alone
from hf_zero.comm.work import Tag
from hf_zero.config import ZeroConfig
from hf_zero.core import deferred, guard
from hf_zero.core.codecs import frozen_codec, quantised_kinds
from hf_zero.core.extents import arrange
from hf_zero.core.flat_buffer import FlatBuffer
from hf_zero.core.gradients import GradientBuffer
from hf_zero.core.homes import Homes
from hf_zero.core.loss_scale import LossScaler
from hf_zero.core.order import Limits
from hf_zero.core.packed import take_apart
from hf_zero.core.partition import UnitPlan
from hf_zero.core.placement import Placement, Placements
from hf_zero.core.precision import Precision
from hf_zero.core.unit import Tally, Unit, UnitListener
from hf_zero.errors import ZeroConfigError


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# Adapters with at most this share of the frozen elements beside them stay whole on every rank.
_SMALL_ADAPTERS = 0.01

# Message tags of one unit's buffers; they need to differ among what is under way at one time only.
_TAGS_PER_UNIT = 64


WHOLE_MODEL_COMPILED = (
    "torch.compile of the whole model is not supported, as weights are gathered between layers: compile the layers "
    "(`for layer in model.model.layers: layer.compile()`, before or after this call)"
)


def check_model(model: nn.Module, device: torch.device | None) -> None:
    """Raise ValueError for a model that is wrapped, compiled, or without values (unless it is to stay on meta).

    Raises TypeError for parameters of a class that hf_zero does not know.
    """
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise ValueError(
            f"the model is wrapped in {type(model).__name__}, and hf_zero takes its place: pass the model inside "
            "(`model.module`)"
        )
    if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        raise ValueError(f"{WHOLE_MODEL_COMPILED}; pass the model itself")
    empty = next((name for name, param in model.named_parameters() if param.is_meta), None)
    if empty is not None and (device is None or device.type != "meta"):
        raise ValueError(
            f"parameter '{empty}' is on the meta device and has no values: make the model under "
            "`with hf_zero.zero_init():`, which needs no memory for it either, or load its weights first"
        )
    guard.check_kinds(model.parameters())


def connect(
    model: nn.Module, config: ZeroConfig, group: dist.ProcessGroup | Communicator | None, device: torch.device | None
) -> Mesh:
    """The communicators of the ranks of `group`, arranged as the configuration says; a collective."""
    ranks = dtensors.ranks_of(model)
    if ranks is not None:
        return _connect_beside_tensors(ranks, model, config, group, device)
    size, rank, machines = _place_in(group)
    topology = arrange(config, size, rank, machines)
    quantised = quantised_kinds(config, topology)
    world = _join(model, config, group, device, together=topology.machine == topology.size)
    _check_exchange(topology, world)
    return Mesh(world, topology, quantised, frozen_codec(config))


def _place_in(group: dist.ProcessGroup | Communicator | None) -> tuple[int, int, set[int]]:
    if isinstance(group, Communicator):
        return group.world_size, group.rank, set()
    return place_in(group)


def _join(
    model: nn.Module,
    config: ZeroConfig,
    group: dist.ProcessGroup | Communicator | None,
    device: torch.device | None,
    *,
    together: bool,
) -> Communicator:
    """The communicator of all ranks of `group`, which run on one machine or not (`together`); a collective."""
    if isinstance(group, Communicator):
        return group
    return Communicator.connect(
        group,
        device=next(model.parameters()).device if device is None else torch.device(device),
        deterministic=config.deterministic_reduce,
        hang_timeout_s=config.hang_timeout_s,
        peer_memory=config.peer_memory,
        together=together,
    )


def _connect_beside_tensors(
    ranks: Sequence[int],
    model: nn.Module,
    config: ZeroConfig,
    group: dist.ProcessGroup | Communicator | None,
    device: torch.device | None,
) -> Mesh:
    """The same where `ranks` share out the computation: data-parallel ranks are those with one place among them."""
    # They move nothing but what all have to agree on: by messages.
    everyone = _join(model, config, group, device, together=False)
    size, rank, machines = _place_in(group)
    width = len(ranks)
    first = rank - rank % width
    numbers = range(first, first + width)
    expected = tuple(numbers) if isinstance(group, Communicator) else global_ranks(group, numbers)
    if any(everyone.all_gather_object(size % width != 0 or tuple(ranks) != expected)):
        raise ValueError(
            f"tensor parallelism over ranks {list(ranks)} and data parallelism over {size // width} of such groups do "
            f"not fit {size} ranks: make the mesh of tensor parallelism the last one, so that ranks 0 to {width - 1} "
            "are the first group"
        )
    near = {max(1, number // width) for number in machines}
    topology = arrange(config, size // width, rank // width, near, width)
    world = Communicator(Alone(), traffic=everyone.traffic)
    if size > width:
        together = topology.size - 1 if topology.machine == topology.size else 0
        world = everyone.split([range(i, size, width) for i in range(width)], near=together, where="", joins=True)
    blocks = [range(at, at + width) for at in range(0, size, width)]
    tensor = everyone.split(blocks, near=0, where="of tensor parallelism", joins=True)  # nothing large to read
    tensor.near = min([width, *machines]) - 1
    _check_exchange(topology, world)
    quantised = quantised_kinds(config, topology)
    dtensors.take_over(model)
    return Mesh(world, topology, quantised, frozen_codec(config), tensor=tensor, everyone=everyone)


def _check_exchange(topology: Topology, comm: Communicator) -> None:
    """Raises ZeroConfigError where NCCL would need messages of unequal lengths in every step."""
    if topology.weights and "nccl" in comm.transport_name:
        raise ZeroConfigError(
            "rank_weights is not available with NCCL: gradients and weights go between equal slices and unequal "
            "owners in every step, which NCCL would have to do by a collective of unequal lengths. Remove "
            "rank_weights, or train on CPUs (gloo)"
        )


def default_device(model: nn.Module, backend: str) -> torch.device:
    """Where a model is trained that nothing else is said of: where it is, but NCCL moves nothing of the host's."""
    own = next(model.parameters()).device
    return torch.device("cuda", torch.cuda.current_device()) if own.type == "cpu" and "nccl" in backend else own


def _adapters(model: nn.Module) -> Set[nn.Parameter]:
    """Trained parameters that are next to nothing beside frozen ones, which are gathered apart from them.

    So each unit would need a second gather, which takes as long as an empty one.
    """
    frozen = sum(param.numel() for param in model.parameters() if not param.requires_grad)
    trained = {param for param in model.parameters() if param.requires_grad}
    return trained if sum(param.numel() for param in trained) <= _SMALL_ADAPTERS * frozen else frozenset()


@dataclass(frozen=True, kw_only=True)
class UnitBuilder:
    """Makes units from plans, all with the same placements, precision and limits."""

    config: ZeroConfig
    mesh: Mesh
    placements: Placements
    homes: Homes
    precision: Precision
    trainable: bool
    scaler: LossScaler | None
    in_parts: Set[nn.Parameter] = frozenset()  # see `dtensors.take_over_sums`
    unsharded: Tally = field(default_factory=Tally)

    def persistence(self, model: nn.Module) -> Callable[[nn.Parameter], bool] | None:
        """Which parameters stay whole at stage 3: small ones and adapters, up to the cap on all of them together."""
        if self.placements.parameter is not Placement.SHARDED:
            return None
        threshold = self.config.elements("stage3_param_persistence_threshold", 4)
        adapters = _adapters(model) if self.trainable else frozenset()
        chosen: set[nn.Parameter] = set()
        room = self.config.stage3_model_persistence_threshold or math.inf
        for param in model.parameters():
            if (param.numel() < threshold or param in adapters) and param.numel() <= room:
                chosen.add(param)
                room -= param.numel()
        return chosen.__contains__ if chosen else None

    @property
    def largest_unit(self) -> float:
        """Elements of a unit that is not cut into smaller ones where weights are sharded."""
        cuts = self.config.unit_size and self.placements.parameter is Placement.SHARDED
        return self.config.unit_size if cuts else math.inf

    def reserve(self, model: nn.Module) -> None:
        """Make sure of room for what this rank will keep on disk of the weights; a collective where it keeps any.

        Raises ZeroRuntimeError on all ranks where there is not enough. Optimizer states come when one is attached.
        """
        numels = {param: dtensors.local(param).numel() for param in model.parameters()}
        trained = sum(numel for param, numel in numels.items() if param.requires_grad and self.trainable)
        frozen = sum(numels.values()) - trained
        shards, sharded = self.mesh.topology.shards, Placement.SHARDED
        weight, total = self.mesh.topology.share
        largest = int(max(trained // shards, trained * weight // total))  # first they are equal slices
        masters = largest if self.placements.optimizer is sharded else trained
        copied = (0 if self.homes.optimizer.is_near and not self.mesh.topology.weights else trained) + frozen
        itemsize = DTYPES.get(self.config.mixed_precision, torch.float32).itemsize
        self.homes.reserve(
            self.mesh.everyone,
            masters=int(4 * masters * self.homes.ratio),
            weights=itemsize * copied // shards if self.placements.parameter is sharded else 0,
        )

    def build(self, plan: UnitPlan, index: int, listener: UnitListener) -> Unit:
        """Take the parameters of `plan` over. Raises ValueError where another engine has them."""
        split: dict[tuple, dict[str, nn.Parameter]] = {}
        for name, param in plan.params.items():
            if guard.is_prepared(param):
                raise ValueError(f"parameter '{name}' is already sharded by another engine: prepare a model once")
        for each in plan.params.items():
            for name, param in take_apart(*each, self.homes.device.device).items():
                # Vectors have outliers that one scale does not fit, and next to no bytes.
                stays = plan.persistent or param.requires_grad or param.dim() < 2 or guard.is_packed(param)
                codec = None if stays else self.mesh.frozen
                key = (param.dtype, self.precision.of(param), param.requires_grad and self.trainable, codec)
                split.setdefault(key, {})[name] = param
        buffers: list[FlatBuffer] = []
        gradients: list[GradientBuffer] = []
        for (own_dtype, dtype, trainable, codec), params in self._buckets(split):
            # A model that is only evaluated may be trained later (`undo`): what could be trained keeps its precision.
            keeps_precision = any(param.requires_grad for param in params.values())
            buffer = FlatBuffer(
                list(params),
                list(params.values()),
                dtype=dtype,
                trainable=trainable,
                placements=self.placements.with_whole_parameters() if plan.persistent else self.placements,
                mesh=self.mesh,
                homes=self.homes,
                rest_dtype=own_dtype if keeps_precision else None,
                codec=codec,
                tag=Tag(plan.name, index * _TAGS_PER_UNIT + len(buffers)),
            )
            buffer.distribute()
            buffers.append(buffer)
            if trainable:
                sums = DTYPES[self.config.communication_data_type]
                gradients.append(GradientBuffer(buffer, sums, self.scaler, self.in_parts))
        return Unit(plan.name, index, buffers, gradients, listener, self.unsharded)

    def _buckets(self, split: dict[tuple, dict[str, nn.Parameter]]) -> Iterator[tuple[tuple, dict]]:
        """Cut what would travel in one collective at stages 0 to 2 to the configured bucket size."""
        sizes = [self.config.elements(name, 4) for name in ("reduce_bucket_size", "allgather_bucket_size")]
        room = math.inf if self.placements.parameter is Placement.SHARDED else min(sizes)
        for key, params in split.items():
            bucket: dict[str, nn.Parameter] = {}
            for name, param in params.items():
                if bucket and sum(p.numel() for p in bucket.values()) + param.numel() > room:
                    yield key, bucket
                    bucket = {}
                bucket[name] = param
            yield key, bucket


def make_scaler(config: ZeroConfig) -> LossScaler | None:
    """The loss scale of fp16; None for other precisions."""
    if config.mixed_precision != "fp16":
        return None
    return LossScaler(
        scale=config.loss_scale,
        initial_scale_power=config.initial_scale_power,
        window=config.loss_scale_window,
        hysteresis=config.hysteresis,
        min_scale=config.min_loss_scale,
        consecutive_hysteresis=config.consecutive_hysteresis,
    )


def make_limits(config: ZeroConfig) -> Limits:
    """The stage 3 limits, in elements."""
    itemsize = DTYPES.get(config.mixed_precision, torch.float32).itemsize
    return Limits(
        overlap=config.overlap_comm,
        prefetch=config.elements("stage3_prefetch_bucket_size", itemsize),
        live=config.stage3_max_live_parameters,
        reuse=config.stage3_max_reuse_distance,
    )


def agree_on_values(model: nn.Module, comm: Communicator, device: torch.device) -> None:
    """Have all ranks mean the same values where parameters have none yet: rank 0's, whatever the seeds; a collective.

    A parameter that has its values on some rank gets them on all.
    """
    params = list(model.parameters())
    present = comm.all_gather_object([deferred.source_of(param) is None for param in params])
    for param, anywhere in zip(params, map(any, zip(*present, strict=True)), strict=True):
        source = deferred.source_of(param)
        if source is not None and anywhere:
            deferred.materialize(param)
        elif source is not None:
            for tensor in source.ingredients:
                tensor.copy_(comm.broadcast(tensor.to(device)))
