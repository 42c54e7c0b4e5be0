"""The mesh as a plain value: named axes and their sizes. torch's `DeviceMesh` is translated to it once, at the
border.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from cost_models.steps import axes_of, joined

MOST_RANKS = 2**20  # that a user may ask for: more than any cluster has, few enough that a plan takes seconds


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes of a grid of ranks, outermost first; ranks are numbered row-major (the last axis is contiguous)."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes) or not self.names:
            raise ValueError(
                f"mesh has {len(self.names)} axis names and {len(self.sizes)} sizes; give one size per name"
            )
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"mesh axis names {self.names} repeat; give each axis its own name")
        for name, size in zip(self.names, self.sizes, strict=True):
            if size < 1:
                raise ValueError(f"mesh axis {name!r} has size {size}; sizes are whole numbers from 1")

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def coordinate_bytes(self) -> int:
        """Bytes of the indices by which a program knows its rank: a 64-bit number for each of `groups`."""
        return 8 * len(self.groups)

    @property
    def groups(self) -> tuple[str, ...]:
        """The axes, and what several of them at once are called (`cost_models.steps.over`)."""
        return _groups(self)

    def places(self, axis: str) -> tuple[int, ...]:
        """Where the axis stands, or several at once do. Raises ValueError where the mesh has no such one."""
        return tuple(self.names.index(one) for one in axes_of(axis))

    def size(self, axis: str) -> int:
        """Ranks along an axis, or along several at once."""
        return math.prod(self.sizes[place] for place in self.places(axis))

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where `rank` sits on each axis."""
        where: list[int] = []
        for size in reversed(self.sizes):
            rank, index = divmod(rank, size)
            where.append(index)
        return tuple(reversed(where))

    def indices(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Of the rank that sits there: its index on each of `groups`; of several axes the last counts fastest."""
        found: list[int] = []
        for axis in self.groups:
            index = 0
            for place in self.places(axis):
                index = index * self.sizes[place] + coordinate[place]
            found.append(index)
        return tuple(found)

    def __str__(self) -> str:
        return ",".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))


def parse_mesh(text: str) -> Mesh:
    """Read `data=8,tensor=8`. Raises ValueError naming the part that does not fit."""
    names: list[str] = []
    sizes: list[int] = []
    for part in text.split(","):
        name, found, size = part.partition("=")
        if not found or not name.strip().isidentifier() or not size.strip().isdigit():
            raise ValueError(f"mesh part {part!r} is not NAME=SIZE; write for example data=8,tensor=8")
        names.append(name.strip())
        sizes.append(int(size))
    check_ranks(math.prod(sizes))
    return Mesh(tuple(names), tuple(sizes))


@cache  # asked for of every layout of every tensor
def _groups(mesh: Mesh) -> tuple[str, ...]:
    return (*mesh.names, *joined(mesh.names, mesh.sizes))


def check_ranks(ranks: int) -> None:
    """Raises ValueError for more than any cluster has: prices of single ranks take time and memory."""
    if ranks > MOST_RANKS:
        raise ValueError(f"{ranks:,} devices are more than autopar plans for; give {MOST_RANKS:,} at most")
