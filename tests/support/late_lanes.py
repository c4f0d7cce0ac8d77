"""In the place of a device's streams: copies that come late, and whose targets are poison until they do.

Nothing is copied before somebody waits for it, so what is read too early is nan, and a source that is used again too
early is copied as it is by then.
"""

import functools
import math
from collections import deque

import torch

from hf_zero.comm.work import Landing, Work
from hf_zero.core.courier import BufferedCourier
from hf_zero.core.direct_file import DirectFile
from hf_zero.core.disk_home import DiskHome
from hf_zero.core.homes import Homes, MemoryHome
from hf_zero.core.placement import Place
from hf_zero.core.step_place import StepPlace


class _Lane:
    """Copies in the order in which they were asked for."""

    def __init__(self):
        self._left = deque()
        self._begun = 0

    def copy(self, target, source):
        with torch.no_grad():
            target.view(-1).fill_(math.nan)
        self._left.append((target, source))
        self._begun += 1
        return _Waits(functools.partial(self._run, self._begun))

    def run(self):
        self._run(self._begun)

    def _run(self, until):
        while self._begun - len(self._left) < until:
            target, source = self._left.popleft()
            with torch.no_grad(), torch.inference_mode(False):
                target.copy_(source)


class _Waits:
    def __init__(self, wait):
        self.wait = wait


class LateLanes:
    """`memory_given` counts the bytes of the host's buffers, `closed` how often they were given back."""

    def __init__(self):
        self._down, self._up = _Lane(), _Lane()
        self.memory_given = self.closed = 0

    def memory(self, nbytes):
        self.memory_given += nbytes
        return torch.zeros(nbytes, dtype=torch.uint8)

    def down(self, target, source):
        return self._down.copy(target, source)

    def up(self, target, source):
        return self._up.copy(target, source)

    def send(self, begin):
        self.join()  # a collective on a device waits for the stream that it was begun on
        return Work(Landing([begin()]))

    def join(self):
        self._up.run()

    def close(self):
        self.closed += 1


def late_homes(parameters=Place.HOST, ratio=1.0, folder=None, limit=1024, lanes=None, step="host"):
    """Master shards in a host's memory, or on its disk in `folder`, that a device reaches by copies only.

    `parameters` says where slices of weights are.
    """
    cpu = torch.device("cpu")
    # Small buffers, which have to be used again and again.
    courier = BufferedCourier(lanes or LateLanes(), nbytes=1024, count=3)
    device = MemoryHome(Place.DEVICE, cpu)
    host = MemoryHome(Place.HOST, cpu, is_near=False, limit=limit, courier=courier)
    away = host if folder is None else DiskHome(DirectFile(folder, in_flight=2), 3, limit, 1, courier)
    weights = {Place.DEVICE: device, Place.HOST: host, Place.DISK: away}[parameters]
    return Homes(device=device, optimizer=away, parameters=weights, host=host, ratio=ratio, step_place=StepPlace(step))
