"""`zero_init`: models whose weights stay in their files, or are initialised, until each rank takes its slices.

transformers builds the model and resolves files, dtype, renames and converters as always. Its own conversion
code then runs on stand-ins (see [Note: tensors without memory]), which tells for every parameter which elements of
which tensors of the files it consists of; `deferred` keeps that until the model is prepared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_zero.checkpoint.provenance import Run, Tracer
from hf_zero.checkpoint.safetensors_file import SlicedFile
from hf_zero.comm import dtensors
from hf_zero.core import deferred
from hf_zero.errors import ZeroCheckpointError, ZeroConfigError, first_few
from hf_zero.integrations.accelerate import ZeroPlugin
from hf_zero.lazy_init.recorder import Recorder
from hf_zero.releases import load_into


# Set while a `zero_init` is open: the patterns of weights that files may lack.
_SYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"


@contextlib.contextmanager
def zero_init(plugin: ZeroPlugin | Any = None, *, allow_missing: Sequence[str] = ()) -> Iterator[None]:
    """Inside, models are built without their weights: each rank takes its slices when the model is prepared.

    `from_pretrained` of any class reads no weights. A model that is built from its configuration gets the weights that
    a single process would give it, but they are made when they are needed. Adapters may be added before. A weight that
    is read or changed before `prepare` is made whole. At other stages than 3, with one process, and inside another
    `zero_init`, this does nothing.
    Weights that the files lack are an error unless a pattern of `allow_missing` matches their name; these are
    initialised as transformers does.

    Args:
        plugin: a `ZeroPlugin`, or whatever makes one; default: what the launcher configured.
        allow_missing: regular expressions.
    """
    resolved = plugin if isinstance(plugin, ZeroPlugin) else ZeroPlugin(plugin)
    stock = PreTrainedModel.__dict__["_load_pretrained_model"]
    is_open = isinstance(stock.__func__, _Loader)
    if is_open or resolved.config.zero_stage != 3 or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    # The one place where a class of transformers changes, for the time of the block: model classes that AutoModel
    # picks by name have no other seam.
    PreTrainedModel._load_pretrained_model = staticmethod(_Loader(stock.__func__, tuple(allow_missing)))
    try:
        with Recorder():
            yield
    finally:
        PreTrainedModel._load_pretrained_model = stock


@dataclasses.dataclass(frozen=True)
class _Loader:
    stock: Callable[..., tuple]
    allow_missing: tuple[str, ...]

    def __call__(self, model, state_dict, checkpoint_files, load_config, *keys):
        if load_config.is_quantized:
            raise ZeroConfigError(
                "quantized weights cannot be read in slices: load them without zero_init (`zero3_init_flag: false`), "
                "whole on every rank. They are sharded when the model is prepared"
            )
        sliced = state_dict is None and all(str(file).endswith(".safetensors") for file in checkpoint_files or [""])
        in_parts = any(map(dtensors.is_dtensor, model.parameters()))  # of which each rank reads its own
        if in_parts or not sliced:
            info = self.stock(model, state_dict, checkpoint_files, load_config, *keys)
        else:
            info = _load_deferred(model, checkpoint_files, load_config), None
        _check_missing(model, info[0], self.allow_missing)
        return info


def _load_deferred(model: PreTrainedModel, checkpoint_files: list[str], load_config: Any):
    load_config = dataclasses.replace(load_config, device_map=None)
    layouts = {Path(file): SlicedFile.open(file) for file in checkpoint_files}
    homes = {name: (path, layout) for path, layout in layouts.items() for name in layout.tensors}
    tracer = Tracer()
    stand_ins = {name: tracer.source(name, *layout.tensors[name]) for name, (_, layout) in homes.items()}
    with tracer, _one_thread():
        info = load_into(model, stand_ins, load_config)
    conversions = model._weight_conversions
    computed = _drop_computed(model, tracer)
    if computed:
        # Values that a converter computes: loaded whole, on every rank, from the tensors that they come from.
        with _one_thread():
            load_into(model, {name: _read(homes, name) for name in computed}, load_config)
    model._weight_conversions = conversions
    _replace_stand_ins(model, tracer, homes)
    return info


def _drop_computed(model: PreTrainedModel, tracer: Tracer) -> set[str]:
    """Put back on meta what is no plain part of the files, and return the tensors of the files that it is made of."""
    computed: set[str] = set()
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                origin = tracer.origin_of(tensor)
                if origin is not None and origin.runs is None:
                    computed |= origin.names
                    bare = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    tensors[name] = nn.Parameter(bare, tensor.requires_grad) if name in module._parameters else bare
    return computed


def _replace_stand_ins(model: PreTrainedModel, tracer: Tracer, homes: dict) -> None:
    """Parameters get a source of their values in the files; buffers get the values."""
    for module in model.modules():
        for name, param in module._parameters.items():
            origin = tracer.origin_of(param)
            if origin is not None:
                made = deferred.deferred(param.shape, param.dtype, FileSource(origin.runs, homes), param.requires_grad)
                made._is_hf_initialized = True  # transformers' mark: do not initialise it
                module._parameters[name] = made
        for name, buffer in module._buffers.items():
            origin = tracer.origin_of(buffer)
            if origin is not None:
                value = torch.empty(buffer.shape, dtype=buffer.dtype)
                FileSource(origin.runs, homes).read(0, value.view(-1))
                value._is_hf_initialized = True
                module._buffers[name] = value


@dataclasses.dataclass(frozen=True)
class FileSource:
    """The values of a parameter, in the files of a pretrained model."""

    runs: tuple[Run, ...]
    homes: dict[str, tuple[Path, SlicedFile]]
    ingredients = ()

    def read(self, start: int, target: Tensor) -> None:
        for run in self.runs:
            part = run.cut(start, start + target.numel())
            if part is not None:
                path, layout = self.homes[part.name]
                parts = [(part.name, part.start, target[part.at : part.at + part.numel])]
                layout.read(path, parts, coming=parts)


def _read(homes: dict[str, tuple[Path, SlicedFile]], name: str) -> Tensor:
    path, layout = homes[name]
    dtype, shape = layout.tensors[name]
    value = torch.empty(shape, dtype=dtype)
    layout.read(path, [(name, 0, value)])
    return value


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """transformers loads in threads, where a tracer does not act, unless this variable is set."""
    before = os.environ.get(_SYNCHRONOUS)
    os.environ[_SYNCHRONOUS] = "1"
    try:
        yield
    finally:
        del os.environ[_SYNCHRONOUS]
        if before is not None:
            os.environ[_SYNCHRONOUS] = before


def _check_missing(model: PreTrainedModel, info: Any, allowed: tuple[str, ...]) -> None:
    patterns = [*(model._keys_to_ignore_on_load_missing or ()), *allowed]
    lost = sorted(
        name
        for name in set(info.missing_keys) - set(model.all_tied_weights_keys)
        if not any(re.search(pattern, name) for pattern in patterns)
    )
    if lost:
        raise ZeroCheckpointError(
            f"the files of {type(model).__name__} lack {first_few(map(repr, lost))}, which would start from random "
            "values. Name them in zero_init(allow_missing=[...]) if they are new (a classification head), or repair "
            "the checkpoint"
        )
