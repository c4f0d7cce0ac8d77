"""The parser of our commands: every option may be spelled with dashes or with underscores."""

import argparse
from collections.abc import Sequence
from typing import Any


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


def _with_dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word
