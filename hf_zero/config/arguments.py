"""The training script's arguments, typed or in its YAML: which there are, and what they say of the configuration."""

import dataclasses
import difflib
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hf_zero.config import values
from hf_zero.config.consistency import ARGUMENT_NAMES, Claim, claim_readings, config_claims
from hf_zero.config.layer import Layer
from hf_zero.config.options import OPTIONS
from hf_zero.config.origin import Origin
from hf_zero.config.reader import read_source
from hf_zero.config.schema import ZeroConfig
from hf_zero.errors import ZeroConfigError


# Fields that hf_zero adds to training arguments, and the field of the configuration that each one sets.
ZERO_ARGUMENTS = {
    option.argument: name for name, option in OPTIONS.items() if option.argument is not None and not option.shared
}
_NAMES_A_FILE = ("zero_config", "deepspeed")
_WITHOUT_EFFECT = ("zero_memory_report", "gather_for_generation")  # on the configuration
_SWITCHES = ("bf16", "fp16")


def pairs(words: Sequence[str]) -> dict[str, Any]:
    """``--name value``, ``--name=value`` and ``--flag`` of a training command, by name with underscores."""
    found: dict[str, Any] = {}
    for position, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        following = words[position + 1] if position + 1 < len(words) else "--"
        text = value if equals else ("true" if following.startswith("--") else following)
        found[name.replace("-", "_")] = values.is_true(text) if text.lower() in ("true", "false") else text
    return found


def read_arguments(
    arguments: Mapping[str, Any], origin_of: Callable[[str], Origin]
) -> tuple[list[Layer], list[Claim], list[str]]:
    """What arguments set, what they say about values that have another owner, and everything wrong with them."""
    layer, claims = Layer(), []
    layers = [layer]
    for name, value in arguments.items():
        origin = origin_of(name)
        try:
            claims += claim_readings(name, value, origin)
            if name in ZERO_ARGUMENTS and value is not None:
                _set(layer, name, value, origin)
        except ZeroConfigError as error:
            layer.problems += error.problems
    named = [name for name in _NAMES_A_FILE if arguments.get(name) is not None]
    if len(named) > 1:
        layer.problems.append("both --deepspeed and --zero_config name a configuration: keep one of them")
    for name in named[:1]:
        try:
            found = read_source(arguments[name])
            layers, claims = [*found, layer], config_claims(ZeroConfig.from_layers(found)) + claims
        except ZeroConfigError as error:
            layer.problems += [f"{origin_of(name).where} ({name}): {problem}" for problem in error.problems]
    problems, layer.problems = layer.problems, []
    return layers, claims, problems


def _set(layer: Layer, name: str, value: Any, origin: Origin) -> None:
    field = ZERO_ARGUMENTS[name]
    try:
        layer.put(field, OPTIONS[field].kind.parse(value), origin)
    except ValueError as error:
        raise ZeroConfigError(f"{origin.where}: {name} is {value!r}: {error}") from None


def unknown_arguments(names: Iterable[str], label: str) -> list[str]:
    """One problem for each name that neither hf_zero nor a class of training arguments knows."""
    ours = {*ZERO_ARGUMENTS, *_NAMES_A_FILE, *_WITHOUT_EFFECT, *ARGUMENT_NAMES, *_SWITCHES}
    left = [name for name in names if name not in ours]
    if not left:
        return []
    known = ours | _fields_of_others()  # imports torch, which takes seconds
    problems = []
    for name in left:
        if name in known or name.removeprefix("no_") in known:  # --no_name switches off
            continue
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.75)
        problems.append(
            f"{label}: unknown argument --{name}; did you mean --{near[0]}?"
            if near
            else f"{label}: unknown argument --{name}: no training arguments of transformers, TRL or hf_zero have it; "
            "leave out what is the script's own"
        )
    return problems


def _fields_of_others() -> set[str]:
    """The fields of transformers' training arguments, and of TRL's configurations where it is installed."""
    from transformers import TrainingArguments

    classes = [TrainingArguments]
    if importlib.util.find_spec("trl") is not None:
        import trl

        classes += [getattr(trl, name) for name in dir(trl) if name.endswith(("Config", "Arguments"))]
    return {field.name for kind in classes if dataclasses.is_dataclass(kind) for field in dataclasses.fields(kind)}
