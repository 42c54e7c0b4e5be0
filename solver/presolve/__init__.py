"""Presolve: an exactly equivalent, smaller problem and the way back.

    normalise                 parallel edges add, self loops become item costs; always
    forbidden, single         options of infinite cost, items with one option; always
    arcs contract separable leaf aligned path        see rules.py
    slack oversized           see timeline.py
    dominance, buckets        see dominance.py, buckets.py

The cheap rules run from a queue of touched items and edges until nothing is left to do; dominance comes only then,
because it compares all pairs of options; buckets last, because it looks at whole parts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from solver.presolve import buckets, rules, timeline
from solver.presolve.core import Core, Dead, Span
from solver.presolve.dominance import Dominance
from solver.problem import Edge, EdgeUsage, Problem, Usage
from solver.referee import FITS_REL_TOL

REDUCTIONS = frozenset(
    {"arcs", "contract", "separable", "leaf", "aligned", "path", "slack", "oversized", "dominance", "buckets"}
)

__all__ = ["REDUCTIONS", "Dead", "Presolved", "presolve"]


@dataclass(frozen=True, slots=True, eq=False)
class Presolved:
    """`core` costs the same as the whole problem under lifted picks, and fits exactly when they do."""

    core: Problem
    state: Core
    items: tuple[int, ...]  # of the whole problem, in the order of the core's items

    def lift(self, picks: Sequence[int]) -> tuple[int, ...]:
        """Picks of the whole problem from picks of the core."""
        return self.state.lift(dict(zip(self.items, picks, strict=False)))

    def project(self, picks: Sequence[int]) -> tuple[int, ...] | None:
        """Picks of the core from picks of the whole problem; None if presolve deleted one of them."""
        picks_of = self.state.project(picks)
        if picks_of is None:
            return None
        own = [picks_of[item] for item in self.items]
        return tuple(own + [0] * (len(self.core.costs) - len(own)))


def presolve(problem: Problem, reductions: bool | Collection[str] = True) -> Presolved:
    """Shrink the problem by the reductions named (True: all, False: none but normalising).

    Raises Dead if no assignment is feasible, ValueError for an unknown reduction.
    """
    chosen = (REDUCTIONS if reductions else frozenset[str]()) if isinstance(reductions, bool) else frozenset(reductions)
    if unknown := sorted(chosen - REDUCTIONS):
        raise ValueError(f"unknown reductions {unknown}; known: {sorted(REDUCTIONS)}")
    state = Core(problem)
    timeline.lay_out(state)
    if "slack" in chosen:
        timeline.trim(state)
    _reduce(state, chosen)
    timeline.check_room(state)
    return _as_problem(state)


def _reduce(core: Core, chosen: frozenset[str]) -> None:
    dominance = Dominance()
    _drain(core, chosen - {"path"})  # contraction first: a path shortened too early makes a dense matrix
    for item in core.items():
        core.touch(item)
    while True:
        _drain(core, chosen)
        # from the cheapest to the dearest; after any change start over
        if "slack" in chosen and timeline.trim(core):
            continue
        if "oversized" in chosen and timeline.drop_oversized(core):
            continue
        if "dominance" in chosen and dominance.apply(core):
            continue
        break
    if "buckets" in chosen:
        buckets.eliminate(core)


def _drain(core: Core, chosen: frozenset[str]) -> None:
    """Apply the rules of one item or edge until none applies. Items first: they make edges disappear."""
    on_item = [rule for rule in (rules.leaf, rules.aligned, rules.path) if rule.__name__ in chosen]
    on_edge = [rule for rule in (rules.arcs, rules.contract, rules.separable) if rule.__name__ in chosen]
    while True:
        if (item := core.next_item()) is not None:
            if not rules.forbidden(core, item) and not rules.single(core, item):
                for rule in on_item:
                    if rule(core, item):
                        break
        elif (pair := core.next_edge()) is not None:
            for rule in on_edge:
                if rule(core, *pair):
                    break
        else:
            return


def _as_problem(core: Core) -> Presolved:
    """The living items, and one more with a single option for what is already certain (cost and bytes)."""
    items = core.items()
    number = {item: k for k, item in enumerate(items)}
    costs = [core.costs[item] for item in items]
    names = [core.problem.name(item) for item in items]
    edges: list[Edge] = []
    edge_usages: list[EdgeUsage] = []
    for u in items:
        for v in sorted(core.neighbours[u]):
            if u < v:
                edges.append(Edge(number[u], number[v], core.neighbours[u][v]))
                for span, nbytes in core.edge_usages(u, v).items():
                    edge_usages.append(EdgeUsage(len(edges) - 1, *_interval(core, span), nbytes))
    usages = [
        Usage(number[u], *_interval(core, span), held) for u in items for span, held in core.components[u].items()
    ]
    limits = {name: core.problem.limits[name] * (1 + FITS_REL_TOL / 2) for name in core.resources}
    fixed = len(items)
    for r, resource in enumerate(core.resources):
        if not len(core.points[r]):
            continue
        held = limits[resource] - core.room[r]
        turns = [0, *(np.flatnonzero(np.diff(held)) + 1).tolist()]
        for first, last in zip(turns, [*turns[1:], len(held)], strict=True):
            if held[first] > 0:
                start, end = int(core.points[r][first]), int(core.points[r][last - 1]) + 1
                usages.append(Usage(fixed, resource, start, end, held[first : first + 1]))
    core_problem = Problem(
        costs=(*costs, np.array([core.constant])),
        edges=tuple(edges),
        usages=tuple(usages),
        edge_usages=tuple(edge_usages),
        limits={name: limit for r, (name, limit) in enumerate(limits.items()) if len(core.points[r])},
        names=(*names, "(certain)"),
    )
    return Presolved(core_problem, core, tuple(items))


def _interval(core: Core, span: Span) -> tuple[str, int, int]:
    resource, first, last = span
    points = core.points[resource]
    return core.resources[resource], int(points[first]), int(points[last - 1]) + 1
