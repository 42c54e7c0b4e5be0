"""What stands for things made of picked rows (`masked.Picked`) with which little may be done: a list of their numbers,
the rows behind a dim of one, with their number as the last dim, turns of a loop over them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch import Tensor

from autopar.trace.indices import is_each
from autopar.trace.places import refused
from autopar.trace.reshaped import reshaped, sizes_of
from autopar.trace.rows import OPERATORS

Picked = Any  # of `autopar.trace.masked`, which calls what is here

MOST = 256  # turns of a loop


class Standing:
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


def _refusing(name: str) -> Callable[..., Any]:
    def method(self: Standing, *_: Any) -> Any:
        raise refused(name)

    return method


for _name in OPERATORS:
    setattr(Standing, f"__{_name}__", _refusing(_name))


class Listed(Standing):
    """`rows.tolist()`, an index."""

    def __iter__(self) -> Iterator[int]:
        return turns(self.rows, sys._getframe(1), int)


class Ahead(Standing):
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


class Turned(Standing):
    """`rows.T`, of rows of one dim."""

    def t(self) -> Picked:
        return self.rows

    T = property(t)

    @property
    def shape(self) -> tuple[Any, ...]:
        number, width = self.rows.shape
        return width, number

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return int(self.rows.row[0])

    def __getitem__(self, index: Any) -> Picked:
        if type(index) is not int:
            raise refused("such an index")
        return self.rows[:, index]

    def unbind(self, dim: int = 0) -> tuple[Picked, ...]:
        if dim not in (0, -2):
            raise refused("unbind over rows")
        return tuple(self[column] for column in range(len(self)))

    def __iter__(self) -> Iterator[Picked]:
        return iter(self.unbind())

    def __matmul__(self, other: Any) -> Tensor:
        """The sum over rows of the products of each with another one's."""
        if not isinstance(other, type(self.rows)) or other.key != self.rows.key or len(other.row) > 1:
            raise refused("a product over rows")
        ahead = self.rows.mask.ndim - 1
        return self.rows.kept().flatten(0, ahead).T @ other.kept().flatten(0, ahead)

    matmul = mm = __matmul__


def transposed(input: Picked, dim0: int, dim1: int) -> Any:
    order = list(range(input.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permuted(input, order)


def permuted(input: Picked, *dims: Any) -> Any:
    """Rows with their dims in another order; with their number as the last one, `Turned`."""
    order, ahead = [dim % input.ndim for dim in sizes_of(dims)], input.mask.ndim
    if order[0] == 0:
        return input.like(input.dense.permute(*range(ahead), *(dim + ahead - 1 for dim in order[1:])))
    if order != [1, 0]:
        raise refused("their number as another dim")
    return Turned(input)


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
