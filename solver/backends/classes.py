"""Options of an edge that need not be told apart, which makes the linear program smaller and changes no bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver.problem import Array

Index = NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """An edge by classes of options: the cost of a pair is row_cost + column_cost + cost of the pair of classes.

    rows, columns: the class of each option; first_rows, first_columns: an option of each class.
    """

    row_cost: Array
    column_cost: Array
    rows: Index
    columns: Index
    first_rows: Index
    first_columns: Index
    cost: Array


def classes(cost: Array, held: Sequence[Array]) -> Classes:
    """Of the edge with that cost of pairs, and these bytes."""
    row_cost, cost = _off(cost, 1)
    column_cost, cost = _off(cost, 0)
    matrices: Array = np.stack([cost, *held])
    first_rows, rows = _alike(matrices.transpose(1, 0, 2))
    first_columns, columns = _alike(matrices.transpose(2, 0, 1))
    reduced = cost[np.ix_(first_rows, first_columns)]
    return Classes(row_cost, column_cost, rows, columns, first_rows, first_columns, reduced)


def each(cost: Array) -> Classes:
    """Every option a class of its own."""
    rows, columns = _count(cost.shape[0]), _count(cost.shape[1])
    return Classes(np.zeros(len(rows)), np.zeros(len(columns)), rows, columns, rows, columns, cost)


def _off(cost: Array, axis: int) -> tuple[Array, Array]:
    """The least along an axis (0 where nothing is allowed), and the cost above it."""
    least = cost.min(axis=axis, keepdims=True)
    least[np.isinf(least)] = 0.0
    return least.reshape(-1), cost - least


def _alike(options: Array) -> tuple[Index, Index]:
    """An option of each class, and the class of each, by what stands in their matrices; classes in order of options."""
    seen: dict[bytes, int] = {}
    firsts: list[int] = []
    found = np.zeros(len(options), np.intp)
    for number, option in enumerate(options):
        found[number] = seen.setdefault(option.tobytes(), len(seen))
        if len(seen) > len(firsts):
            firsts.append(number)
    return np.array(firsts, np.intp), found


def _count(size: int) -> Index:
    return np.arange(size, dtype=np.intp)
