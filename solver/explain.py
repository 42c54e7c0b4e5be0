"""Why nothing fits: the smallest workable limit of each resource, found by minimising its peak."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from solver.backends.peak import Peak, least_peak
from solver.presolve import REDUCTIONS, Dead, presolve
from solver.problem import Array, Edge, Problem
from solver.referee import evaluate, tenants
from solver.solution import Explanation, Shortage

# The search for the smallest workable limit may outlast the deadline a little: a refusal without a number is no help.
LEAST_S = 2.0
MOST_S = 20.0
LARGE = 250_000  # allowed pairs above which the linear program takes minutes and gigabytes


def explain(problem: Problem, reason: str, deadline: float) -> Explanation:
    """Name what is too small. `reason` is what the search found out first."""
    free = _without_costs(problem)
    for reductions in ({"arcs"}, REDUCTIONS):  # arcs alone gives the plainer message
        try:
            presolve(replace(free, limits={}), reductions)
        except Dead as dead:
            return Explanation(f"no choice of options avoids all forbidden pairs, whatever the limits: {dead}")
    if not problem.limits:
        return Explanation("no choice of options avoids all forbidden pairs")
    shortages: list[Shortage] = []
    for resource in sorted(problem.limits):
        left_s = min(max(deadline - time.monotonic(), LEAST_S), MOST_S) / len(problem.limits)
        shortage = _shortage(free, resource, left_s)
        if shortage is not None:
            shortages.append(shortage)
    if not shortages:
        return Explanation(f"{reason}; each limit could be met if the others were larger")
    return Explanation("; ".join(_sentence(shortage) for shortage in shortages), tuple(shortages))


def _without_costs(problem: Problem) -> Problem:
    """The same question of what fits, where everything allowed costs nothing."""
    seen: dict[int, Array] = {}

    def free(cost: Array) -> Array:
        if id(cost) not in seen:
            seen[id(cost)] = np.where(cost < np.inf, 0.0, np.inf)
        return seen[id(cost)]

    edges = tuple(Edge(edge.src, edge.dst, free(edge.cost)) for edge in problem.edges)
    return replace(problem, costs=tuple(free(cost) for cost in problem.costs), edges=edges)


def _shortage(free: Problem, resource: str, left_s: float) -> Shortage | None:
    """None if the limit can be kept together with all others."""
    alone = False
    peak = _least_peak(free, resource, left_s)
    if peak is None:  # the other limits already fail
        alone = len(free.limits) > 1
        peak = _least_peak(replace(free, limits={resource: free.limits[resource]}), resource, left_s)
    if peak is None:
        return None
    picks, at_least = peak
    limit = free.limits[resource]
    if picks is None:
        return Shortage(resource, limit, at_least, None, 0, (), alone) if at_least > limit else None
    evaluation = evaluate(free, picks)
    enough, instant = evaluation.peak[resource], evaluation.peak_at[resource]
    if enough <= limit:
        return None
    # between the bound and the plan there may be rounding of the solver
    at_least = enough if math.isclose(at_least, enough, rel_tol=1e-6) else min(at_least, enough)
    largest = tuple(tenants(free, picks, resource, instant))
    return Shortage(resource, limit, at_least, enough, instant, largest, alone)


def _least_peak(free: Problem, resource: str, left_s: float) -> Peak | None:
    """Picks with a small peak of the resource (None: not found in time) and a lower bound; None if none exist."""
    # with this limit every choice fits, so presolve keeps all that could matter; instants must all stay, too
    roomy = 1.0
    for usages in (free.usages, free.edge_usages):
        roomy += sum(float(usage.nbytes.max()) for usage in usages if usage.resource == resource)
    try:
        presolved = presolve(replace(free, limits={**free.limits, resource: roomy}), REDUCTIONS - {"slack"})
    except Dead:
        return None
    core, deadline = presolved.core, time.monotonic() + left_s
    if resource in core.limits and sum(edge.cost.size for edge in core.edges) > LARGE:
        from solver.backends import low_peak  # compiled loops: only where needed

        found = low_peak.least_peak(core, resource, deadline)
    else:
        found = least_peak(core, resource, deadline)
    if found is None:
        return None
    picks, at_least = found
    return (None if picks is None else presolved.lift(picks)), at_least


def _sentence(shortage: Shortage) -> str:
    s = shortage
    if s.enough is None:
        need = f"at least {s.at_least:.0f} bytes are needed"
    elif s.enough == s.at_least:
        need = f"the smallest workable limit is {s.enough:.0f} bytes"
    else:
        need = f"{s.enough:.0f} bytes would do, less than {s.at_least:.0f} would not"
    held = ", ".join(f"{name} {nbytes:.0f}" for name, nbytes in s.tenants)
    where = f" (peak at instant {s.instant}; largest: {held})" if held else ""
    aside = ", other limits set aside" if s.alone else ""
    return f"{s.resource} has {s.limit:.0f} bytes, {need}{aside}{where}"
