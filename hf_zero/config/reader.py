"""Reads any accepted source into layers: DeepSpeed JSON, Accelerate YAML, FSDP YAML, dict, arguments."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_zero.config import values
from hf_zero.config.checks import advice
from hf_zero.config.documents import Document, from_dict, load_document
from hf_zero.config.keys import (
    BF16_ENABLED,
    CPU_CHECKPOINTING,
    CPU_OFFLOAD,
    CPU_OFFLOAD_PARAMS,
    DEEPSPEED_KEYS,
    FP16_ENABLED,
)
from hf_zero.config.keys_accelerate import (
    DEEPSPEED_CONFIG_FILE,
    DEEPSPEED_SECTION_KEYS,
    DISTRIBUTED_TYPES,
    FLAT_KEYS,
    FSDP_KEYS,
    FSDP_OFFLOAD,
    FSDP_RESHARD,
    FSDP_STRATEGY,
    LAUNCH_NUMBERS,
    OTHER_ACCELERATORS,
    OWN_KEYS,
    SECTIONS,
    TOP_KEYS,
)
from hf_zero.config.layer import Layer, Setting, read_keys
from hf_zero.config.options import Options
from hf_zero.config.origin import ARGUMENTS, Origin
from hf_zero.errors import ZeroConfigError


_STAGE_OF_STRATEGY = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "HYBRID_SHARD_ZERO2": 2,
}


def read_source(source: Any, label: str = "the configuration dict") -> list[Layer]:
    """The layers of one source, weakest first; ``label`` names a dict in messages."""
    if source is None:
        return []
    if isinstance(source, Options):
        return [_layer_of(source)]
    if isinstance(source, Mapping):
        return read_document(from_dict(source, label))
    if isinstance(source, (str, os.PathLike)):
        return read_document(load_document(source))
    raise ZeroConfigError(
        f"cannot read a configuration from {type(source).__name__}: "
        "pass a path to a JSON or YAML file, a dict or a ZeroConfig"
    )


def _layer_of(config: Options) -> Layer:
    settings = {
        name: Setting(value=getattr(config, name), origin=config.origins.get(name, Origin(label=ARGUMENTS)))
        for name in config.chosen()
    }
    return Layer(settings=settings, notes=[note for note in config.notes if note not in advice(config)])


def read_flat(arguments: Mapping[str, Any], label: str) -> Layer:
    """Keyword arguments or options: every field under its own name; None means "not given"."""
    return _flat_layer(from_dict({k: v for k, v in arguments.items() if v is not None}, label))


def _flat_layer(document: Document) -> Layer:
    layer = Layer()
    read_keys(document, FLAT_KEYS, layer)
    _combine_cpu_offload(layer)
    return layer


def read_document(document: Document) -> list[Layer]:
    """The layers of one file, weakest first (a YAML that names a JSON gives two)."""
    kind = _kind_of(document)
    if kind == "deepspeed":
        layers = [read_deepspeed(document)]
    elif kind == "accelerate":
        layers = read_accelerate(document)
    else:
        layers = _with_json(_flat_layer(document), document)
    layers[0].notes += document.notes
    return layers


def _kind_of(document: Document) -> str:
    keys = set(document.data)
    if keys & (set(TOP_KEYS) | set(SECTIONS)) - {"mixed_precision", "fp16"}:
        return "accelerate"
    deepspeed_names = {path.split(".")[0] for path in DEEPSPEED_KEYS} | {"hf_zero"}
    if keys & (deepspeed_names - set(FLAT_KEYS)):
        return "deepspeed"
    return "deepspeed" if str(document.file).endswith(".json") else "flat"


def read_deepspeed(document: Document) -> Layer:
    """A DeepSpeed JSON. A missing stage is DeepSpeed's default, 0."""
    layer = Layer()
    document = document.without_comments()
    own = document.data.get("hf_zero")
    content = {key: value for key, value in document.data.items() if key != "hf_zero"}
    read_keys(dataclasses.replace(document, data=content), DEEPSPEED_KEYS, layer)
    if isinstance(own, Mapping):
        read_keys(document.part("hf_zero"), OWN_KEYS, layer, section="hf_zero.")
    elif own is not None:
        layer.problems.append(f"{document.label}: hf_zero is {own!r}: expected a section with keys")
    _combine_precision(layer)
    _combine_cpu_offload(layer)
    if "zero_stage" not in layer.settings and not any("zero_optimization.stage" in p for p in layer.problems):
        origin = Origin(label=document.label, file=document.file, reason="no zero_optimization.stage: DeepSpeed's 0")
        layer.put("zero_stage", 0, origin)
        layer.notes.append(f"{document.label}: names no zero_optimization.stage, so nothing is sharded (stage 0)")
    return layer


