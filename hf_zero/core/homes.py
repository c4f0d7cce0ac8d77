"""Homes: where a rank's own slices rest between uses, and the shelves on which their tensors rest there.

[Note: open] Whoever touches the values of something that rests in a home opens its shelf: a step, a gather, a save, a
load, a change of structure, a write from outside. On the device, and in host memory, that costs nothing. Elsewhere the
values are brought into memory, and taken back when they were written; outside of `open` the tensors are *shells*: they
have the right shape and dtype, reading them gives nan, and writing raises. So nobody asks where anything rests, and
forgetting to open shows.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hf_zero.comm.communicator import Communicator
from hf_zero.config import ZeroConfig
from hf_zero.core.courier import AtOnce, BufferedCourier, Courier, CudaLanes
from hf_zero.core.direct_file import DirectFile
from hf_zero.core.disk_failures import DiskFailures, raise_anywhere
from hf_zero.core.disk_home import DiskHome
from hf_zero.core.grad_norm import ROW
from hf_zero.core.placement import Place
from hf_zero.core.step_place import StepPlace, measure
from hf_zero.errors import ZeroRuntimeError


# The most elements on one shelf away from the device: what an optimizer steps, and a disk moves, at one time; so many
# that steps and transfers cost nothing beside their work. Shelves begin at multiples of `ROW` of what is cut, so that
# vector instructions and the rows of the gradient norm fall as they would without a cut.
SHELF_ELEMENTS = 4 << 20
# Fewer elements than these are not worth a way to the disk: a request would carry less than 256 KiB.
LEAST_ON_DISK = 1 << 16
_HOST = torch.device("cpu")
_IN_FLIGHT = 8  # requests to one disk at a time, of all ranks beside each other


class Shelf(Protocol):
    """Flat tensors of one length that rest and travel together.

    `flats` holds, by kind, the objects that others know: they stay the same objects for good, whatever memory they
    have.
    """

    numel: int
    flats: dict[str, Tensor]

    def open(
        self, *, write: bool = False, kinds: Collection[str] | None = None, anew: bool = False
    ) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Inside, the flats (those of `kinds` at least) have their values; with `write`, what is left there is kept.

        `anew`: all values are about to be written, and what they are now does not matter. Scopes nest. Raises
        ZeroRuntimeError where the values cannot be read or written.
        """

    def begin_fetch(self) -> None:
        """A hint that the shelf will be opened soon; it may do nothing."""

    def add(self, kind: str, tensor: Tensor) -> None:
        """Take in a tensor, with its values, that was made or replaced since; call it inside `open(write=True)`."""

    def leave(self) -> None:
        """Give the room back: the shelf is not opened again."""


class Home(Protocol):
    """Somewhere to rest.

    Attributes:
        place: how far away it is.
        device: of the tensors, when they are open.
        is_near: the engine's device computes on what rests here; otherwise it works on copies.
        courier: brings gradients here from the device, and weights back.
        keeps_memory: open or not, tensors stay where they are.
        least, limit: elements that one shelf should, and may have; None: as many as there are.
    """

    place: Place
    device: torch.device
    is_near: bool
    courier: Courier
    keeps_memory: bool
    least: int
    limit: int | None

    def shelf(self, numel: int, flats: Mapping[str, Tensor]) -> Shelf:
        """Take over tensors of `numel` elements, which are on `device`, with their values."""

    def reserved(self, nbytes: int) -> AbstractContextManager[None]:
        """Have room for so much more inside; the file keeps it. Raises ZeroRuntimeError where there is none."""

    def held(self) -> Mapping[Place, int]:
        """Bytes that are in no tensor at rest, by place."""

    def close(self) -> None:
        """Give back what the home has besides its shelves; does nothing when called again."""


class MemoryHome:
    """Memory in which tensors rest as they are: of the device itself, or of the host."""

    keeps_memory, least = True, 0

    def __init__(
        self,
        place: Place,
        device: torch.device,
        *,
        is_near: bool = True,
        limit: int = SHELF_ELEMENTS,
        courier: Courier | None = None,
    ) -> None:
        self.place, self.device, self.is_near = place, device, is_near
        self.courier = courier or AtOnce()
        self.limit = None if place is Place.DEVICE else shelf_limit(limit)

    def shelf(self, numel: int, flats: Mapping[str, Tensor]) -> Shelf:
        return _MemoryShelf(numel, flats)

    def reserved(self, nbytes: int) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def held(self) -> Mapping[Place, int]:
        return {}

    def close(self) -> None:
        """Memory is its tensors' own."""


