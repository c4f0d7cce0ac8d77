"""How long a step takes on a machine, for one way to train a model there, and a whole run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.core.placement import Place
from hf_zero.planning.costs import Machine
from hf_zero.planning.enqueued import Enqueued, Mark
from hf_zero.planning.optimizers import kept_by
from hf_zero.planning.places import ON_DEVICE, PLACES, Places
from hf_zero.planning.plan import Request
from hf_zero.planning.sharing import ranks_of_a_batch
from hf_zero.planning.spread import ALL_RANKS, Spread
from hf_zero.planning.timeline import Timeline, replay
from hf_zero.planning.trace import Footprint, Scenario, trace
from hf_zero.tools.operations import Operation


# A backward pass makes twice the products of its forward pass.
PASSES = 3
# One unexpected interruption in so many GPU-hours: 419 in 54 days on 16,384 GPUs (A. Dubey et al., The Llama 3 Herd of
# Models, 2024, section 3.3.4).
GPU_HOURS_PER_FAILURE = 50_700.0
# Bytes of a training state per trained parameter: fp32 weight and two moments.
STATE_BYTES = 12


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train; `config` has the settings of the stage, of `spread` and of `places`."""

    config: ZeroConfig
    checkpointing: bool
    rows: int
    accumulation: int
    spread: Spread = ALL_RANKS
    places: Places = ON_DEVICE

    @property
    def label(self) -> str:
        words = [f"stage {self.config.zero_stage}"]
        words += [] if self.spread is ALL_RANKS else [self.spread.name]
        sizes = {"tp": self.config.tp_size, "sp": self.config.sp_size}
        words += [f"{name} {size}" for name, size in sizes.items() if size > 1]
        for what, place in (("states", self.places.optimizer), ("weights", self.places.parameters)):
            words += [] if place is Place.DEVICE else [f"{what} in {PLACES[place]}"]
        return ", ".join([*words, *(["checkpointing"] if self.checkpointing else [])])


@dataclass(frozen=True, kw_only=True)
class Pace:
    """A way to train, with its time on a machine.

    Attributes:
        flops: products of one step of one rank, without any that are made again under checkpointing.
        tokens: of one step, over all ranks that compute with the same ones.
        peak: FLOP/s of the machine in the dtype of computation.
    """

    way: Way
    footprint: Footprint
    timeline: Timeline
    fits: bool
    flops: float
    tokens: float
    peak: float

    @property
    def tokens_per_second(self) -> float:
        """Of one rank."""
        return self.tokens / self.timeline.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation (A. Chowdhery et al., PaLM, 2022, appendix B)."""
        return self.flops / self.timeline.seconds / self.peak

    @property
    def exposed(self) -> float:
        """The share of the step in which computation waits for collectives."""
        return sum(self.timeline.exposed.values()) / self.timeline.seconds

    @property
    def bottleneck(self) -> str:
        """What the most of the step's time is, apart from products: what to change next."""
        timeline = self.timeline
        waits = {"the host's launches": timeline.launching}
        for (kind, _), seconds in timeline.exposed.items():
            name = f"waiting for {kind}s"
            waits[name] = waits.get(name, 0.0) + seconds
        name, seconds = max(waits.items(), key=lambda item: item[1])
        if seconds < 0.05 * timeline.seconds:
            return "computation"
        return f"{name} ({seconds / timeline.seconds:.0%})"


def time_step(model: nn.Module, request: Request, way: Way, machine: Machine) -> Pace:
    """Train two steps without values, and run what was enqueued on the machine. Raises PlanError as `trace` does."""
    log, batch = Enqueued(), replace(request.batch, rows=way.rows)
    scenario = Scenario(
        config=way.config,
        world_size=request.world_size,
        batch=batch,
        checkpointing=way.checkpointing,
        accumulation=way.accumulation,
        kept=kept_by(request.optimizer),
        backend=request.backend,
    )
    footprint = trace(model, scenario, log=log)
    last = _last_step(log)
    return Pace(
        way=way,
        footprint=footprint,
        timeline=replay(log.events, machine.shared_by(request.gpus)),
        fits=request.fits(footprint),
        flops=PASSES * sum(operation.flops for operation in last),
        tokens=batch.tokens * way.accumulation / ranks_of_a_batch(way.config),
        peak=machine.peak(max(last, key=lambda operation: operation.flops).dtype),
    )


def _last_step(log: Enqueued) -> list[Operation]:
    """The operations of the forward passes of the last step."""
    marks = [number for number, event in enumerate(log.events) if event == Mark("step")]
    found, part = [], ""
    for event in log.events[marks[-2] : marks[-1]]:
        if isinstance(event, Mark):
            part = event.name
        elif isinstance(event, Operation) and part == "forward":
            found.append(event)
    return found


@dataclass(frozen=True, kw_only=True)
class Run:
    """A whole training run at one pace.

    Attributes:
        days: without interruptions.
        gpu_hours: of all ranks.
        save_seconds: of a training state, written by all nodes at once; None where the disk's rate is not known.
        interval: seconds between saves that lose the least (J. T. Daly, A higher order estimate of the optimum
            checkpoint interval, 2006, its first order: sqrt(2 C M) - C).
    """

    days: float
    gpu_hours: float
    save_seconds: float | None
    interval: float | None


def whole_run(pace: Pace, request: Request, machine: Machine, tokens: float, trained: int) -> Run:
    """What `tokens` take."""
    hours = tokens / (pace.tokens_per_second * request.world_size) / 3600
    save = interval = None
    if machine.disk_rate:
        save = STATE_BYTES * trained / (machine.disk_rate * request.nodes)
        between_failures = 3600 * GPU_HOURS_PER_FAILURE / request.world_size
        interval = max(save, math.sqrt(2 * save * between_failures) - save)
    return Run(days=hours / 24, gpu_hours=hours * request.world_size, save_seconds=save, interval=interval)
