"""What a cost matrix says about the options at its two ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver.problem import Array

# Two floats that differ by less than this share of the largest entry count as equal (rounding of a few additions).
ROUNDING = 1e-14


@dataclass(frozen=True, slots=True)
class Facts:
    """rows, columns: finite entries in each; `consistent`: none is without. row_of: for each column its only finite row
    (None if one has several).

    row_term, column_term: the matrix is their outer sum (None when it is not, or not finite).
    """

    pairs: int
    rows: NDArray[np.intp]
    columns: NDArray[np.intp]
    consistent: bool
    row_of: NDArray[np.intp] | None
    column_of: NDArray[np.intp] | None
    row_term: Array | None
    column_term: Array | None


def facts_of(cost: Array) -> Facts:
    """Look at every entry once."""
    finite = cost < np.inf
    rows, columns = finite.sum(1), finite.sum(0)
    pairs = int(rows.sum())
    row_of = finite.argmax(0) if (columns == 1).all() else None
    column_of = finite.argmax(1) if (rows == 1).all() else None
    row_term = column_term = None
    if pairs == cost.size:
        terms = cost[:, 0], cost[0] - cost[0, 0]
        if np.abs(terms[0][:, None] + terms[1] - cost).max() <= ROUNDING * np.abs(cost).max():
            row_term, column_term = terms
    return Facts(pairs, rows, columns, bool(rows.all() and columns.all()), row_of, column_of, row_term, column_term)
