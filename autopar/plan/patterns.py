"""Names of equal layers as one: `h.*.mlp` where all of them are meant, `h.[0-3,11].mlp` where some are.

A number in a name is left out (`*`) only where every number that stands there is meant; so two patterns never look
alike, and one says which layers differ from the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import TypeVar

Index = tuple[int, ...]  # the numbers in a name, in order
K = TypeVar("K", bound=Hashable)
MOST = 3  # names that are spelled out where their numbers are no grid


def starred(path: str) -> tuple[str, Index]:
    """`h.3.mlp` -> (`h.*.mlp`, (3,))."""
    parts = path.split(".")
    return ".".join("*" if part.isdigit() else part for part in parts), tuple(int(p) for p in parts if p.isdigit())


def patterns(groups: Mapping[K, Collection[str]]) -> dict[K, dict[str, tuple[str, ...]]]:
    """Of each group of names: pattern -> the names that it stands for, in their order."""
    everywhere: dict[str, set[Index]] = defaultdict(set)
    for names in groups.values():
        for name in names:
            star, index = starred(name)
            everywhere[star].add(index)
    return {key: _of_group(names, everywhere) for key, names in groups.items()}


def _of_group(names: Iterable[str], everywhere: Mapping[str, set[Index]]) -> dict[str, tuple[str, ...]]:
    alike: dict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[starred(name)[0]].append(name)
    return {_pattern(star, members, everywhere[star]): tuple(members) for star, members in alike.items()}


def _pattern(star: str, members: list[str], everywhere: set[Index]) -> str:
    indices = {starred(name)[1] for name in members}
    columns, whole = (
        [set(column) for column in zip(*indices, strict=True)],
        [set(c) for c in zip(*everywhere, strict=True)],
    )
    told = ["*" if one == all_ and len(one) > 1 else _ranges(one) for one, all_ in zip(columns, whole, strict=True)]
    inside = {index for index in everywhere if all(n in column for n, column in zip(index, columns, strict=True))}
    if inside != indices:  # the numbers are no grid: 0.1 and 1.0, of which 0.0 and 1.1 are not meant
        shown = ", ".join(members[:MOST])
        return shown if len(members) <= MOST else f"{shown} and {len(members) - MOST} more"
    parts = iter(told)
    return ".".join(next(parts) if part == "*" else part for part in star.split("."))


def _ranges(numbers: Iterable[int]) -> str:
    """`3`, `[0-3,11]`."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    told = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in found)
    return told if told.isdigit() else f"[{told}]"
