"""The part of `ZeroAccelerator` for batches that several ranks share: loaders, attention, what is counted.

Ranks that share sequences are neighbours and read the same samples. To the engine they are data-parallel ranks: state
is shared out over all ranks, and gradients are averaged over all, as FSDP does for accelerate's context parallelism
and DeepSpeed for Ulysses. A rank's loss is its part of the whole times the number of ranks that share the sequence, so
that this average is a sum over the sequence and a mean over the data.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hf_zero.comm.process_groups import named_mesh
from hf_zero.comm.work import Tag
from hf_zero.config import ZeroConfig
from hf_zero.core.engine import ZeroEngine
from hf_zero.core.sequence import SequenceGroup
from hf_zero.errors import ZeroConfigError
from hf_zero.parallel.sequence_batches import CuttingCollator, cut
from hf_zero.parallel.ulysses import Ulysses


if TYPE_CHECKING:
    from hf_zero.integrations.accelerate import ZeroPlugin


RING_DEVICES = {"cuda", "xpu", "hpu"}  # that torch has ring attention for


class SequenceAccelerator(Accelerator):
    """What `ZeroAccelerator` does differently where several ranks share each sequence; else nothing."""

    zero_plugin: ZeroPlugin
    _ulysses: Ulysses | None = None
    _sequence: SequenceGroup | None = None  # this rank's, once a model was prepared
    _one_of_each_group = False  # whether `gather` leaves out what other ranks of a sequence group have too

    @property
    def ranks_of_a_sequence(self) -> int:
        """How many ranks share each sequence, by Ulysses or by torch's context parallelism."""
        config = self.zero_plugin.config
        return config.sp_size * config.cp_size

    @property
    def ranks_of_a_batch(self) -> int:
        """How many ranks have the same samples at a time."""
        return ranks_of_a_batch(self.zero_plugin.config)

    @property
    def data_ranks(self) -> int:
        """How many different batches the ranks have at a time."""
        return self.num_processes // self.ranks_of_a_batch

    def _share_batches(self, given: ParallelismConfig | None) -> None:
        """Arrange the ranks as the configuration says. Raises ZeroConfigError where they cannot be."""
        config = self.zero_plugin.config
        size = self.ranks_of_a_batch
        data = 1 if given is None else given.dp_replicate_size * given.dp_shard_size
        if data > 1 and data * size != self.num_processes:
            raise ZeroConfigError(
                f"ParallelismConfig: the product of all its sizes is {data * size}, but "
                f"there are {self.num_processes} ranks: leave the dp sizes out, or make the product that number"
            )
        if size == 1:
            return
        name = next(name for name in ("sp_size", "cp_size", "tp_size") if getattr(config, name) > 1)
        if self.num_processes % size:
            fits = [divisor for divisor in range(1, self.num_processes + 1) if self.num_processes % divisor == 0]
            raise ZeroConfigError(
                f"{name} is {size} ({config.where(name)}), but there are {self.num_processes} ranks: set it to one of "
                f"{', '.join(map(str, fits))}"
            )
        if self.dispatch_batches:
            raise ZeroConfigError(
                f"{name} is {size}, but dispatch_batches is on, by which rank 0 hands out rows of a batch, and ranks "
                "that share a batch need the same rows: set dispatch_batches to False"
            )
        self.dataloader_config.dispatch_batches = False
        if config.cp_size > 1 and self.device.type not in RING_DEVICES:
            raise ZeroConfigError(
                f"cp_size is {size} ({config.where(name)}), but torch's ring attention (context_parallel) has no "
                "kernel for CPUs. Set cp_size to 1 and sp_size to this number: Ulysses runs on CPUs, too"
            )
        sizes = {name: getattr(config, name) for name in ("sp_size", "cp_size", "tp_size")}
        handler = None if given is None else given.cp_handler
        described = ParallelismConfig(
            dp_replicate_size=1,
            dp_shard_size=self.data_ranks,
            cp_backend="torch",
            sp_backend="deepspeed",
            cp_handler=handler,
            **sizes,
        )
        if config.sp_size > 1:
            described.sp_backend, described.sp_handler = "hf_zero", None  # type: ignore[assignment]
        else:
            shared = {name.removesuffix("_size"): size}
            mesh = named_mesh(self.device.type, {"dp_shard": self.data_ranks, **shared})
            described.device_mesh = self.state.device_mesh = mesh
        self.state.parallelism_config = described

    # -- models -----------------------------------------------------------------------------------------------------

    def _sequence_mixins(self, model: nn.Module) -> tuple[type, ...]:
        """What the class of a model gets that is to be called with parts of sequences."""
        size = self.zero_plugin.config.sp_size
        if size == 1:
            return ()
        self._ulysses = self._ulysses or Ulysses(size)
        return (self._ulysses.adopt(model),)

    def _join_sequences(self, engine: ZeroEngine) -> None:
        """Have the ranks of a sequence exchange among themselves; a collective with the first model."""
        if self.ranks_of_a_sequence > 1 and self._sequence is None:
            self._sequence = SequenceGroup(engine.mesh, self.ranks_of_a_sequence)
            if self._ulysses is not None:
                self._ulysses.group = self._sequence

    def mean_over_sequence(self, value: Tensor) -> Tensor:
        """The mean of a number over the ranks that share a sequence (fp64); a collective."""
        assert self._sequence is not None, "a model was prepared"
        return self._sequence.add(value.detach().double().view(1))[0] / self._sequence.size

    def whole_sequences(self, part: Tensor, dim: int = 1) -> Tensor:
        """What all ranks of a sequence have of it, one part after another along `dim` (tokens); a collective."""
        tag = Tag("results of a sequence")
        return part if self._sequence is None else self._sequence.whole(part, tag, dim)

    # -- batches ----------------------------------------------------------------------------------------------------

    def cut_sequences(self, batch: Any) -> dict[str, Any]:
        """This rank's part of a batch that does not come from a prepared dataloader: see `sequence_batches.cut`."""
        size = self.zero_plugin.config.sp_size
        return cut(batch, self.process_index % size, size)

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **kwargs: Any) -> DataLoader:
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        size = self.zero_plugin.config.sp_size
        if size > 1 and not isinstance(prepared.collate_fn, CuttingCollator):
            collate = CuttingCollator(prepared.collate_fn, self.process_index % size, size)
            for loader in (prepared, getattr(prepared, "base_dataloader", prepared)):
                loader.collate_fn = collate
        return prepared

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Prepared dataloaders give parts of sequences already."""
        return dl

    def _prepare_device_mesh(self) -> Any:
        """What dataloaders look at: ranks with one place in "dp_shard" get the same samples."""
        if self.ranks_of_a_batch == 1 or self.zero_plugin.config.cp_size > 1:
            return super()._prepare_device_mesh()
        sizes = {"dp_shard": self.data_ranks, "cp": self.ranks_of_a_batch}
        return _Sizes({name: SimpleNamespace(size=lambda size=size: size) for name, size in sizes.items()})

    def prepare_scheduler(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> AcceleratedScheduler:
        prepared = super().prepare_scheduler(scheduler)
        if self.ranks_of_a_batch == 1 or prepared.split_batches or not isinstance(prepared, AcceleratedScheduler):
            return prepared
        self._schedulers[-1] = _DataScheduler(prepared, self.data_ranks)
        return self._schedulers[-1]

    # -- results ----------------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        gathered = super().gather(tensor)
        if not self._one_of_each_group:
            return gathered
        ranks, size = self.num_processes, self.ranks_of_a_batch

        def first_of_each(together: Tensor) -> Tensor:
            by_rank = together.view(ranks // size, size, -1, *together.shape[1:])
            return by_rank[:, 0].flatten(0, 1)

        return recursively_apply(first_of_each, gathered)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As accelerate's; what has one row for each sample comes once from all ranks that share the samples.

        Scalars come from every rank: counts of tokens are different on each.
        """
        scalar = isinstance(input_data, Tensor) and input_data.dim() == 0
        if self.ranks_of_a_batch == 1 or scalar:
            return super().gather_for_metrics(input_data, use_gather_object)
        if isinstance(input_data, list) and self.process_index % self.ranks_of_a_batch:
            input_data = []  # objects are put into one list
        with self._leaving_out_copies():
            return super().gather_for_metrics(input_data, use_gather_object)

    @contextlib.contextmanager
    def _leaving_out_copies(self) -> Iterator[None]:
        self._one_of_each_group = True
        try:
            yield
        finally:
            self._one_of_each_group = False


