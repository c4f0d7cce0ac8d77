"""Homes for an engine that trains without values: copies and a disk that are counted, and take no time."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from hf_zero.comm.work import Handle, Work
from hf_zero.config import ZeroConfig
from hf_zero.core.courier import AtOnce, BufferedCourier, Courier
from hf_zero.core.homes import LEAST_ON_DISK, Home, Homes, MemoryHome, Shelf, shelf_limit
from hf_zero.core.placement import Place
from hf_zero.core.step_place import StepPlace
from hf_zero.planning.enqueued import Behind, Enqueued, Move, Wait


META = torch.device("meta")
ELSEWHERE = "elsewhere"  # a category of the meter: bytes that are not the device's

OnBuffer = Callable[[list[Tensor], str], None]


class PlannedLanes:
    """Stand for the streams of a device; `on_buffer` is called with what exists only for a copy, which `log` notes."""

    def __init__(self, on_buffer: OnBuffer, log: Enqueued) -> None:
        self._on_buffer, self._log = on_buffer, log
        self._last: Move | None = None  # on its way up

    def memory(self, nbytes: int) -> Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=META)
        self._on_buffer([memory], ELSEWHERE)
        return memory

    def down(self, target: Tensor, source: Tensor) -> Handle:
        self._on_buffer([source], "transfers")
        return self._log.copy("download", source.nbytes, "bus")

    def up(self, target: Tensor, source: Tensor) -> Handle:
        copy = self._log.copy("upload", target.nbytes, "bus")
        self._last = copy.move
        return copy

    def send(self, begin: Callable[[], Work]) -> Work:
        if self._last is not None:
            self._log.events.append(Behind(self._last))
        return begin()

    def join(self) -> None:
        if self._last is not None:
            self._log.events.append(Wait(self._last))

    def close(self) -> None:
        """Nothing is kept."""


class PlannedDisk:
    """Stands for `DiskHome`; `moved` counts bytes as a `DirectFile` does, but for what is still in a buffer."""

    place, device, is_near, keeps_memory, least = Place.DISK, META, False, False, LEAST_ON_DISK

    def __init__(self, config: ZeroConfig, courier: Courier, on_buffer: OnBuffer, log: Enqueued) -> None:
        self.limit, self.courier, self.log = shelf_limit(config.sub_group_size), courier, log
        self.on_buffer: OnBuffer = on_buffer if courier.crosses else lambda tensors, category: None
        self.moved: Counter[str] = Counter()
        self._buffers = config.offload_buffer_count
        self.largest = 0  # bytes of a shelf
        self._recent: dict[_PlannedShelf, set[str]] = {}  # what buffers hold, the longest unused first

    def shelf(self, numel: int, flats: Mapping[str, Tensor]) -> _PlannedShelf:
        return _PlannedShelf(self, numel, flats)

    def reserved(self, nbytes: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def bring(self, shelf: _PlannedShelf, kinds: set[str]) -> set[str]:
        """Have some kinds of a shelf in a buffer; those that were not."""
        present = self._recent.pop(shelf, set())
        self._recent[shelf] = present | kinds
        while len(self._recent) > self._buffers:
            del self._recent[next(iter(self._recent))]
        return kinds - present

    def has(self, shelf: _PlannedShelf) -> bool:
        """Whether a shelf is in a buffer."""
        return shelf in self._recent

    def held(self) -> Mapping[Place, int]:
        return {Place.HOST: self._buffers * self.largest}

    def close(self) -> None:
        """There is no file."""


class _PlannedShelf:
    def __init__(self, home: PlannedDisk, numel: int, flats: Mapping[str, Tensor]) -> None:
        self._home, self.numel, self.flats, self._opened = home, numel, {}, 0
        self._fetched: Handle | None = None  # a read that was begun before it was needed
        self._shown: set[str] = set()
        self._changed: set[str] = set()
        with self.open(write=True):
            for kind, tensor in flats.items():
                self.add(kind, tensor)

    @contextlib.contextmanager
    def open(
        self, *, write: bool = False, kinds: Collection[str] | None = None, anew: bool = False
    ) -> Iterator[Mapping[str, Tensor]]:
        self._opened += 1
        wanted = self.flats.keys() & (self.flats if kinds is None else set(kinds))
        missing = self._home.bring(self, wanted)
        for kind in wanted - self._shown:
            values = torch.empty(self.numel, dtype=self.flats[kind].dtype, device=META)
            self._home.on_buffer([values], ELSEWHERE)
            self.flats[kind].data = values
            self._home.moved["read"] += values.nbytes if kind in missing and not anew else 0
            if kind in missing and not anew and self._fetched is None:
                self._home.log.copy("disk read", values.nbytes, "disk").wait()
        if self._fetched is not None:
            self._fetched.wait()
            self._fetched = None
        self._shown |= wanted
        self._changed |= wanted if write else set()
        try:
            yield self.flats
        finally:
            self._opened -= 1
            if not self._opened:
                self._close()

    def _close(self) -> None:
        written = sum(self.numel * self.flats[kind].itemsize for kind in self._changed)
        self._home.moved["write"] += written
        if written:
            self._home.log.copy("disk write", written, "disk")
        for flat in self.flats.values():
            flat.data = torch.empty(1, dtype=flat.dtype, device=META).expand(self.numel)
        self._shown.clear()
        self._changed.clear()

    def begin_fetch(self) -> None:
        nbytes = sum(self.numel * flat.itemsize for flat in self.flats.values())
        if self._fetched is None and not self._home.has(self):
            self._fetched = self._home.log.copy("disk read", nbytes, "disk")

    def add(self, kind: str, tensor: Tensor) -> None:
        self.flats[kind] = tensor
        self._home.bring(self, {kind})
        self._shown.add(kind)
        self._changed.add(kind)
        self._home.on_buffer([tensor], ELSEWHERE)
        nbytes = sum(self.numel * flat.itemsize for flat in self.flats.values())
        self._home.largest = max(self._home.largest, nbytes)

    def leave(self) -> None:
        self.flats = {}


class PlannedActivations:
    """Where inputs of checkpointed layers would rest: in `home`; `most` bytes at one time."""

    def __init__(self, home: Home, on_buffer: OnBuffer) -> None:
        self.home, self._on_buffer = home, on_buffer
        self.place, self.device, self.courier, self.limit = home.place, home.device, home.courier, home.limit
        self.is_near, self.keeps_memory, self.least = home.is_near, home.keeps_memory, home.least
        self.live = self.most = 0

    def shelf(self, numel: int, flats: Mapping[str, Tensor]) -> Shelf:
        self._on_buffer(list(flats.values()), ELSEWHERE)
        return _PlannedActivation(self, self.home.shelf(numel, flats), sum(flat.nbytes for flat in flats.values()))

    def count(self, nbytes: int) -> None:
        self.live += nbytes
        self.most = max(self.most, self.live)

    def reserved(self, nbytes: int) -> contextlib.AbstractContextManager[None]:
        return self.home.reserved(nbytes)

    def held(self) -> Mapping[Place, int]:
        return self.home.held()

    def close(self) -> None:
        self.home.close()


class _PlannedActivation:
    def __init__(self, home: PlannedActivations, shelf: Shelf, nbytes: int) -> None:
        self._home, self._shelf, self._nbytes = home, shelf, nbytes
        self.numel, self.flats = shelf.numel, shelf.flats
        self.open, self.begin_fetch, self.add = shelf.open, shelf.begin_fetch, shelf.add
        home.count(nbytes)

    def leave(self) -> None:
        self._home.count(-self._nbytes)
        self._shelf.leave()


def planned_homes(
    config: ZeroConfig,
    backend: str,
    on_buffer: OnBuffer,
    *,
    checkpointing: bool = False,
    log: Enqueued | None = None,
) -> Homes:
    """Where slices would rest, as `config` says; CPU ranks (gloo) have no device apart from the host.

    Without `checkpointing` no activations are elsewhere. Copies are noted in `log`.
    """
    log = log or Enqueued()
    near, is_cpu = MemoryHome(Place.DEVICE, META), backend == "gloo"
    courier: Courier = AtOnce() if is_cpu else BufferedCourier(PlannedLanes(on_buffer, log))
    host = MemoryHome(Place.HOST, META, is_near=is_cpu, limit=config.sub_group_size, courier=courier)

    def home(where: str) -> Home:
        return {"none": near, "cpu": host}.get(where) or PlannedDisk(config, courier, on_buffer, log)

    where = config.offload_activations_device if checkpointing else "none"
    return Homes(
        device=near,
        optimizer=home(config.offload_optimizer_device),
        parameters=home(config.offload_param_device),
        host=host,
        activations=None if where == "none" else PlannedActivations(home(where), on_buffer),
        ratio=config.offload_optimizer_ratio,
        optimizer_in_host=config.offload_optimizer_max_in_cpu,
        step_place=StepPlace("device" if config.offload_step == "device" and not is_cpu else "host"),
    )
