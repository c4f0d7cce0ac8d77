"""DeepSpeed's own training loop on hf_zero's engine: `import hf_zero.deepspeed as deepspeed`."""

from hf_zero.deepspeed import missing, runtime, zero
from hf_zero.deepspeed.engine import DeepSpeedEngine
from hf_zero.deepspeed.initialize import add_config_arguments, init_distributed, initialize


__all__ = ["DeepSpeedEngine", "add_config_arguments", "init_distributed", "initialize", "runtime", "zero"]
missing.install(__name__)


def __getattr__(name: str) -> object:
    raise AttributeError(missing.explain(f"{__name__}.{name}"))
