"""A kernel: the core with a few options per item only, solved by presolve and the integer program.

`least[u][i]` is a lower bound on what picks with option i at item u cost. Whoever keeps all options with least <= cap
loses only solutions dearer than cap, so the smaller of cap and the kernel's own bound is a bound for the core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from solver.backends import QUICK_PAIRS, Budget, highs
from solver.cut import cut, inside
from solver.presolve import Dead, presolve
from solver.problem import Array, Index, Problem
from solver.referee import evaluate

MOST_PAIRS = 250_000  # of a kernel after presolve: above, the linear program takes minutes


@dataclass(frozen=True, slots=True)
class Answer:
    """Picks of the core (None: the kernel has none that fit, or none was found) and a bound for the kernel."""

    picks: tuple[int, ...] | None
    bound: float
    pairs: int


def chosen(least: Sequence[Array], cap: float, also: Sequence[int] | None) -> list[Index]:
    """The options with least <= cap; of every item at least its least one, and its pick in `also`."""
    keep: list[Index] = []
    for item, values in enumerate(least):
        kept = values <= cap
        kept[values.argmin()] = True
        if also is not None:
            kept[also[item]] = True
        keep.append(np.flatnonzero(kept))
    return keep


def solve(core: Problem, keep: Sequence[Index], budget: Budget, most_pairs: int = MOST_PAIRS) -> Answer | None:
    """The best picks that use only the options kept; None if the kernel is too large."""
    part, back = cut(core, keep)
    try:
        presolved = presolve(part)
    except Dead:
        return Answer(None, math.inf, 0)
    pairs = sum(edge.cost.size for edge in presolved.core.edges)
    if pairs > most_pairs or (budget.quick and pairs > QUICK_PAIRS):
        return None
    if not presolved.items:
        picks, bound = presolved.lift((0,)), float(presolved.core.costs[0][0])
    else:
        start = None
        if budget.start is not None:
            own = inside(budget.start, keep)
            start = None if own is None else presolved.project(own)
        outcome = highs.run(presolved.core, replace(budget, start=start))
        if outcome.picks is None:
            return Answer(None, outcome.bound, pairs)
        picks, bound = presolved.lift(outcome.picks), outcome.bound
    lifted = back(picks)
    if not evaluate(core, lifted).fits:
        return Answer(None, bound, pairs)
    return Answer(lifted, bound, pairs)
