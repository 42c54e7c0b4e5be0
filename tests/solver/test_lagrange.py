"""The Lagrangian dual: its bound is never above the optimum, its prices mean something, it knows when nothing fits."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.solver import training_step
from solver import Edge, EdgeUsage, Problem, Usage, evaluate, solve
from solver.backends import Budget, highs, lagrange
from solver.backends.bundle import propose
from solver.backends.sweeps import Sweeps
from solver.presolve import Dead, presolve
from tests.solver.problems import assignments, random_problem


def everything(problem):
    """(cost, fits, picks) of all assignments."""
    found = []
    for picks in itertools.product(*(range(len(cost)) for cost in problem.costs)):
        evaluation = evaluate(problem, picks)
        found.append((evaluation.cost, evaluation.fits, picks))
    return found


def cores(seeds):
    """Cores of random problems with little presolve, and the least cost of each."""
    for seed in seeds:
        problem = random_problem(seed)
        if assignments(problem) > 1500:
            continue
        try:
            core = presolve(problem, {"arcs"}).core
        except Dead:
            continue
        yield seed, core, everything(core)


def soon():
    return Budget(time.monotonic() + 60)


def test_the_bound_is_never_above_the_optimum_with_the_dual_alone(monkeypatch):
    monkeypatch.setattr(lagrange._Dual, "narrow", lambda self: None)
    exact = feasible = infeasible = 0
    for seed, core, every in cores(range(400)):
        best = min((cost for cost, fits, _ in every if fits), default=math.inf)
        outcome = lagrange.run(core, soon())
        assert outcome.bound <= best + 1e-9, f"seed {seed}"
        assert outcome.cost >= best - 1e-9, f"seed {seed}"
        if outcome.picks is not None:
            evaluation = evaluate(core, outcome.picks)
            assert evaluation.fits and evaluation.cost == pytest.approx(outcome.cost), f"seed {seed}"
        if outcome.status == "infeasible":
            infeasible += 1
            assert best == math.inf, f"seed {seed}"
        feasible += best < math.inf
        exact += best < math.inf and outcome.bound >= best - 1e-6 * abs(best)
    assert exact > 0.6 * feasible > 60  # most small problems have no duality gap
    assert infeasible >= 2  # presolve finds most of these itself


def test_kernels_end_with_the_optimum():
    for seed, core, every in cores(range(200)):
        best = min((cost for cost, fits, _ in every if fits), default=math.inf)
        outcome = lagrange.run(core, soon())
        assert outcome.cost == pytest.approx(best), f"seed {seed}"
        assert outcome.status == ("optimal" if best < math.inf else "infeasible"), f"seed {seed}"


def test_reduced_costs_never_promise_too_much():
    for seed, core, every in cores(range(150)):
        sweeps = Sweeps(core)
        if not sweeps.is_consistent():
            continue
        for forth in (True, False, True):
            _, bound = sweeps.sweep(forth)
            for item, reduced in enumerate(sweeps.split(sweeps.reduced_costs(forth))):
                for option, value in enumerate(reduced):
                    least = min(cost for cost, _, picks in every if picks[item] == option)
                    assert bound + value <= least + 1e-9, f"seed {seed}"


def test_elimination_makes_the_bound_exact_where_messages_are_not(monkeypatch):
    # an odd cycle that wants neighbours to differ: half of each edge is all that messages can prove
    differ = np.array([[1.0, 0.0], [0.0, 1.0]])
    edges = tuple(Edge(u, v, differ) for u, v in itertools.combinations(range(3), 2))
    usages = (Usage(0, "hbm", 0, 1, np.array([1.0, 2.0])),)
    core = Problem((np.zeros(2),) * 3, edges, usages, limits={"hbm": 5.0})
    monkeypatch.setattr(lagrange._Dual, "narrow", lambda self: None)
    assert lagrange.run(core, soon()).bound == pytest.approx(1.0)
    monkeypatch.setattr(lagrange._Dual, "eliminated", lambda self, prices, offset, low, high: low)
    assert lagrange.run(core, soon()).bound < 0.5


def two_plans(n, limit):
    """n items, each fast and large or slow and small: the duality gap is at most one item's."""
    usages = tuple(Usage(u, "hbm", 0, 2, np.array([10.0, 4.0])) for u in range(n))
    return Problem(tuple(np.array([1.0, 2.0 + 0.01 * u]) for u in range(n)), (), usages, limits={"hbm": limit})


def test_the_price_is_the_slope_of_the_cheapest_mixture():
    outcome = lagrange.run(two_plans(6, 60.0 - 9.0), soon())  # one and a half items must shrink
    assert outcome.status == "optimal" and outcome.cost == pytest.approx(6 + 1.0 + 1.01)
    assert outcome.prices == {("hbm", 0): pytest.approx(1.01 / 6)}


