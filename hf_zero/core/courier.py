"""Copies between a device and its host: gradients on their way down to masters, weights on their way up.

[Note: lanes] What goes down and what goes up has a lane each, on which a device copies while it computes. A copy
begins when everything is over that the device was told to do before it. What the device is told to do after it does
not wait, unless it is told to (`send`, `join`). On the host, copies go through a few pinned buffers in turn: pageable
memory would hold up the host for every copy, and to pin all state would take the system's memory for it.
"""

from __future__ import annotations

import functools
import logging
import mmap
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_zero.comm.work import Handle, Landing, OnChunk, Work


logger = logging.getLogger(__name__)

BUFFER_BYTES = 16 << 20  # of one copy: what a shelf of `SHELF_ELEMENTS` has in fp32
_BUFFERS = 4


class Courier(Protocol):
    """Brings values of tensors from the device to its host and back.

    Attributes:
        moved: bytes by "down" and "up".
        nbytes: host memory of its buffers.
        crosses: whether host and device have memory of their own.
    """

    moved: Counter[str]
    crosses: bool

    @property
    def nbytes(self) -> int: ...

    def down(self, values: Tensor, take: OnChunk, *, given: bool = False) -> None:
        """Have `take` called on the host with `values` as they are now: in order, by `land` at the latest.

        `take` is given a position in `values`, and what begins there, which is valid during the call only. `given`:
        nobody else uses their memory from here on.
        """

    def land(self) -> None:
        """Have everything that goes down arrive; blocks the host."""

    def up(self, target: Tensor, source: Tensor) -> None:
        """Have `target`, on the device, hold what the host has in `source` now: for `send`, or after `join`."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """The same for a source on the device: after what goes up to it."""

    def send(self, begin: Callable[[], Work]) -> Work:
        """Begin a collective of what came up; the device goes on beside it until the answer is waited for."""

    def join(self) -> None:
        """Have the device go on when everything that goes up has arrived."""

    def close(self) -> None:
        """Give the buffers back; does nothing when called again."""


class AtOnce:
    """Where host and device are the same: what would have a way to go is counted."""

    nbytes, crosses = 0, False

    def __init__(self) -> None:
        self.moved: Counter[str] = Counter()

    def down(self, values: Tensor, take: OnChunk, *, given: bool = False) -> None:
        self.moved["down"] += values.nbytes
        take(0, values)

    def land(self) -> None:
        """It has."""

    def up(self, target: Tensor, source: Tensor) -> None:
        self.moved["up"] += target.nbytes
        target.copy_(source)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def send(self, begin: Callable[[], Work]) -> Work:
        return begin()

    def join(self) -> None:
        """It is there."""

    def close(self) -> None:
        """There are no buffers."""


class Lanes(Protocol):
    """What copies (see [Note: lanes])."""

    def memory(self, nbytes: int) -> Tensor:
        """Bytes of the host that can be copied to and from while the host goes on."""

    def down(self, target: Tensor, source: Tensor) -> Handle:
        """Begin to copy to the host. When it is waited for, the host can read `target`."""

    def up(self, target: Tensor, source: Tensor) -> Handle:
        """Begin to copy to the device, or on it. When it is waited for, the host can write to `source`."""

    def send(self, begin: Callable[[], Work]) -> Work:
        """As `Courier.send`."""

    def join(self) -> None:
        """As `Courier.join`."""

    def close(self) -> None:
        """Give the memory back."""


@dataclass
class _UnderWay:
    """A copy that has one of the buffers."""

    buffer: Tensor
    handle: Handle
    source: Tensor | None = None  # on the device, whose memory nobody else may have before the copy is over
    finish: Callable[[], None] | None = None  # of a way down


class BufferedCourier:
    """Copies by lanes, through `count` buffers of the host that are taken in turn."""

    crosses = True

    def __init__(self, lanes: Lanes, nbytes: int = BUFFER_BYTES, count: int = _BUFFERS) -> None:
        self.moved: Counter[str] = Counter()
        self._lanes, self._size, self._count = lanes, nbytes, count
        self._free: list[Tensor] | None = None  # no memory before the first copy
        self._under_way: deque[_UnderWay] = deque()
        self._coming_down = 0

    @property
    def nbytes(self) -> int:
        return 0 if self._free is None else self._size * self._count

    def down(self, values: Tensor, take: OnChunk, *, given: bool = False) -> None:
        self.moved["down"] += values.nbytes
        values = values if given else values.clone()
        for at in range(0, values.numel(), self._size // values.itemsize):
            part = values[at : at + self._size // values.itemsize]
            buffer = self._buffer()
            target = _part(buffer, part)
            finish = functools.partial(take, at, target)
            self._under_way.append(_UnderWay(buffer, self._lanes.down(target, part), part, finish))
            self._coming_down += 1

    def land(self) -> None:
        while self._coming_down:
            self._finish_oldest()

    def up(self, target: Tensor, source: Tensor) -> None:
        self.moved["up"] += target.nbytes
        for at in range(0, target.numel(), self._size // target.itemsize):
            part = target[at : at + self._size // target.itemsize]
            buffer = self._buffer()
            staged = _part(buffer, part).copy_(source[at : at + part.numel()])
            self._under_way.append(_UnderWay(buffer, self._lanes.up(part, staged)))

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._lanes.up(target, source)

    def send(self, begin: Callable[[], Work]) -> Work:
        return self._lanes.send(begin)

    def join(self) -> None:
        self._lanes.join()

    def close(self) -> None:
        for one in self._under_way:
            one.handle.wait()
        self._under_way.clear()
        self._free, self._coming_down = None, 0
        self._lanes.close()

    def _buffer(self) -> Tensor:
        if self._free is None:
            with torch.inference_mode(False):
                self._free = list(self._lanes.memory(self._size * self._count).chunk(self._count))
        if not self._free:
            self._finish_oldest()
        return self._free.pop()

    def _finish_oldest(self) -> None:
        one = self._under_way.popleft()
        one.handle.wait()
        if one.finish is not None:
            self._coming_down -= 1
            one.finish()
        assert self._free is not None, "a copy has one of the buffers"
        self._free.append(one.buffer)


def _part(buffer: Tensor, like: Tensor) -> Tensor:
    """The beginning of a buffer as a tensor like another."""
    return buffer[: like.nbytes].view(like.dtype)


class CudaLanes:
    """Two streams of a CUDA device, made once: streams made again and again keep memory for each of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._pinned: list[Tensor] = []

    def memory(self, nbytes: int) -> Tensor:
        # Not torch's pinned memory, which comes in powers of two and is never given back.
        memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, 0)):
            logger.warning(
                "hf_zero: %d bytes of host memory could not be pinned, so copies to and from the device hold up the "
                "host: raise the limit (`ulimit -l unlimited`)",
                nbytes,
            )
        else:
            self._pinned.append(memory)
        return memory

    def down(self, target: Tensor, source: Tensor) -> Handle:
        return self._copy(self._down, target, source)

    def up(self, target: Tensor, source: Tensor) -> Handle:
        return self._copy(self._up, target, source)

    def _copy(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> Handle:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)
            return _Copied(stream.record_event())

    def send(self, begin: Callable[[], Work]) -> Work:
        # A collective waits for the stream that it is begun on.
        self._up.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._up):
            work = begin()
            here = self._up.record_event()
        return Work(Landing([work, _Reached(here, self._device)]))

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._up)

    def close(self) -> None:
        for memory in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        self._pinned.clear()


@dataclass
class _Copied:
    """A copy, for the host that waits for it."""

    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()


@dataclass
class _Reached:
    """A place on a stream, for the device that waits for it."""

    event: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)
