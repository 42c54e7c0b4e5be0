# pyright: basic
"""Message passing over a core: for fixed costs a bound that never falls, picks, and what each option costs at least.

For any messages M the least of

    sum_u [cost_u + sum_v M_v->u](x_u)  +  sum_uv [cost_uv - M_u->v - M_v->u](x_u, x_v)

over all picks is the least cost itself: messages only move cost between items and edges. The sum of the least entry of
every bracket is therefore a bound. TRW-S (Kolmogorov, "Convergent tree-reweighted message passing for energy
minimization", 2006) improves the messages item by item, forth and back, so that the bound never falls. On the way it
decodes picks; where they cost no more than the bound, both are exact.
"""

from __future__ import annotations

import numpy as np

from solver.backends import compiled
from solver.backends.flat import Flat, Index, flatten
from solver.problem import Array, Problem


class Sweeps:
    """Costs may change between sweeps, by prices of memory; the messages stay and are a good start."""

    def __init__(self, core: Problem) -> None:
        self.flat: Flat = flatten(core)
        matrices = {id(edge.cost): edge.cost for edge in core.edges}.values()
        self._consistent = all(bool(ok.any(0).all() and ok.any(1).all()) for ok in (m < np.inf for m in matrices))
        flat = self.flat
        self._priced = compiled.unpriced(flat)
        self.costs, self.pairs, at = self._priced
        self._arrays = (self.costs, self.pairs, at)  # the same for numba, which takes a plain tuple sooner
        self.messages: Array = np.zeros(int(flat.message[-1]))
        ahead = np.bincount(flat.own, flat.other > flat.own, flat.items)
        behind = np.bincount(flat.own, flat.other < flat.own, flat.items)
        self._weight: Array = 1.0 / np.maximum(np.maximum(ahead, behind), 1.0)
        self._graph = flat.graph

    def is_consistent(self) -> bool:
        """Whether every option has an allowed partner on every edge; otherwise messages would be infinite."""
        return self._consistent

    def price(self, price: Array) -> None:
        """Let every option and pair cost price x bytes more than it does, with one price per position."""
        compiled.price_in(self.flat, price, self._priced)

    def sweep(self, forth: bool) -> tuple[Index, float]:
        """Send messages through all items in (reverse) order; the picks decoded on the way, and the bound."""
        picks = np.zeros(self.flat.items, dtype=np.int64)
        bound = compiled.sweep(forth, self._graph, self._arrays, self._weight, self.messages, picks)
        return picks, float(bound)

    def reduced_costs(self, forth: bool) -> Array:
        """By how much picks with this option exceed the bound of the sweep, at least. `forth`: the sweep just made.

        After a sweep every bracket (with the item's share moved to the edges ahead) is non-negative but for the least
        entries that make up the bound; the brackets that mention an option add up to what it costs.
        """
        return compiled.reduced(forth, self._graph, self._arrays, self._weight, self.messages)

    def least_costs(self, offset: float) -> list[Array]:
        """A lower bound for every option of every item at the present prices, from a sweep each way, the last one back.

        `offset`: the present prices times the room.
        """
        least = np.full(len(self.costs), -np.inf)
        for forth in (True, False):
            _, value = self.sweep(forth)
            least = np.maximum(least, value - offset + self.reduced_costs(forth))
        return self.split(least)

    def over(self, picks: Index) -> Array:
        """Bytes above the limit (negative: below) at every position."""
        return compiled.use_of(self.flat, picks) - self.flat.room

    def matrix(self, edge: int) -> Array:
        """The costs of the edge's pairs at the present prices."""
        flat = self.flat
        n, m = int(flat.options[flat.own[2 * edge]]), int(flat.options[flat.other[2 * edge]])
        start = int(self._priced.at[2 * edge])
        return self.pairs[start : start + n * m].reshape(n, m).copy()

    def split(self, values: Array) -> list[Array]:
        """One array per item out of one number per option."""
        return np.split(values, self.flat.first[1:-1])


def dearest(core: Problem) -> tuple[float, float]:
    """No picks cost more than this, and what rounding may add."""
    most: dict[int, tuple[float, float]] = {}
    for array in (edge.cost for edge in core.edges):
        if id(array) not in most:
            finite = array[array < np.inf]
            most[id(array)] = (float(finite.max()), float(np.abs(finite).max())) if finite.size else (0.0, 0.0)
    total = sum(most[id(edge.cost)][0] for edge in core.edges)
    magnitude = sum(most[id(edge.cost)][1] for edge in core.edges)
    costs = np.concatenate(core.costs)
    starts = np.cumsum([0, *(len(cost) for cost in core.costs[:-1])])
    tops = np.maximum.reduceat(np.where(costs < np.inf, costs, -np.inf), starts)
    total += float(tops[tops > -np.inf].sum())
    magnitude += float(np.maximum.reduceat(np.where(costs < np.inf, np.abs(costs), 0.0), starts).sum())
    return total, 1e-9 * magnitude
