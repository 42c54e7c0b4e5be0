"""A part of a problem means in it what it means in the whole; and what repeats is shared without being changed."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from solver import Edge, EdgeUsage, Problem, Usage, cut, evaluate, inside, solve
from solver.presolve import presolve
from tests.solver.problems import assignments, random_problem


def some_options(problem: Problem, seed: int) -> list[np.ndarray]:
    """At least one of every item."""
    rng = np.random.default_rng(seed)
    return [np.flatnonzero((rng.random(len(cost)) < 0.6) | (np.arange(len(cost)) == 0)) for cost in problem.costs]


def all_picks(problem: Problem) -> itertools.product:
    return itertools.product(*(range(len(cost)) for cost in problem.costs))


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_picks_of_the_part_cost_and_hold_what_they_do_in_the_whole(first):
    for seed in range(first, first + 50):
        problem = random_problem(seed)
        keep = some_options(problem, seed)
        part, back = cut(problem, keep)
        for picks in itertools.islice(all_picks(part), 200):
            mine, whole = evaluate(part, picks), evaluate(problem, back(picks))
            assert (mine.cost, mine.fits) == (whole.cost, whole.fits)
            assert all(mine.peak.get(name, 0.0) == peak for name, peak in whole.peak.items())
            assert inside(back(picks), keep) == picks


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_the_best_of_the_part_is_the_best_of_those_picks(first):
    for seed in range(first, first + 50):
        problem = random_problem(seed)
        if assignments(problem) > 600:
            continue
        keep = some_options(problem, seed)
        part, back = cut(problem, keep)
        told = [evaluate(problem, picks) for picks in all_picks(problem) if inside(picks, keep) is not None]
        best = min((one.cost for one in told if one.fits), default=math.inf)
        solution = solve(part)
        assert solution.cost == pytest.approx(best) or solution.cost == best == math.inf
        if solution.picks is not None:
            assert evaluate(problem, back(solution.picks)).cost == pytest.approx(best)


def test_picks_that_use_what_is_not_open_are_not_inside():
    keep = [np.array([0, 2]), np.array([1])]
    assert inside((2, 1), keep) == (1, 0)
    assert inside((1, 1), keep) is None and inside((2, 0), keep) is None and inside((3, 1), keep) is None


def layers(count: int, limit: float, shared: bool) -> Problem:
    """A chain of equal layers, each with an item that says whether what it made is kept until the way back."""
    rng = np.random.default_rng(3)
    forth = rng.integers(0, 9, (4, 4)).astype(float)
    mode = rng.integers(0, 9, (4, 3)).astype(float)
    mode[0, 2] = mode[3, 1] = np.inf
    held = np.outer(rng.integers(1, 6, 4), [1.0, 0.0, 0.5])
    cost, tail = rng.integers(0, 6, 4).astype(float), np.zeros(3)

    def own(array: np.ndarray) -> np.ndarray:
        return array if shared else array.copy()

    costs = [own(array) for _ in range(count) for array in (cost, tail)]
    edges = [Edge(2 * layer, 2 * layer + 1, own(mode)) for layer in range(count)]
    edges += [Edge(2 * layer, 2 * layer + 2, own(forth)) for layer in range(count - 1)]
    usages = [Usage(2 * layer, "hbm", layer, layer + 2, own(cost + 1)) for layer in range(count)]
    kept = [EdgeUsage(layer, "hbm", layer, 2 * count - layer, own(held)) for layer in range(count)]
    return Problem(tuple(costs), tuple(edges), tuple(usages), tuple(kept), {"hbm": limit})


@pytest.mark.parametrize("limit", [12.0, 20.0, 30.0])
def test_layers_that_share_their_arrays_shrink_to_the_same_core(limit):
    shared, copied = (presolve(layers(8, limit, one)).core for one in (True, False))
    for one, other in ((shared.costs, copied.costs), ([e.cost for e in shared.edges], [e.cost for e in copied.edges])):
        assert len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    for one, other in ((shared.usages, copied.usages), (shared.edge_usages, copied.edge_usages)):
        assert [(u.start, u.end, u.nbytes.tolist()) for u in one] == [
            (u.start, u.end, u.nbytes.tolist()) for u in other
        ]
    assert solve(layers(8, limit, True)).cost == solve(layers(8, limit, False)).cost


def test_arrays_that_are_shared_stay_shared_in_the_part():
    problem = layers(8, 20.0, True)
    part, _ = cut(problem, [np.array([0, 1, 3]), np.array([0, 1])] * 8)
    assert len({id(edge.cost) for edge in part.edges}) == 2 and len({id(u.nbytes) for u in part.edge_usages}) == 1


@pytest.mark.parametrize("kernels", [True, False])
def test_a_quick_answer_claims_nothing_wrong_and_is_no_worse_than_its_start(monkeypatch, kernels):
    monkeypatch.setattr("solver.driver.QUICK_PAIRS", -1)
    if not kernels:
        monkeypatch.setattr("solver.backends.kernel.QUICK_PAIRS", -1)
    looked = 0
    for seed in range(150):
        problem = random_problem(seed)
        if assignments(problem) > 600:
            continue
        told = {picks: evaluate(problem, picks) for picks in all_picks(problem)}
        fitting = [picks for picks, one in told.items() if one.fits and one.cost < math.inf]
        best = min((told[picks].cost for picks in fitting), default=math.inf)
        start = fitting[len(fitting) // 2] if fitting else None
        prices = {(name, 2): 0.5 for name in problem.limits}
        solution = solve(problem, quick=True, start=start, start_prices=prices)
        assert solution.bound <= best + 1e-9
        if start is None:
            assert solution.picks is None
            continue
        looked += 1
        assert solution.picks is not None and told[solution.picks].fits
        assert best <= solution.cost + 1e-9 and solution.cost <= told[start].cost + 1e-9
    assert looked > 50


def test_a_quick_answer_is_the_same_twice_and_near_the_best(monkeypatch):
    problem = layers(30, 60.0, True)
    exact = solve(problem)
    monkeypatch.setattr("solver.driver.QUICK_PAIRS", -1)
    monkeypatch.setattr("solver.backends.kernel.QUICK_PAIRS", -1)
    one, other = solve(problem, quick=True), solve(replace(problem), quick=True)
    assert one.picks == other.picks and one.bound == other.bound
    assert exact.cost <= one.cost * (1 + 1e-9) and one.cost <= 1.02 * exact.cost
    assert one.bound <= exact.cost * (1 + 1e-9)


def test_where_messages_are_loose_lower_prices_are_tried(monkeypatch):
    """Prices that are far too high for the whole: the bound is better than theirs, and still one."""
    problem = layers(30, 60.0, True)
    exact = solve(problem)
    for name, value in {"solver.driver.QUICK_PAIRS": -1, "solver.backends.lagrange.LOOSE": -1.0}.items():
        monkeypatch.setattr(name, value)
    monkeypatch.setattr("solver.backends.kernel.MOST_PAIRS", -1)
    high = {key: 4 * price for key, price in exact.prices.items()}
    assert high
    found = solve(problem, quick=True, start=exact.picks, start_prices=high)
    monkeypatch.setattr("solver.backends.lagrange.STEP_GAIN", math.inf)
    without = solve(problem, quick=True, start=exact.picks, start_prices=high)
    assert without.bound < found.bound <= exact.cost * (1 + 1e-9)


def test_a_quick_refusal_tells_a_bound_of_what_is_needed():
    told = 0
    for seed in range(200):
        problem = random_problem(seed)
        quick = solve(problem, quick=True)
        if quick.status != "infeasible" or not quick.explanation.shortages:
            continue
        enough = {shortage.resource: shortage.enough for shortage in solve(problem).explanation.shortages}
        for shortage in quick.explanation.shortages:
            told += 1
            assert shortage.limit < shortage.at_least and shortage.enough is None
            assert shortage.at_least <= (enough.get(shortage.resource) or math.inf) * (1 + 1e-9)
    assert told > 10


def test_where_no_memory_binds_messages_are_asked_first(monkeypatch):
    problem = replace(layers(30, 60.0, True), limits={})
    exact = solve(problem, backend="highs")
    monkeypatch.setattr("solver.driver.QUICK_PAIRS", -1)
    found = solve(problem, reductions=False)
    assert found.stats["sweeps"] > 0 and found.status == "optimal"
    assert found.cost == pytest.approx(exact.cost, rel=1e-9)
