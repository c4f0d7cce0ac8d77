"""Writes the weights of a prepared model as Hugging Face files: every rank its own byte ranges, nothing gathered."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_zero.checkpoint.background import SaveJob
from hf_zero.checkpoint.held import held, is_first, logical_state, own_slice
from hf_zero.checkpoint.plan import SavePlan, is_pretrained
from hf_zero.checkpoint.safetensors_file import Part
from hf_zero.checkpoint.staging import Staged, broadcast_parts, family, on_all_ranks, stage
from hf_zero.comm import dtensors
from hf_zero.comm.communicator import Communicator
from hf_zero.comm.transport.alone import Alone
from hf_zero.core import guard
from hf_zero.core.unit import Unit, gathered_parameters, one_pass, unit_of, units_of


logger = logging.getLogger(__name__)


def saved_dtypes(model: nn.Module, compute_dtype: bool) -> Callable[[Tensor], torch.dtype]:
    """The dtype in which each tensor of the model is saved: as the model computes, or else in fp32 at least."""
    dtypes: dict[int, torch.dtype] = {}
    for unit in units_of(model.parameters()):
        for buffer in unit.buffers:
            keeps = compute_dtype or not buffer.dtype.is_floating_point
            dtype = buffer.dtype if keeps else buffer.master_dtype
            dtypes.update({id(param): dtype for param in buffer.params})
    return lambda tensor: dtypes.get(id(tensor), tensor.dtype)


def exact_parameters(model: nn.Module, plan: SavePlan) -> frozenset[int]:
    """The `id` of every parameter whose master stands in the files of `plan` as it is."""
    inexact = {name for origin in plan.computed.values() for name in origin.names}
    saved = {name: plan.dtype_of(tensor) for tensor, origin in plan.origins.items() for name in origin.names}
    units = units_of(model.parameters())
    masters = {id(p): buffer.master_dtype for unit in units for buffer in unit.buffers for p in buffer.params}
    exact = set()
    for name, tensor in logical_state(model).items():
        first = plan.aliases[name]
        if id(tensor) in masters and first not in inexact and saved.get(first) == masters[id(tensor)]:
            exact.add(id(tensor))
    return frozenset(exact)


def packed_parameters(model: nn.Module, plan: SavePlan) -> list[str]:
    """The names, of those that `plan` saves, of parameters that rest quantised."""
    units = units_of(model.parameters())
    packed = {id(p) for unit in units for buffer in unit.buffers if buffer.codec is not None for p in buffer.params}
    saved = {name for origin in plan.origins.values() for name in origin.names}
    return [name for name, tensor in logical_state(model).items() if id(tensor) in packed and name in saved]


@dataclass(kw_only=True)
class StagedWeights:
    """Weight files under temporary names; `commit` completes them and puts them in place of what was there.

    A run that is killed meanwhile leaves a folder that loads as it was or as it is to be, or, where files of the same
    names are being replaced, one that has no index and does not load: never parts of two models.
    """

    plan: SavePlan
    staged: Staged
    sums: dict[str, dict[str, int]] = field(default_factory=dict)  # by file, once it is committed

    def commit(self) -> None:
        """A collective."""
        self.staged.complete()
        on_all_ranks(self.staged.comm, self._put_in_place)
        self.sums.update(self.plan.by_file(self.staged.sums) if self.staged.summed else {})

    def _put_in_place(self) -> None:
        """Rename the files and write the index; remove what a reader would take for part of the model."""
        if not self.staged.creates:
            return
        folder, plan = self.staged.folder, self.plan
        index, temporary = folder / plan.index_name, folder / (plan.index_name + ".tmp")
        if plan.index is not None and any((folder / name).exists() for name in plan.files):
            index.unlink(missing_ok=True)
        self.staged.rename()
        if plan.index is not None:
            temporary.write_text(plan.index, encoding="utf-8")
            os.replace(temporary, index)
        families = {family(name) for name in plan.files}
        stale = {path for path in folder.iterdir() if family(path.name) in families and path.name not in plan.files}
        for path in [*stale, *([index, temporary] if plan.index is None else [])]:
            path.unlink(missing_ok=True)


def stage_weights(model: nn.Module, plan: SavePlan, folder: str | os.PathLike, job: SaveJob) -> StagedWeights:
    """Write the files of `plan` under temporary names; a collective, with no communication of weights.

    For a thread the weights are copied now, and written when it commits.

    Raises ZeroCheckpointError on all ranks, before the first byte, where ranks have different models or the disk is
    too small, and where a rank cannot write.
    """
    comm = job.comm
    units = units_of(model.parameters())
    with one_pass(units):
        for unit in units:
            unit.adopt_writes()
    packed = packed_parameters(model, plan)
    if packed and comm.rank == 0:
        logger.warning(
            "hf_zero: %d frozen parameters ('%s' first) rest in 8 bits (zero_quantized_nontrainable_weights), so %s "
            "will hold them as the model uses them, not as they were loaded",
            len(packed),
            packed[0],
            folder,
        )

    def parts(*, closed: bool = False, in_memory: bool | None = None) -> Iterator[Part]:
        for name, start, values in _owned(model, comm, closed=closed, in_memory=in_memory):
            yield from plan.parts_of(name, start, values)

    staged = stage(Path(folder), plan.files, parts, job, lambda: _computed_parts(model, plan, comm))
    return StagedWeights(plan=plan, staged=staged)


def write_whole(model: nn.Module, plan: SavePlan, folder: str | os.PathLike, beside: Callable[[], None]) -> None:
    """Write the files of `plan`, with nothing computed in them, from weights that this rank has whole; no collective.

    `beside` writes what belongs to the folder besides them. Raises as `stage_weights` does.
    """
    whole = {name: tensor for name, tensor in logical_state(model).items() if plan.aliases[name] == name}

    def parts(*, closed: bool = False, in_memory: bool | None = None) -> Iterator[Part]:
        for name, tensor in whole.items():
            yield from plan.parts_of(name, 0, tensor.detach().reshape(-1))

    job = SaveJob(comm=Communicator(Alone()), is_main=True, sums=False)
    weights = StagedWeights(plan=plan, staged=stage(Path(folder), plan.files, parts, job))
    try:
        beside()
    except BaseException:
        weights.staged.discard()
        raise
    weights.commit()


def _owned(
    model: nn.Module,
    comm: Communicator,
    names: Container[str] | None = None,
    *,
    closed: bool,
    in_memory: bool | None,
) -> Iterator[tuple[str, int, Tensor]]:
    """(name, first element, values) of what this rank writes; module buffers, the same everywhere, are rank 0's."""
    mine = held(model, own_slice, names, chooses=is_first, closed=closed, in_memory=in_memory)
    for name, start, values, buffer in mine:
        if buffer is not None or comm.rank == 0:
            yield name, start, values.reshape(-1)


