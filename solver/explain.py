"""Why nothing fits: the smallest workable limit of each resource, found by minimising its peak."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from solver.backends.peak import Peak, least_peak
from solver.presolve import REDUCTIONS, Dead, Presolved, presolve
from solver.problem import Array, Edge, Problem
from solver.referee import evaluate, tenants
from solver.solution import Explanation, Shortage

# The search for the smallest workable limit may outlast the deadline a little: a refusal without a number is no help.
LEAST_S = 2.0
MOST_S = 20.0
LARGE = 250_000  # allowed pairs above which the linear program takes minutes and gigabytes
CONTRADICTORY = "no choice of options avoids all forbidden pairs"


def explain(problem: Problem, reason: str, deadline: float, quick: bool = False) -> Explanation:
    """Name what is too small. `reason` is what the search found out first. `quick`: tell a lower bound of what is
    needed, if that is above a limit, and nothing more.
    """
    if quick:
        return _told([_bound(problem, resource) for resource in sorted(problem.limits)], reason)
    free = _without_costs(problem)
    for reductions in ({"arcs"}, REDUCTIONS):  # arcs alone gives the plainer message
        try:
            presolve(replace(free, limits={}), reductions)
        except Dead as dead:
            return Explanation(f"{CONTRADICTORY}, whatever the limits: {dead}", contradictory=True)
    if not problem.limits:
        return Explanation(CONTRADICTORY, contradictory=True)
    shortages: list[Shortage | None] = []
    for resource in sorted(problem.limits):
        left_s = min(max(deadline - time.monotonic(), LEAST_S), MOST_S) / len(problem.limits)
        shortages.append(_shortage(free, resource, left_s))
    return _told(shortages, f"{reason}; each limit could be met if the others were larger")


def _told(shortages: Sequence[Shortage | None], otherwise: str) -> Explanation:
    found = tuple(shortage for shortage in shortages if shortage is not None)
    return Explanation("; ".join(map(_sentence, found)), found) if found else Explanation(otherwise)


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
    presolved = _roomy(free, resource, REDUCTIONS - {"slack"})
    if presolved is None:
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


def _bound(problem: Problem, resource: str) -> Shortage | None:
    """What the smallest options hold at the worst instant, if that is more than the limit."""
    limit = problem.limits[resource]
    presolved = _roomy(replace(problem, limits={resource: limit}), resource, {"arcs", "contract"})
    at_least = 0.0 if presolved is None else presolved.state.certain(0)
    return Shortage(resource, limit, at_least, None, 0, (), len(problem.limits) > 1) if at_least > limit else None


def _roomy(problem: Problem, resource: str, reductions: Collection[str]) -> Presolved | None:
    """The problem with so much of the resource that every choice fits, so that presolve keeps all that could matter;
    None if no choice is left. With "slack" not all instants would stay.
    """
    most: dict[int, float] = {}
    roomy = 1.0
    for usage in (*problem.usages, *problem.edge_usages):
        if usage.resource == resource:
            if id(usage.nbytes) not in most:
                most[id(usage.nbytes)] = float(usage.nbytes.max())
            roomy += most[id(usage.nbytes)]
    try:
        return presolve(replace(problem, limits={**problem.limits, resource: roomy}), reductions)
    except Dead:
        return None


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
