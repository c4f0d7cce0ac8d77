"""Reads any accepted source into a ``ZeroConfig``."""

from typing import Any

from hf_zero.config.origin import Origin
from hf_zero.config.schema import ZeroConfig


def read_config(source: Any = None, **overrides: Any) -> ZeroConfig:
    config = source if isinstance(source, ZeroConfig) else ZeroConfig(**(source or {}))
    return config.replace(origin=Origin(label="argument"), **overrides) if overrides else config
