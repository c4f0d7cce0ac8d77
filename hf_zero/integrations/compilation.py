"""`torch_compile` of training arguments and `dynamo_backend` of accelerate: layers are compiled, each by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import nn

from hf_zero.core.build import WHOLE_MODEL_COMPILED
from hf_zero.core.partition import partition
from hf_zero.errors import ZeroConfigError


@contextlib.contextmanager
def by_layers(state: AcceleratorState, model: nn.Module) -> Iterator[None]:
    """Inside, accelerate prepares `model` without compiling it; then its layers are compiled, if that was asked for.

    That is accelerate's regional compilation, in place: modules keep their names. Raises ZeroConfigError for a model
    without layers.
    """
    asked = state.dynamo_plugin
    regions = [hook.module for hook in partition(model)[1] if hook.module is not model]
    if asked.backend != DynamoBackend.NO and not regions:
        raise ZeroConfigError(f"{WHOLE_MODEL_COMPILED}, and {type(model).__name__} has none: leave the setting out")
    state.dynamo_plugin = TorchDynamoPlugin(backend="no")
    try:
        yield
    finally:
        state.dynamo_plugin = asked
    if asked.backend != DynamoBackend.NO:
        for region in regions:
            region.compile(**asked.to_kwargs())
