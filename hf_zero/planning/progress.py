"""Tells on stderr what a plan is at: a bar on a terminal, elsewhere a line for each thing once the work has begun."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console


class Tell(Protocol):
    """Is told what begins now, and that it is number `number` of `total`, where that is known."""

    def __call__(self, text: str, number: int = 0, total: int | None = None) -> object: ...


def silent(text: str, number: int = 0, total: int | None = None) -> None:
    """Tells nobody."""


@contextlib.contextmanager
def shown() -> Iterator[Tell]:
    """Inside, what is told is shown; a bar is gone afterwards."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def tell(text: str, number: int = 0, total: int | None = None) -> None:
            bar.update(task, description=text, completed=max(0, number - 1), total=total)

        yield tell


class _Lines:
    """Prints what is told, from the first thing on that has a number: before, mistakes are found, which say enough."""

    def __init__(self) -> None:
        self._begun = False

    def __call__(self, text: str, number: int = 0, total: int | None = None) -> None:
        self._begun = self._begun or total is not None
        if self._begun:
            place = "" if total is None else f" ({number} of {total})"
            print(f"hf-zero plan: {text}{place}", file=sys.stderr, flush=True)