def _computed_parts(model: nn.Module, plan: SavePlan, comm: Communicator) -> Iterator[Part]:
    """Tensors that a weight converter computes: their weights come to every rank, one group at a time; rank 0 gives.

    A collective, in which the ranks take part by iterating.
    """
    from transformers.core_model_loading import revert_weight_conversion

    logical = logical_state(model)
    for tensors, sources in _groups(plan):
        dtypes = {name: plan.files[plan.home[t]].tensors[t][0] for t in tensors for name in sources}
        whole = {name: torch.empty(logical[name].shape, dtype=dtypes[name]) for name in sorted(sources)}

        def mine(
            *, closed: bool = False, in_memory: bool | None = None, sources: frozenset[str] = sources
        ) -> Iterator[Part]:
            return (("", *part) for part in _owned(model, comm, sources, closed=closed, in_memory=in_memory))

        for _, name, start, values in broadcast_parts(mine, functools.partial(_dtype_in, dtypes), comm):
            whole[name].view(-1)[start : start + values.numel()] = values.cpu()
        if comm.rank == 0:
            assert is_pretrained(model), "nothing else has converters"
            made = revert_weight_conversion(model, whole)
            for tensor in sorted(tensors):
                yield plan.home[tensor], tensor, 0, made[tensor].contiguous().reshape(-1)


def _dtype_in(dtypes: dict[str, torch.dtype], _file: str, name: str) -> torch.dtype:
    return dtypes[name]


def _groups(plan: SavePlan) -> list[tuple[set[str], frozenset[str]]]:
    """Computed tensors, put together where they share weights."""
    groups: list[tuple[set[str], frozenset[str]]] = []
    for tensor, origin in plan.computed.items():
        tensors, sources = {tensor}, origin.names
        for group in [group for group in groups if group[1] & sources]:
            groups.remove(group)
            tensors, sources = tensors | group[0], sources | group[1]
        groups.append((tensors, sources))
    return groups


def consolidated_state_dict(
    model: nn.Module, keep: bool, names: Iterable[str] | None = None
) -> dict[str, Tensor] | None:
    """The model's state dict with whole tensors on the CPU, on the ranks that `keep` it; None on the others.

    A collective: every rank of the model's engine must call it. Values are in the dtype that the model computes in.
    Names that share a parameter share a tensor, so that saving recognises tied weights. At most one unit is whole on
    a device at a time. With `names`, only these tensors are gathered, the others are left out.
    """
    logical = model.state_dict(keep_vars=True)  # the parameters themselves: nothing is read yet
    if names is not None:
        logical = {name: tensor for name, tensor in logical.items() if name in set(names)}
    units: dict[Unit, list[nn.Parameter]] = {}
    values: dict[int, Tensor] = {}
    for tensor in {id(tensor): tensor for tensor in logical.values()}.values():
        if guard.is_prepared(tensor):
            units.setdefault(unit_of(tensor), []).append(tensor)
        else:
            values[id(tensor)] = tensor.detach().cpu()
    for params in units.values():
        with gathered_parameters(params):
            for param in params:
                found = dtensors.whole(param.detach())
                if keep:
                    values[id(param)] = found.to("cpu", copy=True)
    return {name: values[id(tensor)] for name, tensor in logical.items()} if keep else None
