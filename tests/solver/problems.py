"""Random problems small enough to try every assignment, made so that every reduction has something to do."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from solver import Edge, EdgeUsage, Problem, Usage, evaluate


def random_problem(seed: int) -> Problem:
    """2 to 6 items with 1 to 4 options; integers as costs and bytes; about a third are infeasible."""
    rng = np.random.default_rng(seed)
    if seed % 10 == 9:
        return _tangled_problem(rng)
    n = int(rng.integers(2, 7))
    sizes = rng.integers(1, 5, n)
    costs = []
    for size in sizes:
        cost = rng.integers(0, 12, size).astype(float)
        cost[rng.random(size) < 0.06] = np.inf
        costs.append(cost)
    tree_like = rng.random() < 0.6
    edges = []
    for k in range(int(rng.integers(n - 1, n + 3))):
        src = int(rng.integers(0, n))
        dst = int(rng.integers(0, n)) if not tree_like or k >= n - 1 else k + 1
        if tree_like and k < n - 1:
            src = int(rng.integers(0, k + 1))
        edges.append(Edge(src, dst, _matrix(rng, int(sizes[src]), int(sizes[dst]))))
    if len(edges) > 1 and rng.random() < 0.2:
        edges.append(Edge(edges[0].src, edges[0].dst, edges[0].cost))  # the same array twice
    usages, edge_usages = [], []
    resources = ["hbm", "host"][: int(rng.integers(1, 3))]
    correlated = rng.random() < 0.3
    for item in range(n):
        for _ in range(int(rng.choice([0, 1, 1, 2]))):
            start = int(rng.integers(0, 8))
            nbytes = rng.integers(0, 9, sizes[item]).astype(float)
            if correlated:
                nbytes = np.where(costs[item] < np.inf, costs[item], 0.0) + 1
            usages.append(Usage(item, str(rng.choice(resources)), start, start + int(rng.integers(0, 5)), nbytes))
    if edges and rng.random() < 0.4:
        for _ in range(int(rng.integers(1, 3))):
            number, start = int(rng.integers(0, len(edges))), int(rng.integers(0, 8))
            nbytes = rng.integers(0, 6, edges[number].cost.shape).astype(float)
            resource = str(rng.choice(resources))
            edge_usages.append(EdgeUsage(number, resource, start, start + int(rng.integers(0, 5)), nbytes))
    limits = {name: float(rng.integers(3, 26)) for name in resources if rng.random() < 0.9}
    return Problem(tuple(costs), tuple(edges), tuple(usages), tuple(edge_usages), limits)


def _tangled_problem(rng: np.random.Generator) -> Problem:
    """Four or five items, each joined with each, so that no item has few neighbours; memory on some."""
    n = int(rng.integers(4, 6))
    costs = [rng.integers(0, 12, 3).astype(float) for _ in range(n)]
    pairs = [(u, v) for u in range(n) for v in range(u)]
    edges = [Edge(u, v, rng.integers(0, 9, (3, 3)).astype(float)) for u, v in pairs]
    usages = [Usage(u, "hbm", 0, 1, rng.integers(0, 9, 3).astype(float)) for u in range(n)]
    limits = {"hbm": float(rng.integers(10, 40))} if rng.random() < 0.5 else {}
    return Problem(tuple(costs), tuple(edges), tuple(usages), (), limits)


def _matrix(rng: np.random.Generator, n: int, m: int) -> np.ndarray:
    kind = rng.integers(0, 5)
    cost = rng.integers(0, 9, (n, m)).astype(float)
    if kind == 0:  # one end determines the other
        determined = np.full((n, m), np.inf)
        if rng.random() < 0.5:
            determined[rng.integers(0, n, m), np.arange(m)] = rng.integers(0, 4, m)
        else:
            determined[np.arange(n), rng.integers(0, m, n)] = rng.integers(0, 4, n)
        return determined
    if kind == 1:  # an outer sum
        return rng.integers(0, 4, (n, 1)) + rng.integers(0, 4, (1, m)).astype(float)
    if kind == 2:  # nearly constant, so that options dominate
        return (rng.random((n, m)) < 0.2).astype(float)
    cost[rng.random((n, m)) < (0.3 if kind == 3 else 0.0)] = np.inf
    return cost


def assignments(problem: Problem) -> int:
    """How many there are."""
    return math.prod(len(cost) for cost in problem.costs)


FORBIDDEN = 10**18
# x@W, gelu, loss, gradient of W; by hand: without a limit 29 at [0,0,0,0,0], with it 31 at [1,1,1,1,1], peak 56.
MLP_5 = {
    "problem": {
        "name": "mlp-5",
        "nodes": {
            "intervals": [[0, 9], [2, 6], [3, 8], [0, 0], [6, 9]],
            "costs": [[0, 4], [10, 10, 18], [1, 1, 2], [0, 3], [10, 12]],
            "usages": [[40, 20], [16, 16, 32], [16, 16, 32], [0, 0], [40, 20]],
        },
        "edges": {
            "nodes": [[0, 1], [1, 2], [2, 3], [4, 2], [0, 4], [0, 1]],
            "costs": [
                [0, 0, 0, 6, 0, 6],
                [0, FORBIDDEN, FORBIDDEN, FORBIDDEN, 0, FORBIDDEN, FORBIDDEN, FORBIDDEN, 0],
                [0, 2, 9, 0, 3, 3],
                [8, FORBIDDEN, 0, 4, 0, 5],
                [0, 5, 7, 0],
                [0, 1, 0, 2, 1, 0],
            ],
        },
        "usage_limit": 84,
    }
}


def grid(seed, rows=5, columns=6, options=4, share=0.7):
    """A grid of items with one edge in three holding memory, two resources, limits that bind."""
    rng = np.random.default_rng(seed)
    items = rows * columns
    pairs = [(u, u + 1) for u in range(items) if (u + 1) % columns] + [(u, u + columns) for u in range(items - columns)]
    edges = tuple(Edge(u, v, rng.uniform(0, 10, (options, options))) for u, v in pairs)
    usages = []
    for u in range(items):
        for name in ("hbm", "host"):
            start = int(rng.integers(0, items))
            usages.append(Usage(u, name, start, start + int(rng.integers(1, 12)), rng.integers(0, 50, options) * 1.0))
    edge_usages = tuple(
        EdgeUsage(e, "hbm", e, e + 4, rng.integers(0, 30, (options, options)) * 1.0) for e in range(0, len(edges), 3)
    )
    problem = Problem(tuple(rng.uniform(0, 10, options) for _ in range(items)), edges, tuple(usages), edge_usages)
    cheapest = evaluate(problem, [int(cost.argmin()) for cost in problem.costs]).peak
    return replace(problem, limits={name: share * cheapest[name] for name in ("hbm", "host")})
