"""Ways to train a model on a machine, each with its time, and the search for the fastest that fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from hf_zero.errors import ZeroConfigError
from hf_zero.planning.costs import Machine
from hf_zero.planning.model import PlanError
from hf_zero.planning.optimizers import kept_by
from hf_zero.planning.places import offloaded_places
from hf_zero.planning.plan import Request
from hf_zero.planning.progress import Tell
from hf_zero.planning.spread import ALL_RANKS, spreads
from hf_zero.planning.step_time import Pace, Way, time_step


_PLACED_STAGES = (2, 3)  # stage 1 keeps whole gradients beside what rests elsewhere, and sends no less than 2


def ways(model: nn.Module, request: Request) -> list[Way]:
    """Every stage, over all ranks and over nodes, with and without checkpointing, as the request leaves it open."""
    stages = (0, 1, 2, 3) if request.data_ranks > 1 else (0,)
    checkpointing = (False, True) if request.checkpointing is None else (request.checkpointing,)
    if request.checkpointing is None and not getattr(model, "supports_gradient_checkpointing", False):
        checkpointing = (False,)
    gpus = request.gpus // request.config.tp_size
    return [
        Way(
            config=request.config.replace(zero_stage=stage, node_size=request.gpus, **spread.settings),
            checkpointing=again,
            rows=request.batch.rows,
            accumulation=request.accumulation,
            spread=spread,
        )
        for again in checkpointing
        for stage in stages
        for spread in spreads(stage, request.nodes, gpus, request.accumulation)
    ]


def check_rates(request: Request, machine: Machine) -> None:
    """Raise PlanError where the configuration has state elsewhere and nobody knows how fast it comes from there."""
    config = request.config
    for device, needs in (("cpu", ("bus_rate", "host_rate")), ("nvme", ("bus_rate", "host_rate", "disk_rate"))):
        missing = [name for name in needs if not getattr(machine, name)]
        asked = device in (config.offload_optimizer_device, config.offload_param_device)
        if asked and missing and request.backend == "nccl":
            raise PlanError(
                f"the configuration keeps state on '{device}', and {machine.name} has no {' and no '.join(missing)}: "
                "add what you measure to a machine's file of your own (--machine FILE; disks: hf-zero doctor --disk)"
            )
        if asked and request.backend != "nccl":
            raise PlanError("--time knows offload beside GPUs only: leave the offload keys out for CPU ranks")


def compare(model: nn.Module, request: Request, machine: Machine, tell: Tell) -> list[Pace]:
    """The time of every way."""
    check_rates(request, machine)
    found, asked = [], ways(model, request)
    for number, way in enumerate(asked):
        tell(f"timing {way.label}", number + 1, len(asked))
        found.append(time_step(model, request, way, machine))
    return found


def fastest(model: nn.Module, request: Request, machine: Machine, tell: Tell, most_rows: int = 64) -> list[Pace]:
    """The time of every way that fits, each with as many rows per micro-batch as fit; the fastest first.

    Stages, nodes, codecs and checkpointing are tried in all combinations. The best of these, or what needs the least
    memory where none fits, is then tried with more and more ranks that share layers, as long as that helps, and with
    state in other places where memory is what limits the rows.
    """
    check_rates(request, machine)
    return _Search(model, request, machine, tell, most_rows).run()


class _Search:
    def __init__(self, model: nn.Module, request: Request, machine: Machine, tell: Tell, most_rows: int) -> None:
        self._model, self._request, self._machine, self._tell = model, request, machine, tell
        self._per_step = request.batch.rows * request.accumulation  # of each rank, where none share
        self._most = most_rows
        self._fitting: list[Pace] = []
        self._tried: list[Pace] = []

    def run(self) -> list[Pace]:
        asked = ways(self._model, self._request)
        for number, way in enumerate(asked):
            self._tell(f"searching {way.label}", number + 1, len(asked))
            self._try(way)
        self._share_layers()
        self._move_states()
        return sorted(self._fitting, key=lambda one: -one.tokens_per_second)

    def _seed(self) -> Pace:
        """The fastest so far, or what needs the least memory where nothing fits."""
        if self._fitting:
            return max(self._fitting, key=lambda one: one.tokens_per_second)
        return min(self._tried, key=lambda one: one.footprint.peak_bytes)

    def _try(self, way: Way, per_step: int | None = None) -> Pace:
        """With the most rows that fit; a step keeps its tokens. What does not fit with one row has the time of that.

        Several micro-batches need as much memory as two do.
        """
        per_step = per_step or self._per_step
        first = replace(way, rows=1, accumulation=min(2, per_step))
        pace = self._time(first)
        if pace.fits:
            rows = _most_rows(pace, self._request, min(per_step, self._most), per_step)
            while True:
                larger = replace(way, rows=rows, accumulation=per_step // rows)
                tried = pace if larger == first else self._time(larger)
                if tried.fits or rows == 1:
                    pace = tried
                    break
                rows = _divisor_below(per_step, rows)
        self._tried.append(pace)
        if pace.fits:
            self._fitting.append(pace)
        return pace

    def _time(self, way: Way) -> Pace:
        return time_step(self._model, self._request, way, self._machine)

    def _share_layers(self) -> None:
        seed = self._seed()
        for size in layer_shares(self._model, self._request):
            request = replace(self._request, config=self._request.config.replace(tp_size=size))
            spread = seed.way.spread
            if spread is not ALL_RANKS:  # ranks of a node are counted by what they hold
                gpus = request.gpus // size
                wanted = spreads(seed.way.config.zero_stage, request.nodes, gpus, request.accumulation)
                spread = next((one for one in wanted if one.name == spread.name), ALL_RANKS)
            stage = seed.way.config.zero_stage if request.data_ranks > 1 else 0
            config = request.config.replace(zero_stage=stage, node_size=request.gpus, **spread.settings)
            way = replace(seed.way, config=config, spread=spread)
            self._tell(f"searching {way.label}")
            try:
                pace = self._try(way, self._per_step * size)  # the same tokens over fewer batches at a time
            except (PlanError, ZeroConfigError):  # a model that cannot be shared so
                return
            if seed.fits and pace.tokens_per_second <= seed.tokens_per_second:
                return
            seed = max((seed, pace), key=lambda one: (one.fits, one.tokens_per_second))

    def _move_states(self) -> None:
        seed, machine, config = self._seed(), self._machine, self._request.config
        elsewhere = {config.offload_optimizer_device, config.offload_param_device} != {"none"}
        if elsewhere or self._request.backend != "nccl" or not (machine.bus_rate and machine.host_rate):
            return
        per_step = self._per_step * seed.way.config.tp_size
        if seed.fits and seed.way.rows == min(per_step, self._most):
            return  # more memory would change nothing
        if not machine.disk_rate:
            self._tell("leaving disks out: the machine's file has no disk_rate (hf-zero doctor --disk measures one)")
        ranks = self._request.world_size // seed.way.config.tp_size
        for stage in _PLACED_STAGES:
            for places in offloaded_places(stage, ranks, disk=bool(machine.disk_rate)):
                base = seed.way if stage == seed.way.config.zero_stage else replace(seed.way, spread=ALL_RANKS)
                plain = self._request.config.replace(tp_size=seed.way.config.tp_size, node_size=self._request.gpus)
                settings = {**base.spread.settings, **places.options(), "zero_stage": stage}
                way = replace(base, config=plain.replace(**settings), places=places)
                self._tell(f"searching {way.label}")
                pace = self._try(way, per_step)
                if pace.fits:
                    break  # farther away is slower


def layer_shares(model: nn.Module, request: Request) -> Iterable[int]:
    """Into how many parts layers may be shared out over ranks of a node; none where that is settled."""
    config = request.config
    text = model.config.get_text_config() if hasattr(model, "config") else None
    heads = [getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    if (
        config.is_set("tp_size")
        or max(config.tp_size, config.sp_size) > 1
        or not getattr(model, "tp_plan", None)
        or hasattr(model, "peft_config")
        or kept_by(request.optimizer).whole
        or max(config.tile_loss, config.tile_mlp)
    ):
        return []
    sizes = [2**power for power in range(1, request.gpus.bit_length())]
    return [size for size in sizes if not any(number % size for number in (request.gpus, *filter(None, heads)))]


def _most_rows(pace: Pace, request: Request, most: int, per_step: int) -> int:
    """How many rows would fit, by what one row's forward leaves: the largest divisor of a step's rows below that."""
    per_row = max(1, pace.footprint.activations)
    room = request.usable - pace.footprint.peak_bytes
    return max(rows for rows in range(1, most + 1) if per_step % rows == 0 and (rows - 1) * per_row <= max(0, room))


def _divisor_below(number: int, limit: int) -> int:
    return max((divisor for divisor in range(1, limit) if number % divisor == 0), default=1)
