"""``ZeroConfig``: the one frozen description of a run that every other part of hf_zero reads."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hf_zero.config import values
from hf_zero.config.checks import WHOLE_NUMBERS, field_problems
from hf_zero.config.origin import ARGUMENTS, Origin
from hf_zero.errors import ZeroConfigError


Auto = str  # the literal "auto"; readable type hints below
Size = int | str  # a count of elements, or a byte size such as "25MB"


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """How a run shards, reduces, scales and reports. Names are DeepSpeed's and Accelerate's.

    Every field can also be written in a DeepSpeed JSON or an Accelerate YAML; see ``ZeroConfig.from_any``.
    """

    # What is sharded.
    zero_stage: int = 2
    param_access: str = "gather"
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool = True

    # Precision of compute, of the wire and of the accumulator.
    mixed_precision: str = "no"
    communication_data_type: str = "fp32"
    grad_accum_dtype: str = "fp32"

    # Values with another owner (TrainingArguments, Accelerator): compared, never silently overruled.
    gradient_accumulation_steps: int | Auto = values.AUTO
    gradient_clipping: float | Auto = values.AUTO
    train_micro_batch_size_per_gpu: int | Auto = values.AUTO
    train_batch_size: int | Auto = values.AUTO

    # Communication.
    overlap_comm: bool = True
    deterministic_reduce: bool = False
    peer_memory: bool = True
    no_sync: str = "reduce"
    reduce_bucket_size: Size | Auto = 500_000_000
    allgather_bucket_size: Size | Auto = 500_000_000
    hang_timeout_s: float = 120.0

    # Stage 3 schedule; the defaults spend the least memory. A unit travels in one collective, so small parameters
    # ride along for free and keeping them whole only costs memory: 0, where DeepSpeed has 1e5. One unit is gathered
    # ahead (DeepSpeed: 5e7 elements), and nothing is kept after forward (DeepSpeed: what is used again within 1e9).
    stage3_prefetch_bucket_size: Size | Auto = 1
    stage3_param_persistence_threshold: Size | Auto = 0
    stage3_model_persistence_threshold: int | None = None
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 0

    # Where shards live.
    offload_optimizer_device: str = "none"
    offload_optimizer_nvme_path: str | None = None
    offload_param_device: str = "none"
    offload_param_nvme_path: str | None = None

    # Checkpoints.
    async_save: bool = False

    # fp16 loss scale and skipped steps.
    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: float = 1.0
    consecutive_hysteresis: bool = False
    check_grad_overflow: bool = True
    max_consecutive_skips: int = 20

    # DeepSpeed's own optimizer and scheduler sections, {"type": ..., "params": {...}}.
    optimizer: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None

    # Reporting.
    steps_per_print: int | None = None
    wall_clock_breakdown: bool = False

    # Where each value came from and what the reader wants to say; no part of a run's identity.
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.zero3_init_flag is None:
            object.__setattr__(self, "zero3_init_flag", self.zero_stage == 3)
        for name in WHOLE_NUMBERS:  # DeepSpeed's users write 5e8, which is a float in Python
            value = getattr(self, name)
            if isinstance(value, float) and value.is_integer():
                object.__setattr__(self, name, int(value))
        problems = field_problems(self)
        if problems:
            raise ZeroConfigError(problems)

    @classmethod
    def from_any(cls, source: Any = None, **overrides: Any) -> "ZeroConfig":
        """Read a path to JSON or YAML, a dict or another ``ZeroConfig``; keyword arguments win over it."""
        from hf_zero.config.reader import read_config  # the reader builds ZeroConfig, hence the late import

        return read_config(source, **overrides)

    def replace(self, *, origin: Origin | None = None, **changes: Any) -> "ZeroConfig":
        """A copy with other values; ``origin`` says where they came from."""
        unknown = sorted(set(changes) - set(FIELD_NAMES))
        if unknown:
            raise ZeroConfigError(f"ZeroConfig has no field {unknown[0]!r}")
        if "zero_stage" in changes and "zero3_init_flag" not in self.chosen():
            changes.setdefault("zero3_init_flag", None)
        origins = dict(self.origins)
        origins.update({name: origin or Origin(label=ARGUMENTS) for name in changes if changes[name] is not None})
        return dataclasses.replace(self, **changes, origins=origins)

    def with_notes(self, notes: Iterable[str]) -> "ZeroConfig":
        return dataclasses.replace(self, notes=(*self.notes, *notes))

    @classmethod
    def default(cls, name: str) -> Any:
        return cls.__dataclass_fields__[name].default

    def is_set(self, name: str) -> bool:
        """Whether somebody wrote this value (True), or it is the default (False)."""
        return name in self.origins

    def chosen(self) -> tuple[str, ...]:
        """The fields that somebody set, in a file or (without an origin) in Python."""
        return tuple(name for name in FIELD_NAMES if self.is_set(name) or getattr(self, name) != self._unset(name))

    def _unset(self, name: str) -> Any:
        return self.zero_stage == 3 if name == "zero3_init_flag" else self.default(name)

    def where(self, name: str) -> str:
        """The place a value came from, for messages: "zero3.yaml:7", "the keyword arguments" or "default"."""
        return self.origins[name].where if name in self.origins else "default"

    def elements(self, name: str, itemsize: int) -> int:
        """A bucket size in elements; an ``auto`` that nobody resolved becomes the default."""
        value = getattr(self, name)
        return values.elements(self.default(name) if values.is_auto(value) else value, itemsize)

    def to_dict(self) -> dict[str, Any]:
        """The plain values, without origins and notes."""
        return {name: getattr(self, name) for name in FIELD_NAMES}

    def to_json(self) -> str:
        """One line of JSON for an environment variable: the values that were set, their origins, the notes."""
        content = {
            "values": {name: getattr(self, name) for name in self.chosen()},
            "origins": {name: origin.to_dict() for name, origin in self.origins.items()},
            "notes": list(self.notes),
        }
        return json.dumps(content, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "ZeroConfig":
        content = json.loads(text)
        origins = {name: Origin(**origin) for name, origin in content["origins"].items()}
        return cls(**content["values"], origins=origins, notes=tuple(content["notes"]))


FIELD_NAMES: tuple[str, ...] = tuple(spec.name for spec in fields(ZeroConfig) if spec.name not in ("origins", "notes"))
