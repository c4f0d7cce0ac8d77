"""Configuration: reads what users already have (DeepSpeed JSON, Accelerate YAML) into one frozen ``ZeroConfig``."""

from hf_zero.config.origin import Origin
from hf_zero.config.schema import ZeroConfig


__all__ = ["Origin", "ZeroConfig"]
