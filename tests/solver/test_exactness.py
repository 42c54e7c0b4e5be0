"""Every backend and every reduction finds the cost that trying all assignments finds."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter

import numpy as np
import pytest

from solver import BACKENDS, REDUCTIONS, Edge, EdgeUsage, Problem, Usage, evaluate, solve
from solver.backends import Budget, race
from solver.presolve import Dead, presolve
from tests.solver.problems import assignments, random_problem

ALWAYS = {"forbidden", "single"}
INEXACT: frozenset[str] = frozenset()  # backends that promise no optimum: what they claim has to hold all the same


def least_cost(problem):
    """inf if nothing is feasible."""
    best = math.inf
    for picks in itertools.product(*(range(len(cost)) for cost in problem.costs)):
        evaluation = evaluate(problem, picks)
        if evaluation.fits:
            best = min(best, evaluation.cost)
    return best


@pytest.fixture(scope="module")
def truth():
    """Least cost of random problem k."""
    known: dict[int, float] = {}

    def cost(seed: int) -> float:
        if seed not in known:
            known[seed] = least_cost(random_problem(seed))
        return known[seed]

    return cost


def core_cost(problem, reductions, fired):
    """Least cost of the core, each of whose assignments must agree with the lifted one."""
    try:
        presolved = presolve(problem, reductions)
    except Dead:
        return math.inf
    fired.update(presolved.state.fired.keys())
    best = math.inf
    for picks in itertools.product(*(range(len(cost)) for cost in presolved.core.costs)):
        small = evaluate(presolved.core, picks)
        if small.cost < math.inf:
            large = evaluate(problem, presolved.lift(picks))
            assert (small.cost, small.fits) == (pytest.approx(large.cost), large.fits)
            if small.fits:
                best = min(best, small.cost)
    return best


SETS = [
    frozenset(),
    *(frozenset({name}) for name in sorted(REDUCTIONS)),
    *(REDUCTIONS - {n} for n in sorted(REDUCTIONS)),
]


@pytest.mark.parametrize(
    "reductions", [*SETS, REDUCTIONS], ids=lambda s: "+".join(sorted(s)) if len(s) < 2 else str(len(s))
)
def test_presolve_keeps_a_cheapest_solution(reductions, truth):
    fired = Counter()
    seeds = range(1200) if reductions == REDUCTIONS else range(250)
    for seed in seeds:
        problem = random_problem(seed)
        if assignments(problem) <= 1500:
            assert core_cost(problem, reductions, fired) == pytest.approx(truth(seed)), f"seed {seed}"
    missing = (reductions | ALWAYS) - set(fired)
    assert not missing, f"never fired: {missing}"


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"exhaustive"}))
@pytest.mark.parametrize("reductions", [False, True])
def test_backend_matches_trying_everything(backend, reductions, truth):
    feasible = 0
    for seed in range(200 if backend == "highs" else 80):
        problem = random_problem(seed)
        if assignments(problem) > 1500:
            continue
        solution = solve(problem, backend=backend, reductions=reductions)
        cheapest, told = truth(seed), f"seed {seed}"
        assert solution.bound <= cheapest * (1 + 1e-9) + 1e-9 and solution.cost >= cheapest - 1e-9, told
        assert solution.status != "infeasible" or cheapest == math.inf, told
        if backend not in INEXACT:
            assert solution.cost == pytest.approx(cheapest), told
            assert solution.status == ("optimal" if cheapest < math.inf else "infeasible"), told
            assert solution.picks is None or solution.gap <= 2e-7, told
        if solution.picks is not None:
            feasible += 1
            evaluation = evaluate(problem, solution.picks)
            assert evaluation.fits and evaluation.cost == solution.cost, told
    assert feasible > 20


def test_a_larger_limit_never_costs_more(truth):
    for seed in range(100):
        problem = random_problem(seed)
        if assignments(problem) <= 1500:
            roomier = {name: limit * 1.5 for name, limit in problem.limits.items()}
            larger = type(problem)(problem.costs, problem.edges, problem.usages, problem.edge_usages, roomier)
            assert solve(larger).cost <= truth(seed) + 1e-9


def test_the_order_of_items_does_not_change_the_cost(truth):
    for seed in range(100):
        problem = random_problem(seed)
        order = np.random.default_rng(seed).permutation(len(problem.costs)).tolist()
        place = {item: k for k, item in enumerate(order)}
        edges = tuple(type(e)(place[e.src], place[e.dst], e.cost) for e in problem.edges)
        usages = tuple(type(u)(place[u.item], u.resource, u.start, u.end, u.nbytes) for u in problem.usages)
        costs = tuple(problem.costs[item] for item in order)
        permuted = type(problem)(costs, edges, usages, problem.edge_usages, problem.limits)
        assert solve(permuted).cost == pytest.approx(solve(problem).cost), f"seed {seed}"


def test_every_run_gives_the_same_picks():
    for seed in range(40):
        assert solve(random_problem(seed)).picks == solve(random_problem(seed)).picks


def test_a_race_never_claims_too_much(truth):
    gaps = []
    for seed in range(150):
        problem = random_problem(seed)
        if assignments(problem) > 1500:
            continue
        try:
            presolved = presolve(problem, {"arcs", "slack"})
        except Dead:
            continue
        outcome = race.run(presolved.core, Budget(time.monotonic() + 0.1))
        assert outcome.bound <= truth(seed) + 1e-9, f"seed {seed}"
        assert outcome.cost >= truth(seed) - 1e-9, f"seed {seed}"
        if outcome.picks is not None:
            assert evaluate(problem, presolved.lift(outcome.picks)).cost == pytest.approx(outcome.cost)
            gaps.append(outcome.cost <= truth(seed) + 1e-9)
    assert sum(gaps) > 0.9 * len(gaps) > 50  # nearly always the optimum, on problems of this size


def test_large_cores_go_through_the_dual_and_still_end_proven(monkeypatch, truth):
    monkeypatch.setattr("solver.driver.LARGE", 0)
    for seed in range(40):
        if assignments(random_problem(seed)) <= 1500:
            solution = solve(random_problem(seed), time_limit_s=1.0, reductions={"arcs"})
            assert solution.cost == pytest.approx(truth(seed)), f"seed {seed}"


@pytest.mark.parametrize("on_edges", [False, True])
@pytest.mark.parametrize("slack", [1e-6, 1e-4, 0.04])
@pytest.mark.parametrize("reductions", [{"dominance"}, True], ids=["dominance", "all"])
def test_a_little_more_memory_is_more(slack, reductions, on_edges):
    """Of two options the cheaper one holds a little more; a limit between the two decides. Whole bytes hide this."""
    first, second = np.array([60.0 + 100 * slack, 60.0, 10.0]), np.array([40.0, 39.0])
    for limit, cost in ((100 * (1 + slack / 2), 7.0), (100 * (1 + slack), 6.0)):
        problem = Problem(
            (np.array([1.0, 2.0, 50.0]), np.array([5.0, 9.0])),
            (Edge(0, 1, np.zeros((3, 2))),),
            () if on_edges else (Usage(0, "memory", 0, 2, first), Usage(1, "memory", 0, 2, second)),
            (EdgeUsage(0, "memory", 0, 2, first[:, None] + second),) if on_edges else (),
            limits={"memory": limit},
        )
        assert least_cost(problem) == cost
        assert solve(problem, reductions=reductions).cost == cost


def test_what_is_held_after_one_another_may_be_more_than_what_can_be_added_up():
    """Bytes are exact below 2^53: that counts for what is there at once, as for a model of 400 billion parameters."""
    generator = np.random.default_rng(7)
    sizes = generator.integers(2**50, 2**51, (8, 3)).astype(np.float64)
    costs = tuple(generator.uniform(1.0, 9.0, 3) for _ in sizes)
    edges = tuple(Edge(item, item + 1, generator.uniform(0.0, 4.0, (3, 3))) for item in range(7))
    usages = tuple(Usage(item, "memory", item, item + 2, nbytes) for item, nbytes in enumerate(sizes))
    assert sizes.max(axis=1).sum() > 2.0**53
    for limit in (1.2 * 2**51, 1.5 * 2**51, 2.0**53):
        problem = Problem(costs, edges, usages, limits={"memory": limit})
        found = solve(problem, time_limit_s=60.0)
        assert found.cost == pytest.approx(least_cost(problem), rel=1e-12)
        assert math.isinf(found.cost) or evaluate(problem, found.picks).fits
    together = tuple(Usage(item, "memory", 0, 2, nbytes) for item, nbytes in enumerate(sizes))
    with pytest.raises(ValueError, match=r"may add up to .* bytes at once; they are exact below 2\^53 only"):
        Problem(costs, edges, together, limits={"memory": 2.0**53})
