"""Sizes that grow: products of named sizes and numbers, such as `batch * (sequence + 1) * 64`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A growing size plus a number; without a name, the number."""

    name: str
    plus: int

    def at(self, values: Mapping[str, Any]) -> Any:
        if not self.name:
            return self.plus
        return values[self.name] + self.plus if self.plus else values[self.name]


Size = tuple[Part, ...]  # a product, the parts of a merged dim major first; () is one


def number(value: int) -> Size:
    return () if value == 1 else (Part("", value),)


def product(parts: Sequence[Part]) -> Size:
    """With neighbouring numbers put together."""
    found: list[Part] = []
    for part in parts:
        if part == Part("", 1):
            continue
        if found and not part.name and not found[-1].name:
            found[-1] = Part("", found[-1].plus * part.plus)
        else:
            found.append(part)
    return tuple(found)


def value_of(size: Size, values: Mapping[str, Any]) -> Any:
    """A number where the values are numbers, a form where they are forms."""
    return math.prod(part.at(values) for part in size)


def are_equal(one: Size, two: Size) -> bool:
    """Whether two products are the same, whatever the order of their parts."""

    def canonical(size: Size) -> tuple[int, list[Part]]:
        return math.prod(part.plus for part in size if not part.name), sorted(part for part in size if part.name)

    return canonical(one) == canonical(two)


def names_in(size: Size) -> set[str]:
    return {part.name for part in size if part.name}


def told(size: Size) -> str:
    """`batch * (sequence + 1) * 64`."""
    words = [
        f"({part.name} {'-' if part.plus < 0 else '+'} {abs(part.plus)})"
        if part.name and part.plus
        else part.name or str(part.plus)
        for part in size
    ]
    return " * ".join(words) or "1"
