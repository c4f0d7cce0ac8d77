"""The part of DeepSpeed's `runtime` that training loops use: memory prints."""

from hf_zero.deepspeed.runtime import utils  # noqa: F401 (reached as an attribute)
