"""Reads single configuration values: numbers written as text, byte sizes, switches and the word "auto"."""

import math
import re
from typing import Any


AUTO = "auto"

_BYTE_UNITS = {"b": 1} | {
    f"{letter}{binary}b": base**power
    for power, letter in enumerate("kmgt", start=1)
    for binary, base in (("", 1000), ("i", 1024))
}
_BYTE_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*((?:[kmgt]i?)?b)\s*$", re.IGNORECASE)
_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
}
_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


def is_auto(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() == AUTO


def is_true(value: Any) -> bool:
    """Whether a switch in an environment variable is on; anything unreadable is off."""
    return isinstance(value, str) and value.strip().lower() in _TRUE


def to_float(value: Any) -> float:
    """A number, or a number written as text: YAML reads 5e8 as a string."""
    if isinstance(value, bool):
        raise ValueError("expected a number, got a switch")
    try:
        result = float(value)
    except TypeError:
        raise ValueError(f"expected a number, got {type(value).__name__}") from None
    except ValueError:
        raise ValueError("expected a number") from None
    if not math.isfinite(result):
        raise ValueError("expected a finite number")
    return result


def to_int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d[\d_]*\s*", value):
        return int(value)
    number = to_float(value)
    if number != int(number):
        raise ValueError("expected a whole number")
    return int(number)


def to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in _TRUE | _FALSE:
        return value.strip().lower() in _TRUE
    raise ValueError("expected true or false")


def to_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected text")
    return value.strip()


def to_lower(value: Any) -> str:
    return to_text(value).lower()


def to_precision(value: Any) -> str:
    """``mixed_precision``: YAML reads an unquoted ``no`` as false."""
    if value is False:
        return "no"
    if not isinstance(value, str):
        raise ValueError("expected no, bf16 or fp16")
    return to_lower(value)


def to_count(value: Any) -> int:
    """A number of ranks; DeepSpeed writes -1 for all of them, here 0."""
    return max(0, to_int(value))


def to_interval(value: Any) -> int | None:
    """A number of steps; Accelerate writes infinity for "never"."""
    if value in (float("inf"), "inf", "Infinity"):
        return None
    return to_int(value)


def to_path(value: Any) -> str | None:
    """A folder; Accelerate writes "none" for no folder."""
    text = to_text(value)
    return None if text.lower() in ("none", "null", "") else text


def to_mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("expected a section with keys")
    return value


def to_numbers(value: Any) -> list[float]:
    if not isinstance(value, (list, tuple)):
        raise ValueError("expected a list of numbers")
    return [to_float(each) for each in value]


def to_dtype(value: Any) -> str:
    name = str(value).strip().lower().removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError("expected fp32, bf16 or fp16")
    return _DTYPES[name]


def byte_size(value: Any) -> int | None:
    """The bytes meant by text such as "25MB" or "1 GiB"; None where the value is no byte size."""
    match = _BYTE_SIZE.match(value) if isinstance(value, str) else None
    if match is None:
        return None
    count = float(match.group(1)) * _BYTE_UNITS[match.group(2).lower()]
    return None if count == float("inf") else int(count)


def to_size(value: Any) -> int | str:
    """A count of elements, or a byte size that stays text until the element size is known."""
    if byte_size(value) is not None:
        return str(value).strip()
    try:
        return to_int(value)
    except ValueError as error:
        raise ValueError(f'{error}: write a count of elements (5e8) or a byte size ("25MB")') from None


def elements(size: int | str, itemsize: int) -> int:
    """Turn a bucket size into a count of elements of ``itemsize`` bytes (at least one)."""
    nbytes = byte_size(size)
    return int(size) if nbytes is None else max(1, nbytes // itemsize)
