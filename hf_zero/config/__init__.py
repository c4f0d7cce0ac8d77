"""Configuration: reads what users already have (DeepSpeed JSON, Accelerate YAML) into one frozen ``ZeroConfig``."""

from hf_zero.config.consistency import hidden_size_of, settle
from hf_zero.config.origin import Origin
from hf_zero.config.schema import ZeroConfig


__all__ = ["Origin", "ZeroConfig", "hidden_size_of", "settle"]
