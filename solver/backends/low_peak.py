"""The smallest peak of one resource on a large core, between a proven bound and picks: no linear program.

For weights w >= 0 of the instants that sum to 1, the peak of every picks x is at least sum_t w_t use_t(x), so the least
of that sum over all allowed x, which message passing bounds (sweeps.py), is a bound on every peak. Weight lies on the
instants where the picks found so far peak, and a little of it everywhere, so that nothing grows where nobody looks.
"""

from __future__ import annotations

import time

import numpy as np

from solver.backends.ledger import Ledger
from solver.backends.sweeps import Sweeps
from solver.problem import Problem
from solver.referee import evaluate

SPREAD = (0.5, 0.1, 0.02, 0.003, 0.0)  # share of the weight that lies on all instants alike
SWEEPS = 24


def least_peak(core: Problem, resource: str, deadline: float) -> tuple[tuple[int, ...] | None, float]:
    """(picks or None, lower bound in bytes); `core` costs nothing where it is allowed."""
    ledger, sweeps = Ledger(core), Sweeps(core)
    r = ledger.resources.index(resource)
    size = len(ledger.instants[r])
    best: tuple[int, ...] | None = None
    least, at_least = np.inf, ledger.least_peak(r)
    if not size or not sweeps.is_consistent():
        return best, at_least
    focus = np.full(size, 1.0 / size)
    for spread in SPREAD:
        weight = spread / size + (1 - spread) * focus
        items, edges = ledger.priced({(r, k): float(w) for k, w in enumerate(weight)})
        sweeps.costs = [cost + items[u] if u in items else cost for u, cost in enumerate(core.costs)]
        for number, edge in enumerate(core.edges):
            sweeps.set_edge(number, edge.cost + edges[number] if number in edges else edge.cost)
        found: tuple[int, ...] | None = None
        for turn in range(SWEEPS):
            picks, bound = sweeps.sweep(turn % 2 == 0)
            at_least = max(at_least, bound)
            peak = float(ledger.over(picks)[r].max()) + ledger.limits[r]
            if peak < least:
                evaluation = evaluate(core, picks)
                if evaluation.fits and np.isfinite(evaluation.cost):
                    best, least, found = picks, evaluation.peak[resource], picks
            if least <= at_least * (1 + 1e-9) or time.monotonic() > deadline:
                return best, at_least
        if (at := found or best) is not None:
            peak_at = int(ledger.over(at)[r].argmax())
            focus = 0.5 * focus if spread < SPREAD[0] else 0.0 * focus
            focus[peak_at] += 1.0 - focus.sum()
    return best, at_least
