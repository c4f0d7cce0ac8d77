"""``ZeroConfig``: the one frozen description of a run that every other part of hf_zero reads."""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hf_zero.config import values
from hf_zero.config.checks import advice, problems_of
from hf_zero.config.layer import Layer, merge
from hf_zero.config.options import OPTIONS, Options
from hf_zero.config.origin import ARGUMENTS, Origin
from hf_zero.config.reader import read_flat, read_source
from hf_zero.errors import ZeroConfigError


@dataclass(frozen=True, kw_only=True)
class ZeroConfig(Options):
    """How a run shards, reduces, scales and reports; the fields are those of ``Options``.

    Every field can also be written in a DeepSpeed JSON or an Accelerate YAML; see ``ZeroConfig.from_any``. Raises
    ``ZeroConfigError``, with every problem of the values, where they cannot run.
    """

    def __post_init__(self) -> None:
        if self.zero3_init_flag is None:
            object.__setattr__(self, "zero3_init_flag", self.zero_stage == 3)
        for name, option in OPTIONS.items():  # DeepSpeed's users write 5e8, which is a float in Python
            value = getattr(self, name)
            if option.kind.counts and isinstance(value, float) and value.is_integer():
                object.__setattr__(self, name, int(value))
        problems = problems_of(self)
        if problems:
            raise ZeroConfigError(problems)

    @classmethod
    def from_any(cls, source: Any = None, **overrides: Any) -> "ZeroConfig":
        """Read a path to JSON or YAML, a dict or another ``ZeroConfig``; keyword arguments win over it.

        All problems of all sources are reported in one ``ZeroConfigError``.
        """
        return cls.from_layers([*read_source(source), read_flat(overrides, ARGUMENTS)])

    @classmethod
    def from_layers(cls, layers: Iterable[Layer]) -> "ZeroConfig":
        """Merge what sources say, weakest first, into one configuration."""
        merged = merge(layers)
        problems = merged.problems
        chosen = {name: setting.value for name, setting in merged.settings.items()}
        origins = {name: setting.origin for name, setting in merged.settings.items()}
        try:
            config = cls(**chosen, origins=origins, notes=tuple(merged.notes))
        except ZeroConfigError as error:
            problems += error.problems
        if problems:
            raise ZeroConfigError(problems)
        return config.with_notes(advice(config))

    def replace(self, *, origin: Origin | None = None, **changes: Any) -> "ZeroConfig":
        """A copy with other values; ``origin`` says where they came from."""
        unknown = sorted(set(changes) - set(OPTIONS))
        if unknown:
            raise ZeroConfigError(f"ZeroConfig has no field {unknown[0]!r}")
        if "zero_stage" in changes and "zero3_init_flag" not in self.chosen():
            changes.setdefault("zero3_init_flag", None)
        origins = dict(self.origins)
        origins.update({name: origin or Origin(label=ARGUMENTS) for name in changes if changes[name] is not None})
        return dataclasses.replace(self, **changes, origins=origins)

    def with_notes(self, notes: Iterable[str]) -> "ZeroConfig":
        return dataclasses.replace(self, notes=(*self.notes, *notes))

    def elements(self, name: str, itemsize: int) -> int:
        """A bucket size in elements; an ``auto`` that nobody resolved becomes the default."""
        value = getattr(self, name)
        return values.elements(self.default(name) if values.is_auto(value) else value, itemsize)

    def to_dict(self) -> dict[str, Any]:
        """The plain values, without origins and notes."""
        return {name: getattr(self, name) for name in OPTIONS}

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
