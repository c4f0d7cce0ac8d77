"""Homes for an engine that trains without values: a disk whose tensors have memory only while they are open."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from hf_zero.config import ZeroConfig
from hf_zero.core.homes import LEAST_ON_DISK, Home, Homes, MemoryHome, shelf_limit
from hf_zero.core.placement import Place


META = torch.device("meta")


class PlannedDisk:
    """Stands for `DiskHome`."""

    place, device, is_near, keeps_memory, least = Place.DISK, META, False, False, LEAST_ON_DISK

    def __init__(self, config: ZeroConfig) -> None:
        self.limit = shelf_limit(config.sub_group_size)
        self._buffers = config.offload_buffer_count
        self.largest = 0  # bytes of a shelf

    def shelf(self, numel: int, flats: Mapping[str, Tensor]) -> _PlannedShelf:
        return _PlannedShelf(self, numel, flats)

    def reserved(self, nbytes: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def held(self) -> Mapping[Place, int]:
        return {Place.HOST: self._buffers * self.largest}

    def close(self) -> None:
        """There is no file."""


class _PlannedShelf:
    def __init__(self, home: PlannedDisk, numel: int, flats: Mapping[str, Tensor]) -> None:
        self._home, self.numel, self.flats, self._opened = home, numel, {}, 0
        with self.open(write=True):
            for kind, tensor in flats.items():
                self.add(kind, tensor)

    @contextlib.contextmanager
    def open(
        self, *, write: bool = False, kinds: Collection[str] | None = None, anew: bool = False
    ) -> Iterator[Mapping[str, Tensor]]:
        self._opened += 1
        for kind in self.flats if kinds is None else self.flats.keys() & set(kinds):
            if self.flats[kind].untyped_storage().nbytes() < self.numel:
                self.flats[kind].data = torch.empty(self.numel, dtype=self.flats[kind].dtype, device=META)
        try:
            yield self.flats
        finally:
            self._opened -= 1
            if not self._opened:
                for flat in self.flats.values():
                    flat.data = torch.empty(1, dtype=flat.dtype, device=META).expand(self.numel)

    def begin_fetch(self) -> None:
        """Nothing takes time."""

    def add(self, kind: str, tensor: Tensor) -> None:
        self.flats[kind] = tensor
        nbytes = sum(self.numel * flat.itemsize for flat in self.flats.values())
        self._home.largest = max(self._home.largest, nbytes)

    def leave(self) -> None:
        self.flats = {}


def planned_homes(config: ZeroConfig, backend: str) -> Homes:
    """Where slices would rest: as `config` says on CPU ranks; devices of other kinds keep all of them so far."""
    near = MemoryHome(Place.DEVICE, META)
    if backend != "gloo":
        return Homes.on_device(META)
    host = MemoryHome(Place.HOST, META, limit=config.sub_group_size)

    def home(where: str) -> Home:
        return {"none": near, "cpu": host}.get(where) or PlannedDisk(config)

    return Homes(
        device=near,
        optimizer=home(config.offload_optimizer_device),
        parameters=home(config.offload_param_device),
        host=host,
        ratio=config.offload_optimizer_ratio,
        optimizer_in_host=config.offload_optimizer_max_in_cpu,
    )
