"""Numbers as people read them: bytes with a unit of their own, or all of a table in one unit; counts of parameters."""

from __future__ import annotations


BYTES = {"GB": 10**9, "MB": 10**6, "kB": 10**3, "B": 1}


def unit_for(nbytes: float) -> str:
    """The largest unit in which `nbytes` is at least 1."""
    return next((unit for unit, count in BYTES.items() if nbytes >= count), "B")


def cell(nbytes: float, unit: str) -> str:
    """Bytes in a table of this unit, with as many digits as are worth reading; "-" for none."""
    value = nbytes / BYTES[unit]
    if not nbytes:
        return "-"
    if value < 0.05:
        return "<0.1"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def size(nbytes: float) -> str:
    """Bytes with their unit: 46.0 GB."""
    unit = unit_for(nbytes)
    return f"{cell(nbytes, unit)} {unit}" if nbytes else "0 B"


def count(number: int) -> str:
    """A number of parameters: 8.03 B, 12.3 M, 631,488."""
    for letter, scale in (("B", 10**9), ("M", 10**6)):
        if number >= scale:
            return f"{number / scale:.3g} {letter}"
    return f"{number:,}"
