"""Where masters in a host's memory are stepped: by the host, or streamed through the device, whichever is faster.

Either way the numbers of a step are those of the optimizer's kernels there, which round differently: so the place is
chosen once, the same on all ranks, and a resumed run keeps it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.comm.communicator import Communicator
from hf_zero.core.courier import Courier


logger = logging.getLogger(__name__)

_ELEMENTS = 4 << 20  # of what is measured: those of a large shard
# Bytes of an element that AdamW's step moves: fp32 weight and two moments, and the gradient that it needs.
_DOWN, _UP = 12, 16


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a rank can do in a second: bytes of copies each way, elements that its host steps."""

    down: float
    up: float
    host: float

    @property
    def device_is_faster(self) -> bool:
        """Whether the bus brings AdamW's state there and back, at the same time, before the host has stepped it."""
        return max(_UP / self.up, _DOWN / self.down) < 1 / self.host


class StepPlace:
    """Says where the masters of one engine are stepped.

    Attributes:
        on_device: whether the device does it.
        is_chosen: whether that is settled.
    """

    def __init__(self, wanted: str = "host") -> None:
        self._wanted = wanted
        self.on_device = wanted == "device"
        self.is_chosen = wanted != "auto"

    def choose(self, comm: Communicator, measure: Callable[[], Rates]) -> None:
        """Settle it by what rank 0 measures, if it is to be measured; a collective then."""
        if self.is_chosen:
            return
        rates = measure() if comm.rank == 0 else None
        rates = comm.all_gather_object(rates)[0]
        assert rates is not None, "rank 0 has measured"
        self.is_chosen, self.on_device = True, rates.device_is_faster
        if comm.rank == 0:
            logger.info(
                "hf_zero: offloaded states are stepped on the %s: the host steps %.2e elements/s, copies go down at "
                "%.1f and up at %.1f GB/s (offload_step says otherwise)",
                self.name,
                rates.host,
                rates.down / 1e9,
                rates.up / 1e9,
            )

    @property
    def name(self) -> str:
        return "device" if self.on_device else "host"

    def resume(self, name: str, *, warns: bool) -> None:
        """Go on as a run that stepped on `name`, unless the configuration says where."""
        if self._wanted == "auto":
            self.is_chosen, self.on_device = True, name == "device"
        elif name != self._wanted and warns:
            logger.warning(
                "hf_zero: the saved run stepped offloaded states on the %s, and offload_step is '%s': the numbers of "
                "its steps are rounded differently from here on",
                name,
                self._wanted,
            )


def measure(courier: Courier, device: torch.device) -> Rates:
    """Copy the size of a large shard each way, and step it on the host."""
    there = torch.zeros(_ELEMENTS, device=device)
    here = torch.zeros(_ELEMENTS)
    weight = torch.nn.Parameter(torch.zeros(_ELEMENTS))
    weight.grad = torch.ones(_ELEMENTS)
    optimizer = torch.optim.AdamW([weight], fused=True)

    def put(at: int, part: Tensor) -> None:
        here[at : at + part.numel()] = part

    def go_down(numel: int = _ELEMENTS) -> None:
        courier.down(there[:numel], put)
        courier.land()

    def go_up() -> None:
        courier.up(there, here)
        courier.join()
        go_down(1)  # behind it

    found = {}
    for _ in range(2):  # the first takes memory
        for name, action in (("down", go_down), ("up", go_up), ("host", optimizer.step)):
            began = time.perf_counter()
            action()
            found[name] = time.perf_counter() - began
    courier.moved.clear()  # these were no training
    nbytes = here.nbytes
    return Rates(down=nbytes / found["down"], up=nbytes / found["up"], host=_ELEMENTS / found["host"])
