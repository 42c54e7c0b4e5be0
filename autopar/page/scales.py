"""Round numbers on an axis, and places on it."""

from __future__ import annotations

import math

TICKS = 5  # about so many on an axis


def ticks(low: float, high: float, count: int = TICKS) -> list[float]:
    """Round numbers in even steps, from one at or below `low` to one at or above `high`."""
    span = max(high - low, 1e-3 * abs(high), 1e-9)
    power = 10 ** math.floor(math.log10(span / count))
    step = next(power * times for times in (1, 2, 5, 10) if power * times * count >= span)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def unit_of(nbytes: float) -> tuple[float, str]:
    """(bytes, name) of the largest unit of which there is one at least."""
    known = ((1.0, "B"), (2.0**10, "KiB"), (2.0**20, "MiB"), (2.0**30, "GiB"))
    return max(one for one in known if one[0] <= max(nbytes, 1.0))


def percentage(part: float, whole: float) -> str:
    """`12.345%`, as a place in SVG; the picture may then be of any width."""
    told = f"{100 * part / whole if whole else 0.0:.4f}".rstrip("0").rstrip(".")
    return f"{told}%"
