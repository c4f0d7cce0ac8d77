"""``Origin``: where a configuration value was written, so that every message can point at it."""

import dataclasses
from dataclasses import dataclass
from typing import Any


ARGUMENTS = "the keyword arguments"  # the label of what was passed in Python


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A place where a value was set: a file and line, an argument, an environment variable."""

    label: str
    file: str | None = None
    line: int | None = None
    written: str | None = None  # the key as the user wrote it, where it is not the field's name
    reason: str | None = None  # why an "auto" became what it became

    @property
    def where(self) -> str:
        if self.file is None:
            return self.label
        return self.file if self.line is None else f"{self.file}:{self.line}"

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
