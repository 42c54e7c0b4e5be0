"""Merging options that need not be told apart changes neither optimum nor bound, nor what a point costs and holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from solver import Edge, EdgeUsage, Problem, Usage, evaluate
from solver.backends.classes import classes
from solver.backends.highs import Model
from solver.backends.lowering import lower


def core(seed: int) -> Problem:
    """Items whose options are few really: the others differ from these by constants. One edge in three holds bytes."""
    rng = np.random.default_rng(seed)
    few, many, n = 3, 7, 6
    kind = rng.integers(0, few, (n, many))
    pairs = [(u, v) for u in range(n) for v in range(u)]
    edges: list[Edge] = []
    held: list[EdgeUsage] = []
    for number, (u, v) in enumerate(pairs):
        cost = rng.integers(0, 9, (few, few)).astype(float)
        cost[rng.random((few, few)) < 0.05] = np.inf
        full = cost[np.ix_(kind[u], kind[v])]
        edges.append(Edge(u, v, full + rng.integers(0, 5, (many, 1)) + rng.integers(0, 5, (1, many))))
        if number % 3 == 0:
            start = int(rng.integers(0, 6))
            nbytes = rng.integers(0, 6, (few, few)).astype(float)[np.ix_(kind[u], kind[v])]
            held.append(EdgeUsage(number, "hbm", start, start + 3, nbytes))
    usages = tuple(Usage(u, "hbm", u % 4, u % 4 + 4, rng.integers(0, 9, many).astype(float)) for u in range(n))
    costs = tuple(rng.integers(0, 12, many).astype(float) for _ in range(n))
    return Problem(costs, tuple(edges), usages, tuple(held), {"hbm": float(rng.integers(20, 40))})


def bound(problem: Problem, merged: bool) -> float | None:
    """Of the linear program with all its limits; None if it has no solution."""
    lowered = lower(problem, merged)
    model = Model(lowered, 1)
    while True:
        model.solve(30.0)
        if model.highs.getModelStatus().name != "kOptimal":
            return None
        if not model.add_violated(model.x()):
            return model.objective()


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_of_the_linear_program_is_the_same_with_fewer_columns(seed: int) -> None:
    problem = core(seed)
    assert len(lower(problem).cost) < len(lower(problem, merged=False).cost)
    found = bound(problem, True)
    assert (found is None) == (bound(problem, False) is None)
    assert found is None or found == pytest.approx(bound(problem, False), rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("merged", [True, False])
def test_a_point_keeps_the_equalities_and_costs_and_holds_what_its_picks_do(merged: bool) -> None:
    rng = np.random.default_rng(1)
    tried = 0
    for seed in range(40):
        problem = core(seed)
        lowered = lower(problem, merged)
        picks = tuple(int(pick) for pick in rng.integers(0, 7, 6))
        evaluation = evaluate(replace(problem, limits={"hbm": 1e9}), picks)
        if np.isinf(evaluation.cost):
            continue
        tried += 1
        x = lowered.point(picks)
        assert np.array_equal(np.bincount(lowered.rows, lowered.values * x[lowered.columns]), lowered.right)
        assert lowered.offset + lowered.cost @ x == pytest.approx(evaluation.cost)
        (profile,) = lowered.profiles
        assert (profile.use(x) + profile.limit - profile.room).max() == pytest.approx(evaluation.peak["hbm"])
    assert tried > 10


def test_an_edge_between_options_that_differ_by_constants_alone_has_no_columns() -> None:
    cost = np.array([[1.0, 4.0], [3.0, 6.0], [2.0, 5.0]])
    told = classes(cost, ())
    assert told.cost.tolist() == [[0.0]]
    assert (told.row_cost[:, None] + told.column_cost).tolist() == cost.tolist()
    lowered = lower(Problem((np.zeros(3), np.zeros(2)), (Edge(0, 1, cost),)))
    assert len(lowered.cost) == 5 and lowered.offset == 1.0
