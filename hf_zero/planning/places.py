"""Where the sharded state of a planned row rests: on the device, in host memory or on disk."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

from hf_zero.core.placement import STAGES, Place, Placement


PLACES = {Place.DEVICE: "GPU", Place.HOST: "host memory", Place.DISK: "disk"}  # for people
_DEVICES = {Place.DEVICE: "none", Place.HOST: "cpu", Place.DISK: "nvme"}


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where optimizer state (masters included) and slices of weights rest; gradients go where the optimizer steps."""

    optimizer: Place = Place.DEVICE
    parameters: Place = Place.DEVICE

    def options(self) -> dict[str, object]:
        """What configures an engine so. No file is made by a plan, whatever folder is named."""
        folder = tempfile.gettempdir()
        return {
            "offload_optimizer_device": _DEVICES[self.optimizer],
            "offload_param_device": _DEVICES[self.parameters],
            "offload_optimizer_nvme_path": folder,
            "offload_param_nvme_path": folder,
        }


ON_DEVICE = Places()


def offloaded_places(stage: int, ranks: int, disk: bool) -> list[Places]:
    """What a stage could keep elsewhere, nearest first: sharded state only, and weights no nearer than their masters.

    Weights that rest on the device beside masters elsewhere are cast and uploaded once per step; weights elsewhere
    beside masters on the device would save nothing, as they are cast from the masters.
    """
    row = STAGES[stage]
    away = [Place.HOST, *([Place.DISK] if disk else [])]
    found = []
    for optimizer in away if row.optimizer is Placement.SHARDED else ():
        # One rank's slice is the whole: with all weights on its device, stage 3 is stage 2.
        if row.parameter is not Placement.SHARDED or ranks > 1:
            found.append(Places(optimizer=optimizer))
        if row.parameter is Placement.SHARDED:
            near = [place for place in away if place.distance <= optimizer.distance]
            found += [Places(optimizer=optimizer, parameters=place) for place in near]
    return found
