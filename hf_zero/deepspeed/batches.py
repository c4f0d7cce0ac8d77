"""The batch sizes of a DeepSpeed JSON: which two decide the third, and what a rank is fed."""

from collections.abc import Callable
from typing import NamedTuple

from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from hf_zero.config import ZeroConfig, values
from hf_zero.config.consistency import check_consistency, config_claims
from hf_zero.errors import ZeroConfigError
from hf_zero.integrations.plain_checkpoints import LoopEngine


class BatchSizes(NamedTuple):
    """Samples per rank and micro-batch, micro-batches per step, samples per step over all ranks."""

    micro: int
    accumulation: int
    total: int


def resolve(config: ZeroConfig, world_size: int) -> BatchSizes:
    """Find the sizes that the JSON leaves out, as DeepSpeed does.

    Raises ZeroConfigError where they contradict each other or do not say enough.
    """
    written = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    total, micro, accumulation = (None if values.is_auto(value) else value for value in written)
    if total is None and micro is None:
        raise ZeroConfigError("write train_micro_batch_size_per_gpu or train_batch_size as a number: nothing says it")
    check_consistency(config_claims(config), world_size=world_size)
    if micro is None:
        micro = _divide(total, (accumulation or 1) * world_size, "gradient_accumulation_steps x ranks")
    if total is not None and accumulation is None:
        accumulation = _divide(total, micro * world_size, "micro-batch x ranks")
    return BatchSizes(micro, accumulation or 1, micro * (accumulation or 1) * world_size)


def _divide(total: int, parts: int, what: str) -> int:
    if total % parts:
        raise ZeroConfigError(f"train_batch_size is {total}, which is no multiple of {what} = {parts}: change one")
    return total // parts


def make_loader(dataset: Dataset, micro: int, engine: LoopEngine, collate_fn: Callable | None) -> DataLoader:
    """Shuffled micro-batches of this rank's share, by `loader.data_sampler`.

    Raises TypeError for a dataset without a length.
    """
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"training_data is a {type(dataset).__name__}, without a length: give each rank a DataLoader")
    ranks = engine.mesh.world  # those that share layers have the same samples
    sampler = DistributedSampler(dataset, ranks.world_size, ranks.rank)
    on_device = engine.device.type != "cpu"
    loader = DataLoader(dataset, micro, sampler=sampler, collate_fn=collate_fn, pin_memory=on_device)
    loader.data_sampler = sampler  # DeepSpeed's name
    return loader
