"""The contest's JSON (google/iopddl, ASPLOS 2025): one resource, one interval per item, 10^18 forbids.

Edge costs are row-major with the first listed item as the slow index; intervals are half-open.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from solver.document import cut, fields, listed, numbers, read_as, whole
from solver.problem import Array, Edge, Problem, Usage
from solver.store import write_whole

RESOURCE = "memory"
FORBIDDEN = 10**18
_ABOVE_IS_FORBIDDEN = 1e17  # sums of real costs stay below, sums of forbidden ones above


def read_contest(path: str | Path) -> Problem:
    """The problem in a .json or .json.gz file. Raises ValueError naming what is wrong with it, OSError."""
    return read_as(path, contest_problem)


def contest_problem(document: Any) -> Problem:
    """The problem in a parsed file. Raises ValueError naming what is wrong with it."""
    body = fields(fields(document, "the file", ("problem",))["problem"], "problem", ("nodes", "edges"), _MAY)
    nodes = fields(body["nodes"], "problem.nodes", ("intervals", "costs", "usages"))
    intervals = listed(nodes["intervals"], "problem.nodes.intervals")
    costs = [_costs(one, f"costs of node {k}") for k, one in enumerate(listed(nodes["costs"], "problem.nodes.costs"))]
    uses = listed(nodes["usages"], "problem.nodes.usages")
    usages = [_numbers(use, f"usages of node {k}") for k, use in enumerate(uses)]
    if not len(intervals) == len(costs) == len(usages):
        raise ValueError(f"{len(intervals)} intervals, {len(costs)} costs and {len(usages)} usages; one each per node")
    held: list[Usage] = []
    for item, (interval, nbytes) in enumerate(zip(intervals, usages, strict=True)):
        start, end = _pair(interval, f"interval of node {item}")
        if end < start:
            raise ValueError(f"interval of node {item} is [{start}, {end}): it ends before it starts")
        if len(nbytes) != len(costs[item]):
            raise ValueError(f"node {item} has {len(costs[item])} costs but {len(nbytes)} usages")
        if start < end:
            held.append(Usage(item, RESOURCE, start, end, nbytes))
    limit = body.get("usage_limit")
    if limit is not None and type(limit) not in (int, float):
        raise ValueError(f"usage_limit is {cut(limit)}; a number of bytes is needed")
    return Problem(
        costs=tuple(costs),
        edges=_edges(body["edges"], costs),
        usages=tuple(held),
        limits={} if limit is None else {RESOURCE: float(_numbers([limit], "usage_limit")[0])},
        names=tuple(f"node {k}" for k in range(len(costs))),
    )


_MAY = ("usage_limit", "name")


def _edges(edges: Any, costs: list[Array]) -> tuple[Edge, ...]:
    told = fields(edges, "problem.edges", ("nodes", "costs"))
    ends, matrices = (listed(told[name], f"problem.edges.{name}") for name in ("nodes", "costs"))
    if len(ends) != len(matrices):
        raise ValueError(f"{len(ends)} edges have ends but {len(matrices)} have costs")
    found: list[Edge] = []
    for number, (pair, flat) in enumerate(zip(ends, matrices, strict=True)):
        src, dst = _pair(pair, f"ends of edge {number}")
        if not (0 <= src < len(costs) and 0 <= dst < len(costs)):
            raise ValueError(f"edge {number} joins nodes {src} and {dst}, but the nodes are 0 to {len(costs) - 1}")
        n, m = len(costs[src]), len(costs[dst])
        cost = _costs(flat, f"costs of edge {number}")
        if len(cost) != n * m:
            raise ValueError(f"edge {number} joins {n} and {m} strategies but has {len(cost)} costs, not {n * m}")
        found.append(Edge(src, dst, cost.reshape(n, m)))
    return tuple(found)


def _pair(value: Any, what: str) -> tuple[int, int]:
    if len(pair := listed(value, what)) != 2:
        raise ValueError(f"{what} are {cut(value)}; two whole numbers are needed")
    return whole(pair[0], what), whole(pair[1], what)


def _numbers(values: Any, what: str) -> Array:
    return numbers(values, what, most=2.0**63)


def _costs(values: Any, what: str) -> Array:
    cost = _numbers(values, what)
    if cost.max(initial=0.0) > FORBIDDEN:
        raise ValueError(f"{what} overflow: {cost.max():.0f} is above 10^18, which means forbidden")
    return np.where(cost >= _ABOVE_IS_FORBIDDEN, np.inf, cost)


def contest_document(problem: Problem, name: str = "problem") -> dict[str, Any]:
    """The contest's form of a problem. Raises ValueError if it needs more than one resource or interval per item."""
    if problem.edge_usages or len(problem.limits) > 1:
        raise ValueError("the contest's form has one resource and no usages on edges")
    limited = next(iter(problem.limits), RESOURCE)
    intervals = [[0, 0] for _ in problem.costs]
    usages = [[0] * len(cost) for cost in problem.costs]
    for usage in problem.usages:
        if usage.resource != limited:
            continue
        if intervals[usage.item] != [0, 0]:
            raise ValueError(f"{problem.name(usage.item)} has several intervals; the contest's form has one")
        intervals[usage.item], usages[usage.item] = [usage.start, usage.end], [_whole(v) for v in usage.nbytes]
    body: dict[str, Any] = {
        "name": name,
        "nodes": {
            "intervals": intervals,
            "costs": [[_whole(v) for v in cost] for cost in problem.costs],
            "usages": usages,
        },
        "edges": {
            "nodes": [[edge.src, edge.dst] for edge in problem.edges],
            "costs": [[_whole(v) for v in edge.cost.ravel()] for edge in problem.edges],
        },
    }
    if problem.limits:
        body["usage_limit"] = _whole(problem.limits[limited])
    return {"problem": body}


def _whole(value: float) -> int:
    if value == np.inf:
        return FORBIDDEN
    if value != int(value):
        raise ValueError(f"{value} is not whole; the contest's form has integers only")
    return int(value)


def write_contest(problem: Problem, path: str | Path, name: str = "problem") -> None:
    """Write the contest's form, compressed if the name ends in .gz."""
    write_whole(path, json.dumps(contest_document(problem, name)).encode())
