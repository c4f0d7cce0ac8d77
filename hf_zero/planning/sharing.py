"""Ranks that share the computation of a micro-batch, in a plan: its layers (tensor parallelism) or its sequences."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.comm.process_groups import imagined_mesh
from hf_zero.comm.traffic import Traffic
from hf_zero.config import ZeroConfig
from hf_zero.core.engine import ZeroEngine
from hf_zero.core.sequence import SequenceGroup
from hf_zero.parallel.sequence_batches import cut
from hf_zero.parallel.tensor_parallel import share_out
from hf_zero.parallel.ulysses import Ulysses
from hf_zero.planning.enqueued import Enqueued, Move, Wait
from hf_zero.planning.remembered import is_composed, is_trial
from hf_zero.tools.operations import COLLECTIVES


# By the names of torch's operations: the kind of a move, and how often its ring passes each rank's share on.
_KINDS = {
    "all_reduce": ("all-reduce", 2),
    "allreduce_": ("all-reduce", 2),
    "all_gather_into_tensor": ("all-gather", 1),
    "reduce_scatter_tensor": ("reduce-scatter", 1),
}
# What makes a tensor of its own of a collective's result on the meta device, and elsewhere none.
_WRAPS = "_wrap_tensor_autograd"


class Sharing:
    """Nothing is shared: each rank computes all of its micro-batches.

    Attributes:
        model: what a rank computes.
        mixins: for the class of the prepared model.
        traffic: what a rank sends for it, apart from what the engine sends.
        name: what that is, for people.
    """

    mixins: tuple[type, ...] = ()
    name = ""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.traffic = Traffic()

    def join(self, engine: ZeroEngine) -> None:
        """The engine is made: its ranks are there."""

    def cut(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A rank's part of a batch."""
        return batch

    def noting(self) -> contextlib.AbstractContextManager[object]:
        """Inside, what the model sends by itself is counted."""
        return contextlib.nullcontext()


class SharedLayers(Sharing):
    """Each rank has a part of each matrix, and layers exchange activations by collectives of their own."""

    name = "tensor parallelism"

    def __init__(self, model: nn.Module, size: int, backend: str, log: Enqueued | None) -> None:
        super().__init__(model)
        self._moves = _LayerMoves(size, "nccl" if backend == "nccl" else "messages", self.traffic, log)

    def noting(self) -> contextlib.AbstractContextManager[object]:
        return self._moves


class SharedSequences(Sharing):
    """Each rank has a part of the tokens, and attention exchanges them for heads."""

    name = "sequences"

    def __init__(self, model: nn.Module, size: int) -> None:
        super().__init__(model)
        self._ulysses = Ulysses(size)
        self.mixins = (self._ulysses.adopt(model),)

    def join(self, engine: ZeroEngine) -> None:
        self._ulysses.group = SequenceGroup(engine.mesh, self._ulysses.size)
        self._ulysses.group.comm.traffic = self.traffic

    def cut(self, batch: dict[str, Any]) -> dict[str, Any]:
        return cut(batch, 0, self._ulysses.size)


@contextlib.contextmanager
def sharing(model: nn.Module, config: ZeroConfig, backend: str, log: Enqueued | None) -> Iterator[Sharing]:
    """How one rank computes its part of `model` (on meta), which stays as it is.

    Raises ZeroConfigError for models that cannot be shared so, and ValueError in a process that is a rank itself.
    """
    if config.tp_size > 1:
        with imagined_mesh(config.tp_size) as mesh:
            part = copy.deepcopy(model)
            share_out(part, mesh)
            yield SharedLayers(part, config.tp_size, backend, log)
    elif config.sp_size > 1:
        yield SharedSequences(copy.deepcopy(model), config.sp_size)
    else:
        yield Sharing(model)


def ranks_of_a_batch(config: ZeroConfig) -> int:
    """How many ranks compute with one micro-batch."""
    return config.tp_size * config.sp_size


class _LayerMoves(TorchDispatchMode):
    """Counts collectives that layers begin by themselves, and writes them down; the layer goes on with the result."""

    def __init__(self, size: int, by: str, traffic: Traffic, log: Enqueued | None) -> None:
        super().__init__()
        self._size, self._by, self._traffic, self._log = size, by, traffic, log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_composed(types):
            return NotImplemented
        if is_trial(types) or func.namespace not in COLLECTIVES:
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == _WRAPS:
            return args[0].detach()
        if name in _KINDS:
            given = args[0] if isinstance(args[0], Tensor) else args[0][0]
            self._note(*_KINDS[name], given)
        return func(*args, **(kwargs or {}))

    def _note(self, kind: str, passes: int, given: Tensor) -> None:
        to_each = given.nbytes if kind == "all-gather" else given.nbytes // self._size
        self._traffic.count(kind, passes * to_each * (self._size - 1))
        if self._log is not None:
            move = Move(kind, "a layer's activations", to_each, tuple(range(self._size)), "layers", self._by)
            self._log.events += [move, Wait(move)]
