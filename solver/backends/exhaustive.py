"""Every assignment, one after the other: slow, obviously right, the yardstick of the other backends."""

from __future__ import annotations

import itertools
import math

from solver.backends import Budget
from solver.problem import Problem
from solver.referee import evaluate
from solver.solution import Outcome

MAX_ASSIGNMENTS = 1_000_000


def run(core: Problem, budget: Budget) -> Outcome:
    """Try all assignments; the first of the cheapest wins. Raises ValueError above MAX_ASSIGNMENTS."""
    del budget  # a refusal keeps it short
    assignments = math.prod(len(cost) for cost in core.costs)
    if assignments > MAX_ASSIGNMENTS:
        raise ValueError(f"{assignments:.3g} assignments are too many for the exhaustive backend ({MAX_ASSIGNMENTS:,})")
    best, best_cost = None, math.inf
    for picks in itertools.product(*(range(len(cost)) for cost in core.costs)):
        evaluation = evaluate(core, picks)
        if evaluation.fits and evaluation.cost < best_cost:
            best, best_cost = picks, evaluation.cost
    if best is None:
        return Outcome("infeasible", None, math.inf, math.inf)
    return Outcome("optimal", best, best_cost, best_cost)