def shelf_limit(elements: int) -> int:
    """The most elements of a shelf where no more than about `elements` are wanted."""
    return min(SHELF_ELEMENTS, -(-elements // ROW) * ROW)


class _MemoryShelf:
    """Always open."""

    def __init__(self, numel: int, flats: Mapping[str, Tensor]) -> None:
        self.numel, self.flats = numel, dict(flats)

    @contextlib.contextmanager
    def open(
        self, *, write: bool = False, kinds: Collection[str] | None = None, anew: bool = False
    ) -> Iterator[Mapping[str, Tensor]]:
        yield self.flats

    def begin_fetch(self) -> None:
        """Nothing is to be fetched."""

    def add(self, kind: str, tensor: Tensor) -> None:
        self.flats[kind] = tensor

    def leave(self) -> None:
        self.flats = {}


class Assignment:
    """Says of elements that come one after another where each of them is to rest.

    A fixed part of what is gone through in the same order again and again is the best of all to keep near.

    Args:
        first: (count, home): so many elements rest there, in this order. Only what is to rest on disk has a choice.
        home: of all others.
        host: of pieces that are too small to be worth a way to the disk.
    """

    def __init__(self, first: Iterable[tuple[int, Home]], home: Home, host: Home) -> None:
        self._first = [(count, near) for count, near in first if near.place.distance < home.place.distance]
        self._home, self._host = home, host
        self.stays_near = home.place is Place.DEVICE  # all of it

    def cut(self, numel: int) -> Iterator[tuple[int, int, Home]]:
        """The next `numel` elements as ranges that each rest on one shelf of a home."""
        start = 0
        while start < numel:
            count, home = self._next(numel - start)
            step = home.limit or count
            for at in range(start, start + count, step):
                stop = min(at + step, start + count)
                yield at, stop, home if stop - at >= home.least else self._host
            start += count

    def _next(self, numel: int) -> tuple[int, Home]:
        """How many of `numel` elements that belong together rest in the same home, and in which."""
        while self._first:
            count, home = self._first[0]
            if count >= numel:
                self._first[0] = count - numel, home
                return numel, home
            del self._first[0]
            if count >= ROW:
                return count // ROW * ROW, home
        return numel, self._home


@dataclass(frozen=True, kw_only=True)
class Homes:
    """The homes of one engine.

    Attributes:
        device: the engine's own memory.
        optimizer: of master shards: fp32 weights and what the optimizer keeps for each of them.
        parameters: of slices of weights that are sharded and have no master near the device.
        host: of what stays in memory although the others of its kind are on disk. Its courier is that of all others
            that are not near.
        activations: of what gradient checkpoints keep; None: they stay where they are made.
        ratio: share of the masters that goes to the home of the optimizer; the first ones stay on the device.
        optimizer_in_host: elements of masters that the host keeps of what is to be on disk.
        step_place: where masters are stepped that are beside the device.
    """

    device: Home
    optimizer: Home
    parameters: Home
    host: Home
    activations: Home | None = None
    ratio: float = 1.0
    optimizer_in_host: int = 0
    step_place: StepPlace = field(default_factory=StepPlace)
    failures: DiskFailures = field(default_factory=DiskFailures, init=False)

    def __post_init__(self) -> None:
        disks = [home for home in self._all if isinstance(home, DiskHome)]
        self.failures.enabled = bool(disks)
        for home in disks:
            home.failures = self.failures

    @classmethod
    def on_device(cls, device: torch.device) -> Homes:
        """Everything stays on the device."""
        home = MemoryHome(Place.DEVICE, device)
        return cls(device=home, optimizer=home, parameters=home, host=home)

    @classmethod
    def choose(cls, config: ZeroConfig, device: torch.device, comm: Communicator) -> Homes:
        """As `config` says, for a rank with `device` that shares its disk with the others of its machine.

        A collective where anything is to rest on disk. Raises ZeroRuntimeError on all ranks where one of them can
        make no file in the folder that `config` names, and ValueError for a device that does not offload.
        """
        kinds = ("offload_optimizer", "offload_param", "offload_activations")
        devices = {kind: getattr(config, f"{kind}_device") for kind in kinds}
        if set(devices.values()) == {"none"}:
            return cls.on_device(device)
        on_device, courier = MemoryHome(Place.DEVICE, device), _courier(device)
        limit = config.sub_group_size
        host = MemoryHome(Place.HOST, _HOST, is_near=device.type == "cpu", limit=limit, courier=courier)
        paths = {kind: getattr(config, f"{kind}_nvme_path") for kind in kinds if devices[kind] == "nvme"}
        in_flight = max(2, _IN_FLIGHT // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        files = _open_files(dict.fromkeys(paths.values()), in_flight, comm)

        def home(kind: str) -> Home:
            if kind not in paths:
                return host if devices[kind] == "cpu" else on_device
            # Buffers of their own: what is read ahead of the one kind does not take those of the other.
            return DiskHome(files[paths[kind]], config.offload_buffer_count, host.limit, LEAST_ON_DISK, courier)

        return cls(
            device=on_device,
            optimizer=home("offload_optimizer"),
            parameters=home("offload_param"),
            host=host,
            activations=None if devices["offload_activations"] == "none" else home("offload_activations"),
            ratio=config.offload_optimizer_ratio,
            optimizer_in_host=config.offload_optimizer_max_in_cpu,
            step_place=StepPlace(config.offload_step if courier.crosses else "host"),
        )

    def masters(self, total: int | None = None) -> Assignment:
        """The homes of this rank's masters of `total` elements, in the order of units; None: none stays near."""
        near = 0 if total is None else round((1 - self.ratio) * total / ROW) * ROW
        return Assignment([(near, self.device), (self.optimizer_in_host, self.host)], self.optimizer, self.host)

    def matrix(self, numel: int) -> Home:
        """The home of the master of a whole matrix, or of a run, which rests on one shelf of whatever size."""
        return self.optimizer if numel and numel >= self.optimizer.least else self.host

    def weights(self) -> Assignment:
        """The homes of slices of weights that have no master near the device."""
        return Assignment((), self.parameters, self.host)

    # Asked again and again in a step, and always answered alike.
    @functools.cached_property
    def _all(self) -> set[Home]:
        return {self.device, self.optimizer, self.parameters, self.host, self.activations or self.device}

    @property
    def files(self) -> set[DirectFile]:
        """What moves bytes to disk and back."""
        return {home.file for home in self._all if isinstance(home, DiskHome)}

    @functools.cached_property
    def couriers(self) -> set[Courier]:
        return {home.courier for home in self._all}

    @property
    def buffer_bytes(self) -> int:
        """Host memory for what is open, read ahead or being written, or on its way between host and device."""
        return sum(home.held().get(Place.HOST, 0) for home in self._all) + sum(one.nbytes for one in self.couriers)

    def choose_step_place(self, comm: Communicator) -> None:
        """Settle where masters are stepped that are beside the device; a collective if that is to be measured."""
        if self.optimizer.courier.crosses:
            self.step_place.choose(comm, functools.partial(measure, self.optimizer.courier, self.device.device))

    def land(self) -> None:
        """Have all gradients arrive that are on their way to masters."""
        for courier in self.couriers:
            courier.land()

    def reserve(self, comm: Communicator, *, masters: int = 0, weights: int = 0) -> None:
        """Make sure of room for so many bytes more before they come; a collective where anything rests on disk.

        Raises ZeroRuntimeError on all ranks where the disk of one is full.
        """
        if not self.failures.enabled:
            return
        error = None
        try:
            with self.optimizer.reserved(masters), self.parameters.reserved(weights):
                comm.barrier()  # ranks on one disk have theirs at the same time
        except ZeroRuntimeError as caught:
            error = str(caught)
            comm.barrier()
        try:
            raise_anywhere(comm, error)
        except ZeroRuntimeError:
            self.close()
            raise

    @contextlib.contextmanager
    def one_pass(self, comm: Communicator) -> Iterator[None]:
        """Inside, what the disk of a rank fails at is kept, and raised on all ranks behind it: see `DiskFailures`."""
        with self.failures.one_pass(comm, self.device.device):
            yield

    def end_pass(self, comm: Communicator, *, together: bool, land: bool) -> None:
        """Raise ZeroRuntimeError on all ranks if the disk of one has failed; a collective if anything is on disk.

        Where ranks are not `together`, the next end of a pass does so. With `land`, gradients have arrived afterwards.
        """
        if land:
            self.land()
        if together:
            self.failures.end_pass(comm, self.device.device)
        self.failures.leave_pass()

    def close_apart(self) -> None:
        """Close in a thread: the garbage collector comes inside of anything, also a lock that ends of threads need."""
        _thread.start_new_thread(self.close, ())

    def close(self) -> None:
        for home in self._all:
            home.close()
        for courier in self.couriers:
            courier.close()


def _open_files(paths: Iterable[str], in_flight: int, comm: Communicator) -> dict[str, DirectFile]:
    """A file in each of these folders, on all ranks or on none; a collective where there are any."""
    files: dict[str, DirectFile] = {}
    error = None
    try:
        for path in paths:
            files[path] = DirectFile(path, in_flight=in_flight)
    except ZeroRuntimeError as caught:
        error = str(caught)
    try:
        if files or error is not None:
            raise_anywhere(comm, error)
    except ZeroRuntimeError:
        for file in files.values():
            file.close()
        raise
    return files


def _courier(device: torch.device) -> Courier:
    if device.type == "cpu":
        return AtOnce()
    if device.type == "cuda":
        return BufferedCourier(CudaLanes(device))
    raise ValueError(
        f"offload is available on CPU ranks and CUDA devices, not on {device.type} devices: set the "
        'offload_*_device options to "none", and use zero_stage 3, more ranks or gradient checkpointing to save memory'
    )
