"""How an option is declared: the kind of its values, what it does, and its names in each file format."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from hf_zero.config import values


def is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A set of values. Files are read leniently (`parse`), values given in Python are only checked (`problem`)."""

    parse: Callable[[Any], Any]
    problem: Callable[[Any], str | None]  # "expected ...", or None where the value is fine
    shown: str  # on the reference page
    auto: bool = False  # whether "auto" may stand until the run knows more; elsewhere it means the default
    counts: bool = False  # whether 5e8, a float in Python, means a whole number


def _kind(parse: Callable[[Any], Any], allowed: Callable[[Any], bool], expected: str, **rest: Any) -> Kind:
    def problem(value: Any) -> str | None:
        return None if allowed(value) else f"expected {expected}"

    return Kind(parse=parse, problem=problem, **rest)


def switch() -> Kind:
    return _kind(values.to_bool, lambda value: isinstance(value, bool), "True or False", shown="`true`, `false`")


def choice(*known: str, parse: Callable[[Any], str] = values.to_text) -> Kind:
    expected = " or ".join(repr(name) for name in known)
    return _kind(parse, lambda value: value in known, expected, shown=", ".join(f"`{name}`" for name in known))


def _between(value: int, lowest: int, highest: int | None) -> bool:
    return lowest <= value and (highest is None or value <= highest)


def whole(
    at_least: int,
    at_most: int | None = None,
    *,
    auto: bool = False,
    expected: str | None = None,
    parse: Callable[[Any], Any] = values.to_int,
) -> Kind:
    expected = expected or f"a whole number of at least {at_least}" + (' or "auto"' if auto else "")
    return _kind(
        parse,
        lambda value: (auto and values.is_auto(value)) or (is_whole(value) and _between(value, at_least, at_most)),
        expected,
        shown=f"from {at_least}" + ("" if at_most is None else f" to {at_most}"),
        auto=auto,
        counts=True,
    )


def one_of(*known: int) -> Kind:
    expected = " or ".join(map(str, known))
    shown = ", ".join(f"`{value}`" for value in known)
    return _kind(values.to_int, lambda value: is_whole(value) and value in known, expected, shown=shown, counts=True)


def number(allowed: Callable[[float], bool], expected: str, *, shown: str, auto: bool = False) -> Kind:
    return _kind(
        values.to_float,
        lambda value: (auto and values.is_auto(value)) or (is_number(value) and allowed(value)),
        expected,
        shown=shown,
        auto=auto,
    )


def size(at_least: int) -> Kind:
    """A count of elements, or a byte size such as "25MB"."""

    def allowed(value: Any) -> bool:
        count = values.byte_size(value) if isinstance(value, str) else value
        return values.is_auto(value) or (is_whole(count) and count >= at_least)

    expected = f'a count of elements of at least {at_least}, a byte size such as "25MB", or "auto"'
    return _kind(values.to_size, allowed, expected, shown="size", auto=True, counts=True)


def machine() -> Kind:
    return _kind(values.to_path, lambda value: isinstance(value, str), "a machine's name or file", shown="name, file")


def folder() -> Kind:
    return _kind(values.to_path, lambda value: isinstance(value, str), "the path of a folder", shown="folder")


def section(*types: str) -> Kind:
    """One of DeepSpeed's sections {"type": ..., "params": {...}}, of a known type."""

    def problem(value: Any) -> str | None:
        if not (isinstance(value, dict) and isinstance(value.get("type"), str)):
            return 'expected {"type": <name>, "params": {...}}'
        if value["type"].lower() not in (known.lower() for known in types):
            return f"the type must be one of {', '.join(types)}; or remove the section and build it in Python"
        return None

    return Kind(parse=values.to_mapping, problem=problem, shown="section")


def weights() -> Kind:
    """A list of numbers above 0, one for each rank."""

    def allowed(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and bool(value) and all(is_number(each) and each > 0 for each in value)

    return _kind(values.to_numbers, allowed, "a list of numbers above 0, one for each rank", shown="list")


def numbers(**ranges: tuple[float, float | None]) -> Kind:
    """A mapping with some of these names to numbers, each from the lowest up to, but without, the highest."""
    said = " and ".join(
        f"{name} ({'a number' if isinstance(low, float) else 'a whole number'} from {low:g}"
        + ("" if high is None else f", below {high:g}")
        + ")"
        for name, (low, high) in ranges.items()
    )

    def fits(name: str, value: Any) -> bool:
        low, high = ranges.get(name, (math.inf, None))
        right = is_number(value) if isinstance(low, float) else is_whole(value)
        return right and low <= value and (high is None or value < high)

    def allowed(value: Any) -> bool:
        return isinstance(value, dict) and all(fits(name, number) for name, number in value.items())

    return _kind(values.to_mapping, allowed, f"a section with {said}", shown="section")


@dataclass(frozen=True, kw_only=True)
class Option:
    """What is known of one field of ``ZeroConfig`` besides its type and default."""

    help: str
    kind: Kind
    deepspeed: tuple[str, ...] = ()  # its keys in a DeepSpeed JSON, today's name first
    accelerate: tuple[str, ...] = ()  # its keys in deepspeed_config of an Accelerate YAML
    own: bool = False  # whether it is a key of a JSON's "hf_zero" section, and of deepspeed_config
    argument: str | None = None  # its name among training arguments
    shared: bool = False  # whether those arguments have a say, too: both must agree
    needs: tuple[str, Any] | None = None  # the option, and its value or values, without which this has no effect
    by_machine: bool = False  # whether "auto" stands until the ranks are there, and means those of a machine


def option(
    default: Any,
    help: str,
    kind: Kind,
    *,
    zero: str = "",
    deepspeed: str = "",
    accelerate: str = "",
    both: str = "",
    own: bool = False,
    argument: str | None = None,
    shared: bool = False,
    needs: tuple[str, Any] | None = None,
    by_machine: bool = False,
) -> Any:
    """A field of ``Options``; None is a value of it where that is the default.

    Several keys are written with blanks between. `zero`: in zero_optimization of a JSON, and in deepspeed_config of a
    YAML (which has no sections). `deepspeed`: in a JSON only. `accelerate`: in deepspeed_config only. `both`: there
    and at the top level of a JSON. All options can be written under their own name in Python.
    """
    known = Option(
        help=help,
        kind=kind,
        deepspeed=(*(f"zero_optimization.{name}" for name in zero.split()), *f"{deepspeed} {both}".split()),
        accelerate=tuple(f"{accelerate} {both} {zero}".split()),
        own=own,
        argument=argument,
        shared=shared,
        needs=needs,
        by_machine=by_machine,
    )
    return field(default=default, metadata={"option": known})