def _combine_precision(layer: Layer) -> None:
    """fp16.enabled and bf16.enabled become one mixed_precision; "auto" leaves it to the training arguments."""
    found = {
        precision: setting
        for precision, name in (("fp16", FP16_ENABLED), ("bf16", BF16_ENABLED))
        if (setting := layer.take(name)) is not None
    }
    on = {precision: setting for precision, setting in found.items() if setting.value is True}
    if len(on) == 2:
        places = " and ".join(f"{setting.origin.written} ({setting.origin.where})" for setting in on.values())
        layer.problems.append(f"{places} are both on: switch one of them off")
    elif on:
        precision, setting = next(iter(on.items()))
        layer.put("mixed_precision", precision, setting.origin)
    elif found and not any(values.is_auto(setting.value) for setting in found.values()):
        layer.put("mixed_precision", "no", next(iter(found.values())).origin)


def _combine_cpu_offload(layer: Layer) -> None:
    for name, device in (
        (CPU_OFFLOAD, "offload_optimizer_device"),
        (CPU_OFFLOAD_PARAMS, "offload_param_device"),
        (CPU_CHECKPOINTING, "offload_activations_device"),
    ):
        setting = layer.take(name)
        if setting is not None and setting.value is True:
            layer.put(device, "cpu", setting.origin)


def read_accelerate(document: Document) -> list[Layer]:
    """An Accelerate YAML (or its JSON form) with its deepspeed_config or fsdp_config section."""
    layer = Layer()
    data = document.data
    top = {key: value for key, value in data.items() if key not in SECTIONS}
    read_keys(dataclasses.replace(document, data=top), TOP_KEYS, layer)
    if "mixed_precision" in layer.settings:
        layer.take(FP16_ENABLED)  # Accelerate looks at the old switch only where the new key is missing
    _combine_precision(layer)
    _check_launch_numbers(document, layer)
    kind = str(data.get("distributed_type", "NO"))
    origin = Origin(
        label=document.label, file=document.file, line=document.line(("distributed_type",)), written="distributed_type"
    )
    if data.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        layer.problems.append(
            f"{document.label}: compute_environment is {data['compute_environment']!r}: "
            "only LOCAL_MACHINE is supported"
        )
    if kind not in (*DISTRIBUTED_TYPES, *OTHER_ACCELERATORS):
        layer.problems.append(
            f"{origin.where}: distributed_type is {kind!r}: expected one of {', '.join(DISTRIBUTED_TYPES)}"
        )
    for section in SECTIONS:
        if data.get(section) is not None and not isinstance(data[section], Mapping):
            layer.problems.append(f"{document.label}: {section} is {data[section]!r}: expected a section with keys")
            return [layer]
    if kind == "FSDP":
        if "fsdp_config" in data:
            _read_fsdp(document.part("fsdp_config"), layer)
        if "zero_stage" not in layer.settings:
            layer.put("zero_stage", 3, origin)
        return [layer]
    if data.get("deepspeed_config"):
        content = document.part("deepspeed_config")
        read_keys(content, {**DEEPSPEED_SECTION_KEYS, **OWN_KEYS}, layer, section="deepspeed_config.")
        _combine_cpu_offload(layer)
    elif kind != "DEEPSPEED":
        layer.put("zero_stage", 0, origin)
    return _with_json(layer, document)


def _check_launch_numbers(document: Document, layer: Layer) -> None:
    for name in LAUNCH_NUMBERS:
        value = document.data.get(name)
        try:
            if value is not None:
                values.to_int(value)
        except ValueError as error:
            place = Origin(label=document.label, file=document.file, line=document.line((name,)))
            layer.problems.append(f"{place.where}: {name} is {value!r}: {error}")


