"""One owner for shared values: compares what every source says before anything is loaded, and resolves "auto".

Everything here is a pure function of values that were already read; nothing is loaded or started.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_zero.config import values
from hf_zero.config.options import OPTIONS
from hf_zero.config.origin import Origin
from hf_zero.config.schema import ZeroConfig
from hf_zero.errors import ZeroConfigError


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One source saying that a shared value is so."""

    name: str
    value: Any
    origin: Origin
    owned: bool = False  # said by the arguments, which own shared values


# Values that a configuration and the training arguments may both set.
SHARED = {name: option for name, option in OPTIONS.items() if option.shared}

# The field that each argument of transformers or Accelerate sets. Accelerate uses the fields' own names.
ARGUMENT_NAMES = {
    **{option.argument: name for name, option in SHARED.items() if option.argument is not None},
    **{name: name for name in SHARED},
}


def config_claims(config: ZeroConfig) -> list[Claim]:
    """What a configuration says about the shared values; "auto" says nothing."""
    return [
        Claim(name=name, value=getattr(config, name), origin=config.origins.get(name, Origin(label="ZeroConfig")))
        for name in SHARED
        if name in config.chosen() and not values.is_auto(getattr(config, name)) and not _is_weak(config, name)
    ]


def _is_weak(config: ZeroConfig, name: str) -> bool:
    """``mixed_precision: no`` in an Accelerate YAML: `accelerate config` writes it for all, so it claims nothing."""
    if name != "mixed_precision" or config.mixed_precision != "no" or not config.is_set(name):
        return False
    origin = config.origins[name]
    return origin.file is not None and origin.written in ("mixed_precision", "fp16")


def argument_claims(arguments: Mapping[str, Any], label: str) -> list[Claim]:
    """What TrainingArguments or Accelerator arguments say. Leave out (or set to None) what the user did not give.

    ``bf16=False`` and ``fp16=False`` say nothing: they are the defaults, and precision may come from the launcher.
    """
    claims: list[Claim] = []
    problems: list[str] = []
    for written, value in arguments.items():
        try:
            claims += claim_readings(written, value, Origin(label=label, written=written))
        except ZeroConfigError as error:
            problems += error.problems
    if problems:
        raise ZeroConfigError(problems)
    return claims


def claim_readings(written: str, value: Any, origin: Origin) -> list[Claim]:
    """The claim that one argument makes, or none."""
    if written in ("bf16", "fp16"):
        return [Claim(name="mixed_precision", value=written, origin=origin, owned=True)] if value is True else []
    name = ARGUMENT_NAMES.get(written)
    if name is None or value is None or values.is_auto(value):
        return []
    try:
        return [Claim(name=name, value=SHARED[name].kind.parse(value), origin=origin, owned=True)]
    except ValueError as error:
        raise ZeroConfigError(f"{origin.where}: {written} is {value!r}: {error}") from None


def check_consistency(claims: Iterable[Claim], *, world_size: int | None = None) -> dict[str, Claim]:
    """Return the agreed value of every shared name that somebody set, or raise one error with every conflict."""
    claims = list(dict.fromkeys(claims))  # a configuration and the launcher's copy of it say the same thing twice
    agreed: dict[str, Claim] = {}
    problems = []
    for name in SHARED:
        said = [claim for claim in claims if claim.name == name]
        if len({claim.value for claim in said}) > 1:
            problems.append(_conflict(name, said))
        elif said:
            agreed[name] = said[-1]
    problem = _batch_conflict(agreed, world_size)
    if problem is not None:
        problems.append(problem)
    if problems:
        raise ZeroConfigError(problems)
    return agreed


def _place(claim: Claim) -> str:
    written = claim.origin.written
    return f"{claim.origin.where} ({written})" if written is not None else claim.origin.where


def _conflict(name: str, said: Sequence[Claim]) -> str:
    lines = [f"{name} differs between its sources:"]
    lines += [f"       {claim.value!r:<8} {_place(claim)}" for claim in said]
    in_files = [claim for claim in said if not claim.owned]
    owners = [claim for claim in said if claim.owned]
    files = " and ".join(claim.origin.where for claim in in_files)
    if not in_files or not owners:
        fix = f"keep one of them{' and write auto in the other' if in_files and name != 'mixed_precision' else ''}"
    elif name == "mixed_precision":
        fix = f"make {files} say {owners[-1].value!r}, or change the arguments to match"
    else:
        fix = f'write "{name}: auto" in {files}, so that the arguments own it'
        wanted = {claim.value for claim in in_files}
        if SHARED[name].argument is not None and len(wanted) == 1:
            fix += f", or pass --{SHARED[name].argument} {wanted.pop()}"
    return "\n".join([*lines, f"       fix: {fix}"])


