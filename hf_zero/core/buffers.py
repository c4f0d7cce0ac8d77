"""Module buffers: rank 0's on all ranks, when a model is prepared and, where training changes them, at each step."""

from __future__ import annotations

import torch
from torch import nn

from hf_zero.comm.communicator import Communicator


class BufferSync:
    """Keeps the persistent buffers of a model (running statistics) as `DistributedDataParallel` keeps all buffers.

    The first forward after one that was to be followed by a reduction takes rank 0's values, so a step does so once.
    Which buffers a model changes cannot be known on all ranks alike without asking them all; what a state dict holds
    can. What it does not hold can be made again (rotary frequencies, masks), and is the same on all ranks.
    """

    def __init__(self, model: nn.Module, comm: Communicator, device: torch.device) -> None:
        self._comm, self._due = comm, True
        self._persistent: list[tuple[nn.Module, str]] = []
        everything = []
        for module in model.modules():
            for name, value in module._buffers.items():
                if value is not None:
                    module._buffers[name] = value = value.to(device)
                    everything.append(value)
                    if name not in module._non_persistent_buffers_set:
                        self._persistent.append((module, name))
        comm.broadcast_all(everything)

    def before_forward(self, reduces: bool) -> None:
        """Take rank 0's values, if there can be new ones. `reduces`: the gradients of this forward are reduced."""
        due, self._due = self._due, reduces and torch.is_grad_enabled()
        if due and self._persistent:
            with torch.no_grad():
                self._comm.broadcast_all([module.get_buffer(name) for module, name in self._persistent])