class _Sizes(dict):
    """As much of a device mesh as dataloaders ask for: named dimensions with sizes."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return tuple(self)


class _DataScheduler(AcceleratedScheduler):
    """Steps as often as there are batches at a time, which accelerate takes to be the number of ranks."""

    def __init__(self, stock: AcceleratedScheduler, batches: int) -> None:
        super().__init__(stock.scheduler, stock.optimizers, stock.step_with_optimizer, split_batches=True)
        self._batches = batches

    def step(self, *args: Any, **kwargs: Any) -> None:
        moves = self.step_with_optimizer and self.gradient_state.sync_gradients
        for _ in range(self._batches if moves else 1):
            if moves and self.scheduler._step_count > getattr(self.scheduler, "total_steps", math.inf):
                return  # a schedule with an end (OneCycle), where the last batch was filled up
            super().step(*args, **kwargs)


def ranks_of_a_batch(config: ZeroConfig) -> int:
    """How many ranks have the same samples at a time."""
    return config.sp_size * config.cp_size * config.tp_size


def sizes_of(given: ParallelismConfig) -> dict[str, int]:
    """The options that an accelerate ParallelismConfig stands for."""
    sizes = {"sp_size": given.sp_size, "cp_size": given.cp_size, "tp_size": given.tp_size}
    if given.dp_replicate_size > 1 and given.dp_shard_size > 1:
        sizes["mics_shard_size"] = given.dp_shard_size * given.sp_size * given.cp_size  # of what each rank computes
    return {name: size for name, size in sizes.items() if size > 1}
