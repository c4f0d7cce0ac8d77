"""Attaches the engine to accelerate, transformers and TRL by subclasses and mixins."""

from hf_zero.tools.requirements import check_release


for _name in ("torch", "accelerate", "transformers"):
    check_release(_name)
