"""Reads accelerate's plugin objects for DeepSpeed and FSDP: their fields say what the same keys of a YAML say."""

import enum
from collections.abc import Mapping
from typing import Any

from hf_zero.config import values
from hf_zero.config.documents import from_dict, load_document
from hf_zero.config.keys import Key, accepted, combined, table
from hf_zero.config.keys_accelerate import DEEPSPEED_SECTION_KEYS, FSDP_KEYS
from hf_zero.config.layer import Layer, read_keys
from hf_zero.config.origin import Origin
from hf_zero.config.reader import combine_fsdp, with_deepspeed
from hf_zero.errors import ZeroConfigError


_POLICY = "_fsdp_mixed_precision_policy"
_FULL_STATE = "checkpoints are Hugging Face folders that load at any number of ranks"

# The fields of FullyShardedDataParallelPlugin: the names of the YAML without "fsdp_", and some of its own.
_FSDP_FIELDS: dict[str, Key] = {
    **{name if name == "fsdp_version" else name.removeprefix("fsdp_"): key for name, key in FSDP_KEYS.items()},
    **table(
        combined("mixed_precision_policy", _POLICY, lambda policy: policy, "compute and communication dtype"),
        accepted("state_dict_config optim_state_dict_config", _FULL_STATE),
        accepted("limit_all_gathers", "gathered weights are bounded by the prefetch bucket", True),
        accepted("param_init_fn", "models are built without weights under hf_zero.zero_init"),
    ),
}


def read_deepspeed_plugin(fields: Mapping[str, Any]) -> list[Layer]:
    """The layers of a `DeepSpeedPlugin`, weakest first, of the fields that were given.

    `hf_ds_config` is a path, a dict, or an object that holds one as `config`.
    """
    layer, name = Layer(), "DeepSpeedPlugin"
    given = dict(fields)
    named = given.pop("hf_ds_config", None)
    read_keys(from_dict(given, name), DEEPSPEED_SECTION_KEYS, layer)
    named = getattr(named, "config", named)
    if named is None:
        return [layer]
    try:
        whole = from_dict(named, f"{name}: hf_ds_config") if isinstance(named, Mapping) else load_document(named)
        return with_deepspeed(layer, whole)
    except ZeroConfigError as error:
        layer.problems += [f"{name}: hf_ds_config: {problem}" for problem in error.problems]
        return [layer]


def read_fsdp_plugin(fields: Mapping[str, Any]) -> list[Layer]:
    """The layer of a `FullyShardedDataParallelPlugin`, of the fields that were given; FULL_SHARD where none says."""
    layer, name = Layer(), "FullyShardedDataParallelPlugin"
    read_keys(from_dict({field: _plain(value) for field, value in fields.items()}, name), _FSDP_FIELDS, layer)
    policy = layer.take(_POLICY)
    combine_fsdp(layer, version=fields.get("fsdp_version", 1))
    if "zero_stage" not in layer.settings:
        layer.put("zero_stage", 3, Origin(label=name, reason="FSDP's default, FULL_SHARD, is ZeRO stage 3"))
    if policy is not None:
        _put_policy(policy.value, policy.origin, layer)
    return [layer]


def _plain(value: Any) -> Any:
    """As a YAML would have it: members of enums by name, torch's offload policies as switches."""
    if isinstance(value, enum.Enum):
        return value.name
    if type(value).__name__ in ("CPUOffload", "OffloadPolicy", "CPUOffloadPolicy"):
        return getattr(value, "offload_params", type(value).__name__ == "CPUOffloadPolicy")
    return value


def _put_policy(policy: Any, origin: Origin, layer: Layer) -> None:
    """The dtypes that FSDP computes and communicates in; a word stands for both, and buffers keep theirs."""
    if isinstance(policy, Mapping):
        said = dict(policy)
    elif isinstance(policy, str):
        said = {"param_dtype": policy, "reduce_dtype": policy}
    else:
        said = {name: getattr(policy, name, None) for name in ("param_dtype", "reduce_dtype")}
    try:
        dtypes = {name: values.to_dtype(said[name]) for name in ("param_dtype", "reduce_dtype") if said.get(name)}
    except ValueError as error:
        layer.problems.append(f"{origin.where}: {origin.written} is {policy!r}: {error}")
        return
    compute = dtypes.get("param_dtype", "fp32")
    layer.put("mixed_precision", "no" if compute == "fp32" else compute, origin)
    # Without a dtype of its own FSDP sends gradients in the one that it computes in.
    layer.put("communication_data_type", dtypes.get("reduce_dtype", compute), origin)
