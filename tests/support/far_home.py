"""A home far from the device, in memory: what is not open reads nan, what was open is nan afterwards."""

import contextlib
import math

import torch

from hf_zero.core.courier import AtOnce
from hf_zero.core.direct_file import DirectFile
from hf_zero.core.disk_home import DiskHome
from hf_zero.core.homes import Homes, MemoryHome
from hf_zero.core.placement import Place


class FarHome:
    """Keeps copies, as a disk or another device's memory does, and lets nobody read through an alias.

    `opened` and `written` count how many elements were brought here and taken back.
    """

    is_near = keeps_memory = False
    least = 1

    def __init__(self, place=Place.HOST, limit=1024):
        self.place, self.device, self.limit, self.courier = place, torch.device("cpu"), limit, AtOnce()
        self.opened = self.written = 0
        self.shelves = 0  # that have not left
        self.most_open = self.now_open = 0

    def shelf(self, numel, flats):
        assert numel  # slices are cut at the limit; matrices, and runs of unequal shares, are not
        self.shelves += 1
        return _FarShelf(self, numel, flats)

    def reserved(self, nbytes):
        return contextlib.nullcontext()

    def held(self):
        return {}

    def close(self):
        """Nothing is kept but memory."""


class _FarShelf:
    def __init__(self, home, numel, flats):
        self.home, self.numel, self.flats = home, numel, {}
        self._kept, self._depth, self._writes, self._shown = {}, 0, False, set()
        with self.open(write=True):
            for kind, tensor in flats.items():
                self.add(kind, tensor)

    @contextlib.contextmanager
    def open(self, *, write=False, kinds=None, anew=False):
        if not self._depth:
            self.home.now_open += 1
            self.home.most_open = max(self.home.most_open, self.home.now_open)
        self._depth += 1
        for kind in set(self.flats if kinds is None else kinds) & self.flats.keys() - self._shown:
            with torch.inference_mode(False):
                kept = self._kept[kind]
                self.flats[kind].data = torch.full_like(kept, math.nan) if anew else kept.clone()
            self._shown.add(kind)
            self.home.opened += 0 if anew else self.numel
        self._writes = self._writes or write
        try:
            yield self.flats
        finally:
            self._depth -= 1
            if not self._depth:
                self.home.now_open -= 1
                self._close()

    def _close(self):
        for kind in self._shown:
            values = self.flats[kind].detach()
            if self._writes:
                self._kept[kind] = values.clone()
                self.home.written += self.numel
            with torch.no_grad(), torch.inference_mode(False):
                values.fill_(math.nan)
                self.flats[kind].data = torch.full((), math.nan, dtype=values.dtype).expand(values.shape)
        self._shown.clear()
        self._writes = False

    def begin_fetch(self):
        """It is fetched when it is opened."""

    def add(self, kind, tensor):
        assert self._depth and tensor.numel() == self.numel, (kind, tensor.shape)
        self.flats[kind] = tensor
        self._shown.add(kind)
        self._writes = True

    def leave(self):
        assert not self._depth
        self.home.shelves -= 1
        self._kept.clear()


def far_homes(limit=1024, parameters=True, ratio=1.0):
    """Master shards, and with `parameters` slices of weights, away from the device."""
    device, far = MemoryHome(Place.DEVICE, torch.device("cpu")), FarHome(limit=limit)
    return Homes(device=device, optimizer=far, parameters=far if parameters else device, host=device, ratio=ratio)


def disk_homes(folder, limit=1024, parameters=True):
    """All of it in an unnamed file in `folder`."""
    device = MemoryHome(Place.DEVICE, torch.device("cpu"))
    disk = DiskHome(DirectFile(folder, in_flight=2), 3, limit)
    return Homes(device=device, optimizer=disk, parameters=disk if parameters else device, host=device)


def host_homes():
    """Master shards in host memory, which CPU ranks compute in."""
    device = MemoryHome(Place.DEVICE, torch.device("cpu"))
    host = MemoryHome(Place.HOST, torch.device("cpu"))
    return Homes(device=device, optimizer=host, parameters=host, host=host)
