"""Adapters (PEFT): the file that peft writes holds what was trained, under names of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from hf_zero.checkpoint.safetensors_file import SlicedFile
from hf_zero.errors import ZeroCheckpointError


CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
# `default` is the adapter that Trainer saves at the top of a checkpoint.
_ADDED = re.compile(r"\.modules_to_save\.default(?=\.)|\.default(?=\.|$)")


def present(folder: Path) -> bool:
    """Whether a checkpoint holds adapters only."""
    return (folder / CONFIG_NAME).is_file()


def tensors(folder: Path, trained: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The tensor of the adapters' file for every trained parameter, whose shapes are given.

    Raises ZeroCheckpointError where the file lacks one, or has another shape.
    """
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        raise ZeroCheckpointError(f"{path} is missing: {CONFIG_NAME} says that this checkpoint holds adapters")
    stored = SlicedFile.open(path).tensors
    found = {}
    for name, shape in trained.items():
        found[name] = _ADDED.sub("", name)
        have = stored.get(found[name], (None, None))[1]
        if have != shape:
            raise ZeroCheckpointError(
                f"{path} does not hold the trained parameter '{name}' of shape {shape}"
                + (f": its '{found[name]}' has shape {have}" if have is not None else "")
            )
    return found
