"""The front door: the worked example, honest statuses, infeasible problems explained, prices, warm starts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from solver import BACKENDS, Edge, Problem, Usage, evaluate, solve, tenants
from solver.contest import contest_problem
from tests.solver.problems import MLP_5, assignments, random_problem


@pytest.fixture
def mlp():
    """Five items of an MLP: the example that can be solved by hand."""
    return contest_problem(MLP_5)


def test_the_referee_prices_the_worked_example(mlp):
    evaluation = evaluate(mlp, [0, 0, 0, 0, 0])
    assert (evaluation.cost, evaluation.peak["memory"], evaluation.peak_at["memory"]) == (29, 96, 6)
    assert not evaluation.fits
    assert tenants(mlp, [0, 0, 0, 0, 0], "memory", 6, 2) == [("node 0", 40), ("node 4", 40)]
    best = evaluate(mlp, [1, 1, 1, 1, 1])
    assert (best.cost, best.peak["memory"], best.fits) == (31, 56, True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reductions", [True, False])
def test_the_worked_example_has_the_known_optimum(mlp, backend, reductions):
    limited = solve(mlp, backend=backend, reductions=reductions)
    assert (limited.status, limited.picks, limited.cost) == ("optimal", (1, 1, 1, 1, 1), 31)
    assert solve(replace(mlp, limits={}), backend=backend, reductions=reductions).cost == 29


def test_the_price_of_memory_is_the_dual_of_the_binding_limit(mlp):
    # By hand: without the rules that use the limit, the LP costs 29.6 and a byte more at t = 6 saves 2/40.
    solution = solve(mlp, reductions={"arcs", "contract", "leaf", "slack", "dominance"})
    assert solution.prices == {("memory", 6): pytest.approx(0.05)}


def test_a_solution_knows_its_gap(mlp):
    solution = solve(mlp, gap=0.5)
    assert solution.bound <= solution.cost
    assert solution.gap == pytest.approx((solution.cost - solution.bound) / solution.cost)
    assert solution.gap <= 0.5


def test_a_start_is_never_made_worse_and_a_bad_start_does_no_harm(mlp):
    assert solve(mlp, start=(1, 1, 1, 1, 1)).cost == 31
    assert solve(mlp, start=(0, 0, 0, 0, 0)).cost == 31
    assert solve(mlp, start=(0, 1, 0, 0, 0)).cost == 31
    with pytest.raises(ValueError, match="4 picks for 5 items"):
        solve(mlp, start=(0, 0, 0, 0))


def test_hardly_any_time_still_gives_an_honest_answer():
    problem = random_problem(19)
    solution = solve(problem, time_limit_s=1e-6, reductions=False)
    assert solution.status in ("feasible", "unknown", "optimal")
    best = solve(problem).cost
    assert solution.bound <= best + 1e-9
    assert solution.cost >= best - 1e-9


def test_arguments_that_make_no_sense_are_refused(mlp):
    with pytest.raises(
        ValueError, match="no backend 'cplex'; known backends: auto, exhaustive, highs, lagrange, pulp_highs"
    ):
        solve(mlp, backend="cplex", reductions=False)
    with pytest.raises(ValueError, match="unknown reductions"):
        solve(mlp, reductions={"magic"})
    with pytest.raises(ValueError, match="time_limit_s=0 must be positive"):
        solve(mlp, time_limit_s=0)


def test_a_problem_without_items_costs_nothing():
    assert solve(Problem((), ())).picks == ()


def test_two_usages_that_do_not_meet_share_the_limit():
    usages = (Usage(0, "hbm", 0, 3, np.array([5.0])), Usage(1, "hbm", 3, 6, np.array([5.0])))
    problem = Problem((np.zeros(1), np.zeros(1)), (), usages, limits={"hbm": 5})
    assert solve(problem).status == "optimal"
    assert solve(replace(problem, limits={"hbm": 4.9})).status == "infeasible"


def test_infeasible_names_the_smallest_workable_limit_and_the_tenants(mlp):
    solution = solve(replace(mlp, limits={"memory": 50}))
    assert (solution.status, solution.picks, solution.cost) == ("infeasible", None, math.inf)
    (shortage,) = solution.explanation.shortages
    assert (shortage.enough, shortage.at_least, shortage.instant) == (56, 56, 6)
    assert shortage.tenants == (("node 0", 20), ("node 4", 20), ("node 2", 16))
    assert solution.explanation.text.startswith("memory has 50 bytes, the smallest workable limit is 56 bytes")


def test_the_smallest_workable_limit_is_exact():
    explained = 0
    for seed in range(120):
        problem = random_problem(seed)
        if assignments(problem) > 600 or len(problem.limits) != 1:
            continue
        solution = solve(problem)
        if solution.status != "infeasible":
            continue
        (resource,) = problem.limits
        peaks = [
            evaluation.peak[resource]
            for picks in itertools.product(*(range(len(cost)) for cost in problem.costs))
            if (evaluation := evaluate(problem, picks)).cost < math.inf
        ]
        if not peaks:
            assert "forbidden pairs" in solution.explanation.text
            continue
        explained += 1
        (shortage,) = solution.explanation.shortages
        assert (shortage.enough, shortage.at_least) == (min(peaks), min(peaks)), f"seed {seed}"
        assert solve(replace(problem, limits={resource: min(peaks)})).status == "optimal"
    assert explained > 5


def test_forbidden_pairs_that_leave_nothing_are_named():
    edge = Edge(0, 1, np.full((2, 2), np.inf))
    solution = solve(Problem((np.zeros(2), np.zeros(2)), (edge,), names=("mm", "relu")))
    assert solution.status == "infeasible"
    assert "no option of mm is left: relu forbids every option of it that is left" in solution.explanation.text


def test_every_limit_too_small_is_reported():
    usages = tuple(Usage(0, name, 0, 1, np.array([6.0, 7.0])) for name in ("hbm", "host"))
    solution = solve(Problem((np.zeros(2),), (), usages, limits={"hbm": 5, "host": 3}))
    assert [(s.resource, s.enough, s.alone) for s in solution.explanation.shortages] == [
        ("hbm", 6, True),
        ("host", 6, True),
    ]
