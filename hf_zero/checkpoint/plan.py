"""Plans a model's weight files from metadata alone: what `save_pretrained` would write, and from which weights."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from hf_zero.checkpoint.held import logical_state
from hf_zero.checkpoint.provenance import Origin, Run, Tracer
from hf_zero.checkpoint.safetensors_file import Part, SlicedFile, library_order
from hf_zero.core.wrappers import is_wrapper
from hf_zero.errors import ZeroCheckpointError, first_few


if TYPE_CHECKING:
    from transformers import PreTrainedModel

DtypeOf = Callable[[Tensor], torch.dtype]
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """The weight files of one folder.

    `origins` says, for every tensor of the files, which elements of the model's state dict it holds. `aliases` maps
    every name of the state dict to the first name of the same tensor, the one that origins use.
    """

    files: dict[str, SlicedFile]
    home: dict[str, str]  # the file of every tensor
    origins: dict[str, Origin]
    aliases: dict[str, str]
    index_name: str
    index: str | None  # the content of the index file, where there is more than one file

    def by_file(self, values: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """Values of tensors, sorted into their files."""
        return {file: {name: values[name] for name in layout.tensors} for file, layout in self.files.items()}

    def renamed(self, name: str) -> SavePlan:
        """The same for a single file of another name."""
        ((_, layout),) = self.files.items()
        return dataclasses.replace(self, files={name: layout}, home=dict.fromkeys(self.home, name))

    def dtype_of(self, tensor: str) -> torch.dtype:
        return self.files[self.home[tensor]].tensors[tensor][0]

    @functools.cached_property
    def _targets(self) -> dict[str, list[Run]]:
        """Of every weight the tensors that hold its elements: origins, read the other way round."""
        targets: dict[str, list[Run]] = {}
        for tensor, origin in self.origins.items():
            for run in origin.runs or ():
                targets.setdefault(run.name, []).append(Run(run.start, tensor, run.at, run.numel))
        return targets

    def parts_of(self, weight: str, start: int, values: Tensor) -> Iterator[Part]:
        """Where the elements of a weight from `start` on stand in the files, each part with its share of `values`."""
        for target in self._targets.get(weight, ()):
            part = target.cut(start, start + values.numel())
            if part is not None:
                yield self.home[part.name], part.name, part.start, values[part.at : part.at + part.numel]

    @property
    def computed(self) -> dict[str, Origin]:
        """The tensors whose values are not parts of weights as they stand, but computed from them."""
        return {name: origin for name, origin in self.origins.items() if origin.runs is None}


def is_pretrained(model: nn.Module) -> TypeGuard[PreTrainedModel]:
    """Whether a model is saved as transformers saves its own, or else as accelerate saves any module."""
    return hasattr(model, "_keys_to_ignore_on_save")


def plan_pretrained(
    model: PreTrainedModel,
    dtype_of: DtypeOf,
    *,
    max_shard_size: int | str = "50GB",
    variant: str | None = None,
    save_original_format: bool = True,
) -> SavePlan:
    """The files that `PreTrainedModel.save_pretrained` writes on one process (transformers' own functions decide)."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import _add_variant, remove_tied_weights_from_state_dict

    _check_plain(model)
    tracer, tensors, aliases = _stand_ins(model, dtype_of)
    for name in model._keys_to_ignore_on_save or ():
        tensors.pop(name, None)
    with tracer:
        tensors = remove_tied_weights_from_state_dict(tensors, model)
        _check_nothing_lost(model, tensors, aliases)
        if save_original_format:
            tensors = revert_weight_conversion(model, tensors)
    weights_name = _add_variant(WEIGHTS_NAME, variant)
    split = split_torch_state_dict_into_shards(
        tensors,
        filename_pattern=weights_name.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=max_shard_size,
    )
    metadata = {"total_parameters": model.num_parameters(), **split.metadata}
    return _plan(tracer, tensors, aliases, split, metadata, _add_variant(INDEX_NAME, variant))


def plan_module(model: nn.Module, dtype_of: DtypeOf, *, max_shard_size: int | str = "10GB") -> SavePlan:
    """The files that `accelerate.Accelerator.save_model` writes for any module."""
    from accelerate.utils import clean_state_dict_for_safetensors
    from huggingface_hub import split_torch_state_dict_into_shards

    _check_plain(model)
    tracer, tensors, aliases = _stand_ins(model, dtype_of)
    with tracer:
        tensors = clean_state_dict_for_safetensors(tensors)
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    return _plan(tracer, tensors, aliases, split, split.metadata, INDEX_NAME)


def select(model: nn.Module, choose: Callable[[dict[str, Tensor]], Mapping[str, object]]) -> set[str]:
    """The names of the state dict that `choose(state_dict)` takes anything from (adapters); values play no part."""
    tracer, tensors, aliases = _stand_ins(model, lambda tensor: tensor.dtype)
    with tracer:
        chosen = choose(dict(tensors))
        firsts = {
            name for tensor in chosen.values() if isinstance(tensor, Tensor) for name in tracer.origin(tensor).names
        }
    return {name for name, first in aliases.items() if first in firsts}


def _stand_ins(model: nn.Module, dtype_of: DtypeOf) -> tuple[Tracer, dict[str, Tensor], dict[str, str]]:
    """A state dict without values, in which names share a tensor where they do in the model."""
    tracer = Tracer()
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    firsts: dict[int, str] = {}
    for name, tensor in logical_state(model).items():
        first = aliases[name] = firsts.setdefault(id(tensor), name)
        tensors[name] = tensors[first] if first != name else tracer.source(name, dtype_of(tensor), tuple(tensor.shape))
    return tracer, tensors, aliases


def _check_plain(model: nn.Module) -> None:
    for name, tensor in logical_state(model).items():
        if is_wrapper(tensor):
            raise ZeroCheckpointError(
                f"'{name}' is a {type(tensor).__name__}, whose library alone knows its files: save adapters only, or "
                "save a copy of the whole model (`copy.deepcopy(model)` on all ranks, then its save_pretrained on one)"
            )


def _check_nothing_lost(model: PreTrainedModel, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    saved = {aliases[name] for name in tensors}
    ignored = {aliases.get(name) for name in model._keys_to_ignore_on_save or ()}
    lost = sorted(name for name, first in aliases.items() if first not in saved | ignored)
    if lost:
        raise ZeroCheckpointError(f"{type(model).__name__} would be saved without {first_few(map(repr, lost))}")


def _plan(
    tracer: Tracer, tensors: dict[str, Tensor], aliases: dict[str, str], split: Any, metadata: dict, index_name: str
) -> SavePlan:
    origins = {name: tracer.origin(tensor) for name, tensor in tensors.items()}
    _check_covered(tensors, origins, tracer)
    files = {
        file: SlicedFile(
            library_order({name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in names}),
            {"format": "pt"},
        )
        for file, names in split.filename_to_tensors.items()
    }
    index = None
    if split.is_sharded:
        content = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        index = json.dumps(content, indent=2, sort_keys=True) + "\n"
    home = {name: file for file, names in split.filename_to_tensors.items() for name in names}
    return SavePlan(files=files, home=home, origins=origins, aliases=aliases, index_name=index_name, index=index)


def _check_covered(tensors: dict[str, Tensor], origins: dict[str, Origin], tracer: Tracer) -> None:
    """Raise unless every element of every weight that is to be saved stands in exactly one tensor of the files."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    computed = {name for origin in origins.values() if origin.runs is None for name in origin.names}
    for name, origin in origins.items():
        if not origin.names and tensors[name].numel():
            raise ZeroCheckpointError(f"tensor '{name}' of the files comes from no weight of the model")
        for run in origin.runs or ():
            ranges.setdefault(run.name, []).append((run.start, run.start + run.numel))
    for name, parts in ranges.items():
        end, numel = 0, tracer.numel(name)
        for start, stop in sorted(parts):
            if start != end:
                break
            end = stop
        if end != numel and name not in computed:
            raise ZeroCheckpointError(f"the files would hold {end:,} of {numel:,} elements of '{name}' in one shard")