def test_edge_usages_and_several_resources_are_priced_together():
    reshard = np.array([[0.0, 1.0], [1.0, 0.0]])
    held = np.array([[8.0, 2.0], [2.0, 3.0]])
    usages = (Usage(2, "host", 0, 1, np.array([5.0, 1.0])), Usage(0, "host", 0, 1, np.array([0.0, 2.0])))
    problem = Problem(
        (np.array([0.0, 1.0]), np.array([0.0, 1.0]), np.array([0.0, 4.0])),
        (Edge(0, 1, reshard), Edge(1, 2, reshard)),
        usages,
        (EdgeUsage(0, "hbm", 3, 4, held),),
        {"hbm": 4.0, "host": 6.0},
    )
    best = min(cost for cost, fits, _ in everything(problem) if fits)
    outcome = lagrange.run(problem, soon())
    assert outcome.cost == best and outcome.bound == pytest.approx(best)


def test_prices_rise_until_they_prove_that_nothing_fits():
    problem = replace(two_plans(6, 23.9), edges=(Edge(0, 1, np.array([[0.0, 1.0], [1.0, 0.0]])),))
    assert lagrange.run(problem, soon()).status == "infeasible"
    solution = solve(problem, backend="lagrange", reductions=False)
    assert solution.status == "infeasible"
    assert solution.explanation.shortages[0].enough == 24.0


def test_the_least_peak_of_a_large_core_lies_between_its_two_numbers(monkeypatch):
    monkeypatch.setattr("solver.explain.LARGE", -1)
    explained = exact = 0
    for seed in range(120):
        problem = random_problem(seed)
        if assignments(problem) > 600 or len(problem.limits) != 1:
            continue
        solution = solve(problem)
        if solution.status != "infeasible" or not solution.explanation.shortages:
            continue
        (shortage,) = solution.explanation.shortages
        allowed = [picks for cost, _, picks in everything(problem) if cost < math.inf]
        least = min(evaluate(problem, picks).peak[shortage.resource] for picks in allowed)
        assert shortage.at_least <= least * (1 + 1e-9) and (shortage.enough is None or shortage.enough >= least - 1e-9)
        explained += 1
        exact += shortage.enough == least
    assert explained > 5 and exact > 0.5 * explained


def test_the_master_finds_where_two_planes_meet():
    proposal = propose(np.array([1.0, 3.0]), np.array([[4.0], [-4.0]]), np.zeros(1), np.ones(1), 1.0)
    assert proposal.prices == pytest.approx([0.25]) and proposal.value == pytest.approx(2.0)
    assert proposal.weights == pytest.approx([0.5, 0.5]) and not proposal.at_wall
    assert propose(np.array([1.0]), np.array([[4.0]]), np.zeros(1), np.ones(1), 1.0).at_wall


@pytest.fixture(scope="module")
def step():
    """A made-up training step of 120 items, and its limit half way between the least and the free peak."""
    problem = training_step(120, 8)
    free = solve(problem)
    least = evaluate(problem, [int(usage.nbytes.argmin()) for usage in problem.usages] + [0] * 60).peak["hbm"]
    return replace(problem, limits={"hbm": 0.5 * (least + evaluate(problem, free.picks).peak["hbm"])})


def test_a_training_step_is_solved_and_proven(step):
    core = presolve(step, {"arcs"}).core
    ours, theirs = lagrange.run(core, Budget(time.monotonic() + 60, 1e-3)), highs.run(core, soon())
    assert ours.bound <= theirs.cost * (1 + 1e-9) and ours.cost >= theirs.bound * (1 - 1e-9)
    assert (ours.cost - ours.bound) / ours.cost <= 1e-3


def test_every_run_gives_the_same_picks_and_prices(step):
    first, second = (solve(step, backend="lagrange", gap=1e-3) for _ in range(2))
    assert (first.picks, first.bound, first.prices) == (second.picks, second.bound, second.prices)


def test_known_prices_and_picks_save_evaluations(step):
    cold = solve(step, backend="lagrange", gap=1e-3)
    warm = solve(step, backend="lagrange", gap=1e-3, start=cold.picks, start_prices=cold.prices)
    assert warm.cost <= cold.cost and warm.gap <= 1e-3
    assert warm.stats["evaluations"] < cold.stats["evaluations"]


def test_start_prices_of_unknown_resources_and_instants_do_no_harm():
    problem = two_plans(6, 51.0)
    strange = {("hbm", -7): 1.0, ("hbm", 99): 1e9, ("disk", 0): 3.0}
    assert solve(problem, backend="lagrange", start_prices=strange).cost == solve(problem).cost
