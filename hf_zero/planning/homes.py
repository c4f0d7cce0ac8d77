"""Where sharded state may rest: on the device, in host memory or on disk. This version keeps all of it on the device.

Offload changes the home of a sharded thing and nothing else: which rank keeps which slice, and what is sent between
ranks, stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hf_zero.core.placement import STAGES, Placement


class Home(Enum):
    """A place for a rank's slices, from near to far."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    @property
    def distance(self) -> int:
        return list(Home).index(self)


@dataclass(frozen=True, kw_only=True)
class Homes:
    """Where optimizer state (masters included) and 16-bit weights rest; gradients go where the optimizer runs."""

    optimizer: Home = Home.DEVICE
    parameters: Home = Home.DEVICE

    def __str__(self) -> str:
        return f"optimizer: {self.optimizer.value}, parameters: {self.parameters.value}"


ON_DEVICE = Homes()


def offloaded_homes(stage: int, ranks: int, disk: bool) -> list[Homes]:
    """What a stage could keep elsewhere, nearest first: sharded state only, and weights no nearer than their masters.

    Weights that rest on the device beside masters elsewhere are cast and uploaded once per step; weights elsewhere
    beside masters on the device would save nothing, as they are cast from the masters.
    """
    row = STAGES[stage]
    places = [Home.HOST, *([Home.DISK] if disk else [])]
    found = []
    for optimizer in places if row.optimizer is Placement.SHARDED else ():
        # One rank's slice is the whole: with all weights on its device, stage 3 is stage 2.
        if row.parameter is not Placement.SHARDED or ranks > 1:
            found.append(Homes(optimizer=optimizer))
        if row.parameter is Placement.SHARDED:
            near = [home for home in places if home.distance <= optimizer.distance]
            found += [Homes(optimizer=optimizer, parameters=home) for home in near]
    return found