def read_parallelism(flags: Mapping[str, Any], label: str) -> Layer:
    """The flags of a command that stand in the parallelism_config section of an Accelerate YAML."""
    layer = Layer()
    read_keys(from_dict({"parallelism_config": dict(flags)} if flags else {}, label), TOP_KEYS, layer)
    return layer


def read_accelerate_dict(data: Mapping[str, Any], label: str) -> list[Layer]:
    return read_accelerate(from_dict(data, label))


def _with_json(layer: Layer, document: Document) -> list[Layer]:
    """Add the JSON that ``deepspeed_config_file`` names."""
    pointer = layer.take(DEEPSPEED_CONFIG_FILE)
    if pointer is None or values.is_auto(pointer.value) or pointer.value.lower() == "none":
        return [layer]
    path = Path(pointer.value).expanduser()
    if not path.is_file() and document.file is not None and not path.is_absolute():
        beside = Path(document.file).parent / path  # Accelerate looks in the current folder only
        path = beside if beside.is_file() else path
    try:
        return with_deepspeed(layer, load_document(path))
    except ZeroConfigError as error:
        layer.problems += [f"{pointer.origin.where}: deepspeed_config_file: {problem}" for problem in error.problems]
        return [layer]


def with_deepspeed(layer: Layer, document: Document) -> list[Layer]:
    """``layer`` and a DeepSpeed JSON that belongs to it; a value that differs between the two is a problem."""
    json_layer = read_deepspeed(document)
    for name, setting in json_layer.settings.items():
        other = layer.settings.get(name)
        if (
            other is None
            or other.value == setting.value
            or values.is_auto(other.value)
            or values.is_auto(setting.value)
        ):
            continue
        if setting.origin.line is None and setting.origin.reason is not None:
            continue  # the JSON does not say it, DeepSpeed's default does
        json_layer.problems.append(
            f"{name} differs: {other.origin.where} says {other.value!r}, {setting.origin.where} says "
            f"{setting.value!r}: remove it from one of the two"
        )
    if "zero_stage" in layer.settings and json_layer.settings["zero_stage"].origin.reason is not None:
        json_layer.settings.pop("zero_stage")
        json_layer.notes = [note for note in json_layer.notes if "zero_optimization.stage" not in note]
    return [layer, json_layer]


def _read_fsdp(section: Document, layer: Layer) -> None:
    named = {key if key.startswith("fsdp") else f"fsdp_{key}": key for key in section.data}
    renamed = Document(
        data={name: section.data[key] for name, key in named.items()},
        label=section.label,
        file=section.file,
        lines={(name,): section.lines[(key,)] for name, key in named.items() if (key,) in section.lines},
    )
    read_keys(renamed, FSDP_KEYS, layer, section="fsdp_config.")
    combine_fsdp(layer, version=section.data.get("fsdp_version", 1))


def combine_fsdp(layer: Layer, version: int | str) -> None:
    """FSDP's strategies are ZeRO stages: FULL_SHARD 3, SHARD_GRAD_OP 2, NO_SHARD 0."""
    _combine_cpu_offload(layer)
    strategy, reshard, offload = (layer.take(name) for name in (FSDP_STRATEGY, FSDP_RESHARD, FSDP_OFFLOAD))
    chosen = reshard if reshard is not None and str(version) == "2" else strategy or reshard
    if chosen is not None and not values.is_auto(chosen.value):
        if isinstance(chosen.value, bool):
            stage = 3 if chosen.value else 2
        else:
            stage = _STAGE_OF_STRATEGY[chosen.value]
        reason = f"{chosen.origin.written} {chosen.value} is ZeRO stage {stage}"
        layer.put("zero_stage", stage, dataclasses.replace(chosen.origin, reason=reason))
        if str(chosen.value).startswith("HYBRID"):
            layer.put("mics_shard_size", values.AUTO, dataclasses.replace(chosen.origin, reason=reason))
    if offload is not None and offload.value is True:
        layer.put("offload_optimizer_device", "cpu", offload.origin)
        asked = layer.settings.get("zero_stage")
        if asked is None or asked.value == 3:  # below it no rank has slices of weights that could be offloaded
            layer.put("offload_param_device", "cpu", offload.origin)
