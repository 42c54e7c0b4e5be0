"""A kernel: the core with a few options per item only, solved by presolve and the integer program.

`least[u][i]` is a lower bound on what picks with option i at item u cost. Whoever keeps all options with least <= cap
loses only solutions dearer than cap, so the smaller of cap and the kernel's own bound is a bound for the core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from solver.backends import Budget, highs
from solver.presolve import Dead, presolve
from solver.presolve.core import Index
from solver.problem import Array, Edge, EdgeUsage, Problem, Usage
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


def restrict(core: Problem, keep: Sequence[Index]) -> Problem:
    """The core with these options only; arrays that edges share stay shared where they keep the same options."""
    label = [kept.tobytes() for kept in keep]
    cut: dict[tuple[int, bytes, bytes], Array] = {}
    edges: list[Edge] = []
    for edge in core.edges:
        key = (id(edge.cost), label[edge.src], label[edge.dst])
        if key not in cut:
            cut[key] = edge.cost[np.ix_(keep[edge.src], keep[edge.dst])]
        edges.append(Edge(edge.src, edge.dst, cut[key]))
    usages = [Usage(u.item, u.resource, u.start, u.end, u.nbytes[keep[u.item]]) for u in core.usages]
    edge_usages: list[EdgeUsage] = []
    for u in core.edge_usages:
        edge = core.edges[u.edge]
        nbytes = u.nbytes[np.ix_(keep[edge.src], keep[edge.dst])]
        if nbytes.any():
            edge_usages.append(EdgeUsage(u.edge, u.resource, u.start, u.end, nbytes))
    costs = tuple(cost[kept] for cost, kept in zip(core.costs, keep, strict=True))
    return replace(core, costs=costs, edges=tuple(edges), usages=tuple(usages), edge_usages=tuple(edge_usages))


def solve(core: Problem, keep: Sequence[Index], budget: Budget, most_pairs: int = MOST_PAIRS) -> Answer | None:
    """The best picks that use only the options kept; None if the kernel is too large."""
    try:
        presolved = presolve(restrict(core, keep))
    except Dead:
        return Answer(None, math.inf, 0)
    pairs = sum(edge.cost.size for edge in presolved.core.edges)
    if pairs > most_pairs:
        return None
    if not presolved.items:
        picks, bound = presolved.lift((0,)), float(presolved.core.costs[0][0])
    else:
        start = None
        if budget.start is not None:
            own = [int(np.searchsorted(kept, pick)) for kept, pick in zip(keep, budget.start, strict=True)]
            start = presolved.project(own)
        outcome = highs.run(presolved.core, replace(budget, start=start))
        if outcome.picks is None:
            return Answer(None, outcome.bound, pairs)
        picks, bound = presolved.lift(outcome.picks), outcome.bound
    lifted = tuple(int(kept[pick]) for kept, pick in zip(keep, picks, strict=True))
    if not evaluate(core, lifted).fits:
        return Answer(None, bound, pairs)
    return Answer(lifted, bound, pairs)
