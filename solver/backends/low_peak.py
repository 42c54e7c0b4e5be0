"""The smallest peak of one resource on a large core, between a proven bound and picks: no linear program.

For weights w >= 0 of the instants that sum to 1, the peak of every picks x is at least sum_t w_t use_t(x), so the least
of that sum over all allowed x, which message passing bounds (sweeps.py), is a bound on every peak. Weight lies on the
instants where the picks found so far peak, and a little of it everywhere, so that nothing grows where nobody looks.
"""

from __future__ import annotations

import time

import numpy as np

from solver.backends.sweeps import Sweeps
from solver.problem import Array, Problem
from solver.referee import evaluate

SPREAD = (0.5, 0.1, 0.02, 0.003, 0.0)  # share of the weight that lies on all instants alike
SWEEPS = 24


def least_peak(core: Problem, resource: str, deadline: float) -> tuple[tuple[int, ...] | None, float]:
    """(picks or None, lower bound in bytes); `core` costs nothing where it is allowed."""
    sweeps = Sweeps(core)
    flat = sweeps.flat
    here = np.array([name == resource for name in flat.resource], dtype=bool)
    best: tuple[int, ...] | None = None
    certain = core.limits[resource] - flat.room
    least, at_least = np.inf, float(certain[here].max(initial=0.0))
    if not here.any() or not sweeps.is_consistent():
        return best, at_least
    focus = here / here.sum()
    last: Array | None = None  # the use of the best picks
    for spread in SPREAD:
        weight = spread * here / here.sum() + (1 - spread) * focus
        sweeps.price(weight)
        offset = float(weight @ certain)
        found: Array | None = None
        for turn in range(SWEEPS):
            picks, bound = sweeps.sweep(turn % 2 == 0)
            at_least = max(at_least, bound + offset)
            use = np.where(here, sweeps.over(picks), -np.inf)
            if float(use.max()) + core.limits[resource] < least:
                evaluation = evaluate(core, picks.tolist())
                if evaluation.fits and np.isfinite(evaluation.cost):
                    best, least, found = tuple(picks.tolist()), evaluation.peak[resource], use
            if least <= at_least * (1 + 1e-9) or time.monotonic() > deadline:
                return best, at_least
        if (at := found if found is not None else last) is not None:
            last = at
            focus = 0.5 * focus if spread < SPREAD[0] else 0.0 * focus
            focus[int(at.argmax())] += 1.0 - focus.sum()
    return best, at_least
