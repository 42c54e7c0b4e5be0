"""Dominance (keeps at least one cheapest solution): an option goes if another is never worse.

Option k dominates i at item u if swapping i for k cannot cost more whatever the neighbours pick,

    cost_u[k] - cost_u[i]
        + sum over neighbours v of max over j with (i, j) allowed of [cost_uv[k, j] - cost_uv[i, j]]  <=  0

and k holds no more than i in every component. The relation is transitive, so all dominated options of one item go at
once; of two that dominate each other the first stays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from solver.presolve.core import Core
from solver.problem import Array

Mask = NDArray[np.bool_]

MAX_OPTIONS, MAX_NEIGHBOURS = 200, 40
_CHUNK = 4_000_000  # entries of one (k, i, j) block


class Dominance:
    """Remembers the comparison of all pairs of options for matrices that several edges share."""

    def __init__(self) -> None:
        self._worst: dict[int, Array] = {}
        self._more: dict[tuple[int, int], Mask] = {}

    def apply(self, core: Core) -> bool:
        """Look once at every item whose surroundings changed; whether anything was deleted."""
        changed = False
        for item in sorted(core.stirred):
            core.stirred.discard(item)
            if core.alive[item]:
                changed |= self._thin_out(core, item)
        return changed

    def _thin_out(self, core: Core, item: int) -> bool:
        cost, neighbours = core.costs[item], core.neighbours[item]
        if not 1 < len(cost) <= MAX_OPTIONS or len(neighbours) > MAX_NEIGHBOURS or not (cost < np.inf).all():
            return False
        swap = cost[:, None] - cost  # swap[k, i]: what k in place of i costs more, at worst
        with np.errstate(invalid="ignore"):  # -inf (i never allowed) + inf (k not allowed with i's partners)
            for other, matrix in neighbours.items():
                swap = swap + self._worst_of(core, matrix)
                for nbytes in core.edge_usages(item, other).values():
                    swap[self._more_of(core, matrix, nbytes)] = np.inf
        better = swap <= 0
        if np.count_nonzero(better) == len(cost):
            return False  # no option but by itself
        for nbytes in core.components[item].values():
            better &= nbytes[:, None] <= nbytes
        # of two that dominate each other the first stays; nothing dominates itself
        order = np.arange(len(cost))
        better &= ~(better.T & (order[:, None] >= order))
        gone = better.any(0)
        if not gone.any():
            return False
        core.fired["dominance"] += 1
        core.keep(item, np.flatnonzero(~gone), "dominance")
        return True

    def _worst_of(self, core: Core, matrix: Array) -> Array:
        if not core.is_shared(matrix):
            return worst_swap(matrix)
        if id(matrix) not in self._worst:
            self._worst[id(matrix)] = worst_swap(matrix)
        return self._worst[id(matrix)]

    def _more_of(self, core: Core, matrix: Array, nbytes: Array) -> Mask:
        if not (core.is_shared(matrix) and core.is_shared(nbytes)):
            return more_held(matrix, nbytes)
        key = id(matrix), id(nbytes)
        if key not in self._more:
            self._more[key] = more_held(matrix, nbytes)
        return self._more[key]


def more_held(matrix: Array, nbytes: Array) -> Mask:
    """[k, i]: whether k holds more than i with any j that (i, j) allows."""
    more = (nbytes[:, None] > nbytes) & (matrix[None] < np.inf)
    return np.asarray(more.any(2))


def worst_swap(matrix: Array) -> Array:
    """[k, i]: max over j with (i, j) allowed of matrix[k, j] - matrix[i, j]; -inf if row i is all forbidden."""
    n, m = matrix.shape
    worst = np.empty((n, n))
    step = max(1, _CHUNK // max(1, n * m))
    for low in range(0, n, step):
        with np.errstate(invalid="ignore"):  # inf - inf, masked below
            more = matrix[low : low + step, None, :] - matrix
        more[:, matrix == np.inf] = -np.inf
        worst[low : low + step] = more.max(2)
    return worst
