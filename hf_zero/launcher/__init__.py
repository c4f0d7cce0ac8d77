"""The launcher: starts ranks, and carries the configuration to them and finds it there."""

from hf_zero.launcher.environment import (
    Resolved,
    check_ranks_started,
    has_accelerator,
    prepare_rank_environment,
    resolve_from_environment,
)


__all__ = [
    "Resolved",
    "check_ranks_started",
    "has_accelerator",
    "prepare_rank_environment",
    "resolve_from_environment",
]