def _batch_conflict(agreed: Mapping[str, Claim], world_size: int | None) -> str | None:
    """train_batch_size = micro-batch x accumulation x ranks, where all four are known."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    if world_size is None or any(name not in agreed for name in names):
        return None
    total, micro, accumulation = (agreed[name] for name in names)
    product = micro.value * accumulation.value * world_size
    if total.value == product:
        return None
    return (
        f"train_batch_size is {total.value} ({_place(total)}), but micro-batch x accumulation x ranks is "
        f"{micro.value} ({_place(micro)}) x {accumulation.value} ({_place(accumulation)}) x {world_size} = {product}\n"
        f'       fix: write "train_batch_size: auto", or {product}'
    )


def hidden_size_of(model_config: Any) -> int | None:
    """The model width that "auto" sizes are computed from, under the names that model configs use."""
    for owner in (model_config, getattr(model_config, "text_config", None)):
        for name in ("hidden_size", "d_model", "n_embd"):
            width = getattr(owner, name, None)
            if isinstance(width, int):
                return width
        widths = getattr(owner, "hidden_sizes", None)
        if isinstance(widths, (list, tuple)) and widths:
            return max(widths)
    return None


def resolve_auto(
    config: ZeroConfig,
    *,
    agreed: Mapping[str, Claim] | None = None,
    world_size: int | None = None,
    hidden_size: int | None = None,
) -> ZeroConfig:
    """Replace every "auto" by a value and record why.

    Batch sizes that nobody knows stay "auto", and so does what follows from the machines that ranks are on.
    """
    agreed = agreed or {}
    resolved: dict[str, tuple[Any, Origin]] = {}
    for name in SHARED:
        unset = not config.is_set(name) or values.is_auto(getattr(config, name)) or _is_weak(config, name)
        if unset and name in agreed:
            claim = agreed[name]
            resolved[name] = (claim.value, _because(config, name, f"{_place(claim)}"))
    for name, value, reason in (
        ("gradient_accumulation_steps", 1, "nobody set it"),
        ("gradient_clipping", 0.0, "nobody asked for clipping"),
    ):
        if name not in resolved and values.is_auto(getattr(config, name)):
            resolved[name] = (value, _because(config, name, reason))
    micro: Any = resolved.get("train_micro_batch_size_per_gpu", (config.train_micro_batch_size_per_gpu,))[0]
    accumulation: Any = resolved.get("gradient_accumulation_steps", (config.gradient_accumulation_steps,))[0]
    if values.is_auto(config.train_batch_size) and not values.is_auto(micro) and world_size is not None:
        total = micro * accumulation * world_size
        reason = f"micro-batch x accumulation x ranks = {micro} x {accumulation} x {world_size}"
        resolved["train_batch_size"] = (total, _because(config, "train_batch_size", reason))
    for name, option in OPTIONS.items():
        if option.kind.auto and not (option.shared or option.by_machine) and values.is_auto(getattr(config, name)):
            value, reason = _auto_size(name, hidden_size)
            resolved[name] = (value, _because(config, name, reason))
    for name, (value, origin) in resolved.items():
        config = config.replace(origin=origin, **{name: value})
    return config


def _auto_size(name: str, hidden_size: int | None) -> tuple[int, str]:
    formulas = {
        "reduce_bucket_size": (lambda width: width * width, "hidden_size squared"),
        "stage3_prefetch_bucket_size": (lambda width: int(0.9 * width * width), "0.9 x hidden_size squared"),
        "stage3_param_persistence_threshold": (lambda width: 10 * width, "10 x hidden_size"),
    }
    if hidden_size is None or name not in formulas:
        return ZeroConfig.default(name), "the default" + ("" if name not in formulas else ", no hidden_size known")
    formula, what = formulas[name]
    return formula(hidden_size), f"{what}, hidden_size is {hidden_size}"


def _because(config: ZeroConfig, name: str, reason: str) -> Origin:
    return dataclasses.replace(config.origins.get(name, Origin(label="auto")), reason=f"auto: {reason}")
