"""Accelerate's plugin objects for DeepSpeed and FSDP, in adopted ranks: what a script writes in one configures us."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

from hf_zero.config import ZeroConfig
from hf_zero.config.plugins import read_deepspeed_plugin, read_fsdp_plugin
from hf_zero.errors import ZeroConfigError


_READERS = {DeepSpeedPlugin: read_deepspeed_plugin, FullyShardedDataParallelPlugin: read_fsdp_plugin}
_ARGUMENTS = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin")  # of Accelerator
_GIVEN, _FILLED = "_hf_zero_given", "_hf_zero_filled"  # fields as the script wrote them, and as accelerate left them
_CONFIG = "hf_zero_written"  # in accelerate's state of the process


def remember_fields() -> None:
    """Have plugins note which of their fields were given: their `__post_init__` fills in all the others."""
    for cls in _READERS:
        _remember(cls)


def _remember(cls: type) -> None:
    stock = cls.__post_init__

    @functools.wraps(stock)
    def post_init(self: Any) -> None:
        known = dataclasses.fields(self)
        given = {field.name: getattr(self, field.name) for field in known}
        vars(self)[_GIVEN] = {f.name: given[f.name] for f in known if given[f.name] is not f.default}
        stock(self)
        vars(self)[_FILLED] = _state(self)

    cls.__post_init__ = post_init


def config_in(arguments: dict[str, Any]) -> ZeroConfig | None:
    """What the plugin says that is among the arguments of an `Accelerator`, or None where there is none.

    Raises ZeroConfigError for what cannot be carried out, naming the field, and for several plugins.
    """
    given = [arguments[name] for name in _ARGUMENTS if arguments.get(name) is not None]
    plugins = [one for each in given for one in (each.values() if isinstance(each, dict) else [each])]
    if not plugins:
        return None
    if len(plugins) > 1:
        raise ZeroConfigError(
            f"{' and '.join(type(plugin).__name__ for plugin in plugins)} were given to one Accelerator: all its "
            "models train under one configuration; pass one plugin"
        )
    read = next((read for cls, read in _READERS.items() if isinstance(plugins[0], cls)), None)
    if read is None:
        raise TypeError(f"{type(plugins[0]).__name__} is no plugin for DeepSpeed or FSDP")
    return ZeroConfig.from_layers(read(_fields(plugins[0])))


def take_config(arguments: dict[str, Any], *, with_own: bool) -> ZeroConfig | None:
    """As `config_in`, and take the plugin out; an Accelerator without one has that of an earlier one.

    `with_own`: whether there is a `ZeroPlugin` beside it, which is an error where both say something.
    """
    found = config_in(arguments)
    if found is not None and with_own:
        raise ZeroConfigError("a plugin for DeepSpeed or FSDP and zero_plugin= were given: keep one of them")
    for name in _ARGUMENTS:
        arguments.pop(name, None)
    return AcceleratorState._shared_state.get(_CONFIG) if found is None else found


def keep_config(state: AcceleratorState, config: ZeroConfig | None) -> None:
    """For `take_config` of a later Accelerator."""
    setattr(state, _CONFIG, config)


def _fields(plugin: Any) -> dict[str, Any]:
    """The fields that the script has given, and those that it has set since."""
    kind = type(plugin).__name__
    if not hasattr(plugin, _FILLED):
        raise ZeroConfigError(
            f"{kind} cannot be combined with ZeroAccelerator: pass its settings as zero_plugin=ZeroPlugin(...)"
        )
    before, now = getattr(plugin, _FILLED), _state(plugin)
    changed = {name: value for name, value in now.items() if value is not before[name] and value != before[name]}
    if "deepspeed_config" in changed:
        raise ZeroConfigError(
            f"{kind}.deepspeed_config was changed after the plugin was made: write that in hf_ds_config="
        )
    return {**getattr(plugin, _GIVEN), **changed}


def _state(plugin: Any) -> dict[str, Any]:
    """The fields as they are, and a copy of the DeepSpeed configuration that accelerate makes of them."""
    state = {field.name: getattr(plugin, field.name) for field in dataclasses.fields(plugin)}
    if hasattr(plugin, "deepspeed_config"):
        state.pop("hf_ds_config")
        state["deepspeed_config"] = copy.deepcopy(plugin.deepspeed_config)
    return state
