"""What stands for things made of picked rows (`masked.Picked`) with which little may be done: a list of their numbers,
the rows behind a dim of one, turns of a loop over them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from autopar.trace.indices import is_each
from autopar.trace.places import refused
from autopar.trace.reshaped import reshaped

Picked = Any  # of `autopar.trace.masked`, which calls what is here

MOST = 256  # turns of a loop


class _Standing:
    def __init__(self, rows: Picked) -> None:
        self.rows = rows

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise refused(getattr(func, "__name__", str(func)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refused(f".{name}")

    def __len__(self) -> int:
        raise refused("len()")


class Listed(_Standing):
    """`rows.tolist()`, an index."""

    def __iter__(self) -> Iterator[int]:
        return turns(self.rows, sys._getframe(1), int)

    def __getitem__(self, index: Any) -> Any:
        raise refused("an index of their number")


class Ahead(_Standing):
    """`x[None, rows]`."""

    def reshape(self, *sizes: Any) -> Picked:
        return reshaped("reshape", self.rows, sizes, {})

    view = reshape

    def squeeze(self, dim: int) -> Picked:
        if dim:
            raise refused("squeeze")
        return self.rows

    def __getitem__(self, index: Any) -> Picked:
        if index != 0:
            raise refused("such an index")
        return self.rows


def as_rows(index: Any) -> Any:
    """An index with rows in the place of lists of them."""
    if isinstance(index, tuple):
        return tuple(map(as_rows, index))
    return index.rows if isinstance(index, Listed) else index


def turns(rows: Picked, frame: FrameType, made: Callable[[int], Any]) -> Iterator[Any]:
    """What is made of the places of what is true, of a loop over them in code of that frame (`for expert in
    hit.nonzero():`).
    """
    if rows.mask.ndim != 1 or len(rows.mask) > MOST or not is_each(rows):
        raise refused("iterating over them")
    return rows.origins.checks.branches.turns(rows.mask, frame, made)
