"""Reward functions for GRPO, found by name, and a user's own by `path/to/file.py:function`.

Each takes `completions` (a list of replies, each a string or a list of messages) and the data set's columns as keyword
arguments, and returns one number for each reply; None leaves a reply out of that reward's mean.
"""

import importlib.util
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any


Reward = Callable[..., list[float | None]]

# One block of reasoning in front, and something after it.
_FORMAT = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>(?:(?!</?think>).)*\S\s*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_STEP = re.compile(r"^\s*(?:step \d+|\d+[.)]|[-*•]\s)|\b(?:first|second|third|next|then|finally)\b,", re.I | re.M)
_BRACES = re.compile(r"[{}]")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ANSWER_LINE = re.compile(r"answer(?: is)?\s*[:=]?\s*(\S[^\n]*)", re.I)


def text_of(completion: str | list[dict]) -> str:
    """The reply's text, whichever format the data set has."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def extract_answer(text: str) -> str | None:
    r"""What follows the reasoning as the answer: the last \boxed{}, <answer> tag or line with `Answer:`."""
    text = text.rpartition("</think>")[2]
    boxed = text.rfind(r"\boxed{")
    if boxed >= 0:
        start, depth = boxed + len(r"\boxed{"), 1
        for brace in _BRACES.finditer(text, start):
            depth += 1 if brace.group() == "{" else -1
            if depth == 0:
                return text[start : brace.start()].strip()
        return None
    for pattern in (_ANSWER_TAG, _ANSWER_LINE):
        found = pattern.findall(text)
        if found:
            return found[-1].strip()
    return None


def _same(answer: str, solution: str) -> bool:
    """Whether two answers are the same number, or else the same text."""

    def plain(value: str) -> str:
        return value.strip().strip("$").rstrip(".").replace(" ", "").casefold()

    answer, solution = plain(answer), plain(solution)
    try:
        return Decimal(answer.replace(",", "")) == Decimal(solution.replace(",", ""))
    except InvalidOperation:
        return answer == solution


def _verify(answer: str, solution: str) -> bool:
    """As `_same`, with math-verify (where it is installed) for answers that are written differently."""
    if _same(answer, solution):
        return True
    try:
        from math_verify import parse, verify
    except ImportError:
        return False
    return verify(parse(f"${solution}$"), parse(f"${answer}$"))


def accuracy(completions: list, solution: list[str], **columns: Any) -> list[float | None]:
    """1 for a reply whose answer is the solution's, else 0."""
    rewards = []
    for completion, reference in zip(completions, solution, strict=True):
        answer = extract_answer(text_of(completion))
        wanted = extract_answer(reference) or reference.strip()
        rewards.append(float(answer is not None and _verify(answer, wanted)))
    return rewards


def format_(completions: list, **columns: Any) -> list[float]:
    """1 for a reply that reasons inside one <think> block and then says something."""
    return [float(_FORMAT.fullmatch(text_of(completion)) is not None) for completion in completions]


def tag_count(completions: list, **columns: Any) -> list[float]:
    """A quarter for each of <think>, </think>, <answer>, </answer> that stands in the reply exactly once."""
    return [sum(text_of(completion).count(tag) == 1 for tag in _TAGS) / len(_TAGS) for completion in completions]


def reasoning_steps(completions: list, **columns: Any) -> list[float]:
    """How many numbered, listed or announced steps the reply has, three or more counting as 1."""
    return [min(1.0, len(_STEP.findall(text_of(completion))) / 3) for completion in completions]


def length(completions: list, solution: list[str], **columns: Any) -> list[float]:
    """From 0.5 for the shortest reply of the batch to -0.5 for the longest; a wrong reply gets 0 at most."""
    lengths = [len(text_of(completion)) for completion in completions]
    shortest, span = min(lengths), max(lengths) - min(lengths)
    if span == 0:
        return [0.0] * len(completions)
    rewards = [0.5 - (own - shortest) / span for own in lengths]
    right = accuracy(completions, solution)
    return [reward if good else min(0.0, reward) for reward, good in zip(rewards, right, strict=True)]


REWARDS: dict[str, Reward] = {
    "accuracy": accuracy,
    "format": format_,
    "tag_count": tag_count,
    "reasoning_steps": reasoning_steps,
    "length": length,
}


def find_reward(name: str) -> Reward:
    """The reward of that name, or the function of a `path/to/file.py:function`. Raises ValueError for neither."""
    if name in REWARDS:
        return REWARDS[name]
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise ValueError(
            f"reward_funcs: there is no reward {name!r}; choose from {', '.join(REWARDS)}, or give your own as "
            "path/to/file.py:function."
        )
    if not Path(file).is_file():
        raise ValueError(f"reward_funcs: {name!r}: there is no file {Path(file).absolute()}.")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"reward_funcs: {file} has no function {function!r}.")
    return found
