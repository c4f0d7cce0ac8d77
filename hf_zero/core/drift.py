"""Parameters that all tensor-parallel ranks hold whole: each rank steps its own copy, and they must stay the same."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_zero.core.engine import ZeroEngine
from hf_zero.core.flat_buffer import FlatBuffer
from hf_zero.core.master import MASTER, MasterShard


logger = logging.getLogger(__name__)


def mend(engine: ZeroEngine) -> list[str]:
    """Give such parameters the first rank's values where they differ, with a warning; a collective between steps.

    Returns their names. Gradients of them are made by the same operations on the same numbers, so that a difference
    comes from kernels that are not deterministic, or from outside. Optimizer states are left as they are.
    """
    if engine.mesh.tensor is None:
        return []
    engine.settle()
    width = engine.mesh.tensor.world_size
    found: dict[int, Counter[str]] = defaultdict(Counter)  # by tensor-parallel rank: sums of whole parameters
    for rank, sums in enumerate(engine.comm.all_gather_object(_sums(engine))):
        found[rank % width].update(sums)
    drifted = sorted(name for name in found[0] if any(found[rank][name] != found[0][name] for rank in found))
    if drifted:
        if engine.comm.rank == 0:
            logger.warning(
                "hf_zero: %d parameters that all tensor-parallel ranks hold ('%s' first) were not the same on all of "
                "them: they now have the first rank's values",
                len(drifted),
                drifted[0],
            )
        engine.before_load()
        for buffer in engine.buffers:
            if buffer.trainable and not set(drifted).isdisjoint(buffer.names):
                _take_first(buffer, drifted)
        engine.after_load()
    return drifted


def _sums(engine: ZeroEngine) -> dict[str, int]:
    """Of what this rank keeps of each such parameter, the sum of the elements' bits as integers."""
    sums: Counter[str] = Counter()
    for buffer in engine.buffers:
        for shard in buffer.resting.flats if buffer.trainable else ():
            with shard.open(kinds=(MASTER,)):
                for span in shard.spans():
                    if buffer.parts[span.index].ranges is None:
                        values = shard.values[span.offset : span.offset + span.numel]
                        bits = values.view(torch.int32 if values.itemsize == 4 else torch.int64)
                        sums[buffer.names[span.index]] += int(bits.sum(dtype=torch.int64).item())
    return dict(sums)


def _take_first(buffer: FlatBuffer, names: list[str]) -> None:
    """Have the first tensor-parallel rank's masters of some parameters; a collective."""
    assert buffer.mesh.tensor is not None
    whole = buffer.gather_flat(_masters(buffer), buffer.master_dtype)
    for index, name in enumerate(buffer.names):
        if name in names:
            buffer.mesh.tensor.broadcast(whole[index])
    for shard in buffer.resting.flats:
        with shard.open(write=True, kinds=(MASTER,)):
            for span in shard.spans():
                if buffer.names[span.index] in names:
                    values = whole[span.index].view(-1)[span.start : span.start + span.numel]
                    shard.values[span.offset : span.offset + span.numel] = values


def _masters(buffer: FlatBuffer) -> Iterator[tuple[MasterShard, Tensor]]:
    for shard in buffer.resting.flats:
        with shard.open(kinds=(MASTER,)):
            yield shard, shard.values
