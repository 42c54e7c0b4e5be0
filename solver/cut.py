"""cut: a part of a problem, in which every item has some of its options only, and the way back.

Arrays that edges or usages share stay shared where they keep the same options, which is what the speed of presolve
rests on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from solver.problem import Array, Edge, EdgeUsage, Index, Problem, Usage

Back = Callable[[Sequence[int]], tuple[int, ...]]


def cut(problem: Problem, keep: Sequence[Index]) -> tuple[Problem, Back]:
    """`keep`: of every item, the options that stay open, in rising order. `back` gives picks of the whole problem for
    picks of the part; both cost and hold the same.
    """
    label = [kept.tobytes() for kept in keep]
    known: dict[tuple[int, bytes, bytes], Array] = {}

    def matrix(array: Array, edge: Edge) -> Array:
        key = id(array), label[edge.src], label[edge.dst]
        if key not in known:
            known[key] = array[np.ix_(keep[edge.src], keep[edge.dst])]
        return known[key]

    def vector(array: Array, item: int) -> Array:
        key = id(array), label[item], b""
        if key not in known:
            known[key] = array[keep[item]]
        return known[key]

    def back(picks: Sequence[int]) -> tuple[int, ...]:
        return tuple(int(kept[pick]) for kept, pick in zip(keep, picks, strict=True))

    edge_usages = [
        EdgeUsage(usage.edge, usage.resource, usage.start, usage.end, nbytes)
        for usage in problem.edge_usages
        if (nbytes := matrix(usage.nbytes, problem.edges[usage.edge])).any()
    ]
    part = Problem(
        costs=tuple(cost[kept] for cost, kept in zip(problem.costs, keep, strict=True)),
        edges=tuple(Edge(edge.src, edge.dst, matrix(edge.cost, edge)) for edge in problem.edges),
        usages=tuple(Usage(u.item, u.resource, u.start, u.end, vector(u.nbytes, u.item)) for u in problem.usages),
        edge_usages=tuple(edge_usages),
        limits=problem.limits,
        names=problem.names,
    )
    return part, back


def inside(picks: Sequence[int], keep: Sequence[Index]) -> tuple[int, ...] | None:
    """Picks of the part for picks of the whole problem; None if they use an option that is not open."""
    found: list[int] = []
    for pick, kept in zip(picks, keep, strict=True):
        place = int(np.searchsorted(kept, pick))
        if place == len(kept) or kept[place] != pick:
            return None
        found.append(place)
    return tuple(found)
