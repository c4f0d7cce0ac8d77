"""The exceptions that hf_zero raises for its users; each message names the thing, the value and the fix."""

from collections.abc import Iterable


class ZeroError(Exception):
    """Root of all errors raised by hf_zero."""


class ZeroConfigError(ZeroError, ValueError):
    """A configuration that cannot be used. ``problems`` holds every finding, not only the first."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        lines = [f"{len(self.problems)} problems in the configuration:"]
        lines += [f"  {number}. {problem}" for number, problem in enumerate(self.problems, start=1)]
        return "\n".join(lines)


class ZeroImportError(ZeroError, ImportError):
    """A package that hf_zero attaches to is installed in a release that it does not know."""


class ZeroLaunchError(ZeroError, ValueError):
    """A launch command or launcher setting that hf_zero cannot start."""


class ZeroRuntimeError(ZeroError, RuntimeError):
    """Training reached a state that hf_zero refuses to continue from (overflow run, divergent ranks)."""


class ZeroCheckpointError(ZeroError, ValueError):
    """A checkpoint that is incomplete, damaged or does not match the model."""


class ZeroDamageError(ZeroCheckpointError):
    """A file of a checkpoint that cannot be read, or holds other bytes than were saved."""


class ZeroAccessError(ZeroError, RuntimeError):
    """A sharded parameter or gradient was read where that is forbidden, or changed where that has no effect."""


def first_few(items: Iterable[str], joint: str = ", ", limit: int = 5) -> str:
    """Some of many things, and how many more there are, for a message."""
    items = list(items)
    more = f"{joint if joint != ', ' else ' '}and {len(items) - limit} more" if len(items) > limit else ""
    return joint.join(items[:limit]) + more
