"""TRL trainers under ZeRO, for `from hf_zero.trl import ...`."""

from hf_zero.integrations.trl import *  # noqa: F403
