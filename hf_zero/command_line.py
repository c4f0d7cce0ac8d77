"""What our commands share: a parser that takes options with dashes or underscores, and a console for tables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from rich.console import Console


class CommandParser(argparse.ArgumentParser):
    """Options are declared with dashes and taken with underscores as well, as Accelerate's launcher takes them.

    Args:
        rest: an option that takes all words after it, which are another program's and stay as they are.
    """

    def __init__(self, *args: Any, rest: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rest = rest

    def parse_args(self, args: Sequence[str]) -> argparse.Namespace:
        words = list(args)
        end = words.index(self._rest) if self._rest in words else len(words)
        return super().parse_args([*map(_with_dashes, words[:end]), *words[end:]])


def positive(text: str) -> int:
    """The type of options that are whole numbers of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def wide_console(width: int) -> Console:
    """For tables on stdout. A pipe has no width: `width` columns keep every row of such a table on one line."""
    from rich.console import Console  # rich takes longer to import than most commands to answer

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


def _with_dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word
