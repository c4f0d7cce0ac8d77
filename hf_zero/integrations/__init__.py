"""Attaches the engine to accelerate, transformers and TRL by subclasses and mixins."""
