"""Dominance compares pairs of options one by one where a mean does not rule them out; that changes nothing."""

import numpy as np
import pytest

from solver.presolve import Dead, dominance, presolve
from solver.presolve.dominance import mean_swap, worst_swap, worst_swaps
from solver.problem import Array, Edge, EdgeUsage, Problem, Usage

EVERYTHING = 10**9


def matrix(random: np.random.Generator) -> Array:
    shape = tuple(random.integers(2, 20, 2).tolist())
    made = np.round(random.random(shape), 1) * 10.0 ** random.integers(-3, 4)
    made[random.random(shape) < random.choice([0.0, 0.2, 0.7])] = np.inf
    return made


def test_a_mean_is_a_lower_bound_and_pairs_are_those_of_the_whole() -> None:
    random = np.random.default_rng(1)
    for _ in range(300):
        cost = matrix(random)
        whole = worst_swap(cost)
        ks, others = np.nonzero(np.ones(whole.shape))
        assert np.array_equal(worst_swaps(cost, ks, others).reshape(whole.shape), whole)
        assert (mean_swap(cost) <= whole).all()


def test_large_items_are_thinned_out_like_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(2)
    fired = 0
    for _ in range(60):
        sizes = random.integers(2, 6, 4).tolist()
        held = [np.round(random.random((sizes[i], sizes[i + 1]))) for i in range(3)]
        problem = Problem(
            costs=tuple(np.round(random.random(size), 1) for size in sizes),
            edges=tuple(Edge(i, i + 1, np.round(random.random((sizes[i], sizes[i + 1])), 1)) for i in range(3)),
            usages=tuple(Usage(i, "hbm", i, i + 3, np.round(random.random(size), 1)) for i, size in enumerate(sizes)),
            edge_usages=tuple(
                EdgeUsage(i, "hbm", at, at + 2, nbytes) for i, nbytes in enumerate(held) for at in range(0, 6, 3)
            ),
            limits={"hbm": 2.5},
        )
        found: list[object] = []
        for small in (EVERYTHING, 0):
            monkeypatch.setattr(dominance, "SMALL", small)
            try:
                presolved = presolve(problem, {"slack", "dominance"})
            except Dead as dead:
                found.append(str(dead))
                continue
            fired += presolved.state.fired["dominance"]
            found.append([cost.tolist() for cost in presolved.core.costs])
        assert found[0] == found[1]
    assert fired > 20
