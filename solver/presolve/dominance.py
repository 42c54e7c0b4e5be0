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
from solver.problem import Array, Index

Mask = NDArray[np.bool_]

MAX_OPTIONS, MAX_NEIGHBOURS = 200, 40
SMALL = 50_000  # triples of options that are compared at once, without asking first which pairs need to be
ROUNDING = 1e-9  # of the largest cost: what a mean may be off by
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
        better = self._never_worse(core, item)
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

    def _never_worse(self, core: Core, item: int) -> Mask:
        """[k, i]: whether k in place of i costs no more, and holds no more on any edge, whatever the neighbours pick.

        Large matrices are compared for those pairs only that means do not rule out.
        """
        cost, neighbours = core.costs[item], core.neighbours[item]
        swap = cost[:, None] - cost  # swap[k, i]: what k in place of i costs more, at worst
        with np.errstate(invalid="ignore"):  # -inf (i never allowed) + inf (k not allowed with i's partners)
            if not any(self._is_large(core, matrix) for matrix in neighbours.values()):
                for matrix in neighbours.values():
                    swap = swap + self._worst_of(core, matrix)
                better = swap <= 0
            else:
                least = swap
                for matrix in neighbours.values():
                    is_large = self._is_large(core, matrix)
                    least = least + (mean_swap(matrix) if is_large else self._worst_of(core, matrix))
                ks, others = np.nonzero(least <= 0)
                swaps = swap[ks, others]
                for matrix in neighbours.values():
                    is_large = self._is_large(core, matrix)
                    worst = worst_swaps(matrix, ks, others) if is_large else self._worst_of(core, matrix)[ks, others]
                    swaps = swaps + worst
                better = np.zeros(swap.shape, dtype=bool)
                better[ks, others] = swaps <= 0
        for other, matrix in neighbours.items():
            # what tied layers hold is one array at many spans
            held = {id(nbytes): nbytes for nbytes in core.edge_usages(item, other).values()}
            for nbytes in held.values():
                self._hold_no_more(core, better, matrix, nbytes)
        return better

    def _hold_no_more(self, core: Core, better: Mask, matrix: Array, nbytes: Array) -> None:
        """Take out of `better` where k holds more than i."""
        if core.is_shared(matrix) and core.is_shared(nbytes):
            key = id(matrix), id(nbytes)
            if key not in self._more:
                self._more[key] = more_held(matrix, nbytes)
            better &= ~self._more[key]
            return
        ks, others = np.nonzero(better)
        more = (nbytes[ks] > nbytes[others]) & (matrix[others] < np.inf)
        better[ks, others] = ~more.any(1)

    def _is_large(self, core: Core, matrix: Array) -> bool:
        return not core.is_shared(matrix) and len(matrix) * matrix.size > SMALL

    def _worst_of(self, core: Core, matrix: Array) -> Array:
        if not core.is_shared(matrix):
            return worst_swap(matrix)
        if id(matrix) not in self._worst:
            self._worst[id(matrix)] = worst_swap(matrix)
        return self._worst[id(matrix)]


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


def worst_swaps(matrix: Array, ks: Index, others: Index) -> Array:
    """`worst_swap` of the pairs (k, i) of these options."""
    worst = np.empty(len(ks))
    step = max(1, _CHUNK // max(1, matrix.shape[1]))
    for low in range(0, len(ks), step):
        k, i = ks[low : low + step], others[low : low + step]
        before = matrix[i]
        with np.errstate(invalid="ignore"):
            more = matrix[k] - before
        more[before == np.inf] = -np.inf
        worst[low : low + step] = more.max(1)
    return worst


def mean_swap(matrix: Array) -> Array:
    """A lower bound of `worst_swap`, in the time of a product of matrices: the mean in place of the maximum."""
    allowed = matrix < np.inf
    finite = np.where(allowed, matrix, 0.0)
    able = allowed.astype(np.float64)
    count = able.sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):  # rows that are all forbidden
        least = (finite @ able.T) / count - finite.sum(1) / count
    least -= ROUNDING * np.abs(finite).max()
    least[(1.0 - able) @ able.T > 0.5] = np.inf
    least[:, count == 0] = -np.inf
    return least
