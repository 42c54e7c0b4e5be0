"""Large cores: flat arrays mean what the problem means, tree moves keep their books, a race is repeatable."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.solver import training_step
from solver import Edge, Problem, evaluate, solve
from solver.backends import Budget, race
from solver.backends.ascent import climb
from solver.backends.compiled import cost_of, use_of
from solver.backends.sweeps import Sweeps
from solver.backends.trees import Forest
from solver.presolve import Dead, presolve
from tests.solver.problems import grid, random_problem


def cores(seeds):
    for seed in seeds:
        try:
            yield seed, presolve(random_problem(seed), {"arcs"}).core
        except Dead:
            continue


def test_flat_cost_and_use_are_the_referees():
    for seed, core in itertools.chain(cores(range(80)), ((seed, grid(seed)) for seed in range(5))):
        sweeps, rng = Sweeps(core), np.random.default_rng(seed)
        for _ in range(4):
            picks = np.array([rng.integers(len(cost)) for cost in core.costs], dtype=np.int64)
            evaluation = evaluate(core, picks.tolist())
            assert cost_of(sweeps.flat, picks) == pytest.approx(evaluation.cost), f"seed {seed}"
            over, resource = sweeps.over(picks), np.array(sweeps.flat.resource, dtype=object)
            for name, limit in core.limits.items():
                if (resource == name).any():
                    assert over[resource == name].max() + limit == pytest.approx(evaluation.peak[name]), f"seed {seed}"


def test_prices_fold_memory_into_costs():
    core = grid(3)
    sweeps, rng = Sweeps(core), np.random.default_rng(3)
    price = rng.uniform(0, 1, len(sweeps.flat.room)) * (rng.uniform(size=len(sweeps.flat.room)) < 0.3)
    sweeps.price(price)
    for _ in range(20):
        picks = np.array([rng.integers(len(cost)) for cost in core.costs], dtype=np.int64)
        priced = sum(sweeps.split(sweeps.costs)[u][pick] for u, pick in enumerate(picks))
        priced += sum(sweeps.matrix(n)[picks[e.src], picks[e.dst]] for n, e in enumerate(core.edges))
        use = sweeps.over(picks) + sweeps.flat.room
        assert priced == pytest.approx(cost_of(sweeps.flat, picks) + price @ use)
    sweeps.price(np.zeros(len(price)))
    assert (sweeps.costs == sweeps.flat.cost).all()
    assert all((sweeps.matrix(n) == edge.cost).all() for n, edge in enumerate(core.edges))


def test_peaks_do_not_look_across_resources():
    flat = Sweeps(grid(1)).flat
    border = flat.resource.index("host")
    excess = np.full(len(flat.room), -1.0)
    excess[border - 1], excess[border] = 2.0, 3.0
    assert flat.peaks(excess, 0.0).tolist() == [border, border - 1]
    assert flat.position("host", int(flat.instant[-1]) + 99) == len(flat.room) - 1
    assert flat.position("host", -1) is None and flat.position("disk", 5) is None


@pytest.mark.parametrize("hard", [True, False])
def test_tree_moves_keep_their_books_and_hard_ones_the_limits(hard):
    for seed in range(6):
        core = grid(seed, share=1.3)
        forest = Forest(Sweeps(core).flat)
        priced = forest.priced(np.zeros(len(forest.flat.room)))
        picks = np.array([int(cost.argmin()) for cost in core.costs], dtype=np.int64)
        use, moved = use_of(forest.flat, picks), 0
        assert evaluate(core, picks.tolist()).fits
        for turn in range(20):
            before = picks.copy()
            forest.round(picks, use, priced, turn, 3.0, hard)
            moved += int((picks != before).sum())
            assert use == pytest.approx(use_of(forest.flat, picks), abs=1e-9)
            assert not hard or evaluate(core, picks.tolist()).fits, f"seed {seed}, turn {turn}"
        assert moved > 20


def test_a_tree_move_on_a_tree_is_exact():
    rng = np.random.default_rng(5)
    items, options = 9, 3
    edges = tuple(Edge(int(rng.integers(v)), v, rng.uniform(0, 10, (options, options))) for v in range(1, items))
    core = Problem(tuple(rng.uniform(0, 10, options) for _ in range(items)), edges)
    best = min(evaluate(core, picks).cost for picks in itertools.product(range(options), repeat=items))
    forest = Forest(Sweeps(core).flat)
    picks = np.zeros(items, dtype=np.int64)
    for turn in range(8):  # of 20 moves each; some span the whole tree
        forest.round(picks, use_of(forest.flat, picks), forest.priced(np.zeros(0)), turn, 0.0, True)
    assert cost_of(forest.flat, picks) == pytest.approx(best)


def test_tree_moves_leave_forbidden_pairs_and_never_enter_them():
    rng = np.random.default_rng(8)
    for seed in range(10):
        core = grid(seed)
        edges = tuple(
            Edge(e.src, e.dst, np.where(rng.uniform(size=e.cost.shape) < 0.15, np.inf, e.cost)) for e in core.edges
        )
        core = Problem(core.costs, edges)
        forest = Forest(Sweeps(core).flat)
        priced, picks = forest.priced(np.zeros(0)), np.zeros(len(core.costs), dtype=np.int64)
        costs = []
        for turn in range(30):
            forest.round(picks, np.zeros(0), priced, turn, 0.0, False)
            costs.append(cost_of(forest.flat, picks))
        assert math.isfinite(costs[-1]), f"seed {seed}"
        finite = [cost for cost in costs if math.isfinite(cost)]
        assert finite == costs[-len(finite) :]


def test_the_climb_stays_below_the_optimum_and_proves_that_nothing_fits():
    feasible = infeasible = 0
    for seed, share in itertools.product(range(6), (0.95, 0.6)):
        core = grid(seed, rows=3, columns=4, options=3, share=share)
        sweeps = Sweeps(core)
        way = climb(core, sweeps, Budget(time.monotonic() + 5))
        best = solve(core, reductions=False, backend="highs").cost
        assert way.bound <= best * (1 + 1e-9)
        if way.bound == math.inf:
            infeasible += 1
            assert race.run(core, Budget(time.monotonic() + 5)).status == "infeasible"
            continue
        feasible += best < math.inf
        assert way.bound > 0.5 * best or best == math.inf
        sweeps.price(way.price)
        value = max(sweeps.sweep(forth)[1] for forth in (True, False)) - float(way.price @ sweeps.flat.room)
        assert value <= best * (1 + 1e-9)
    assert feasible >= 3 and infeasible >= 3


def test_a_race_finds_what_the_integer_program_proves_and_repeats_itself(monkeypatch):
    monkeypatch.setattr(race._Race, "narrow", lambda self, way: None)  # on this size it would prove everything
    monkeypatch.setattr(race, "MERGE_PAIRS", 0)
    monkeypatch.setattr(race, "MOST_STALE", 1)
    for seed in range(3):
        core = presolve(grid(seed), set()).core
        best = solve(core, backend="highs", reductions=False)
        first, second = (race.run(core, Budget(time.monotonic() + 60, threads=threads)) for threads in (1, 2))
        assert best.bound <= first.cost <= 1.02 * best.cost and first.bound <= best.cost * (1 + 1e-9)
        assert (first.picks, first.cost) == (second.picks, second.cost)


def test_a_race_of_so_many_generations_ends_at_the_same_place(monkeypatch):
    monkeypatch.setattr(race._Race, "narrow", lambda self, way: None)
    monkeypatch.setattr(race, "MERGE_PAIRS", 0)
    core = presolve(grid(11, rows=8, columns=8), set()).core
    runs = [race.run(core, Budget(time.monotonic() + 60, generations=most)) for most in (1, 1, 2)]
    assert [run.stats["generations"] for run in runs] == [1, 1, 2]
    assert runs[0].picks == runs[1].picks and runs[2].cost <= runs[0].cost


def test_mixing_what_was_found_is_never_worse(monkeypatch):
    core = presolve(grid(11, rows=8, columns=8), set()).core
    monkeypatch.setattr(race, "ROUNDS", 1)
    monkeypatch.setattr(race, "MOST_STALE", 1)
    monkeypatch.setattr(race._Race, "narrow", lambda self, way: None)
    mixed = race.run(core, Budget(time.monotonic() + 60))
    monkeypatch.setattr(race, "MERGE_PAIRS", 0)
    alone = race.run(core, Budget(time.monotonic() + 60))
    assert mixed.cost < alone.cost


def test_the_driver_sends_loose_large_cores_to_a_race(monkeypatch):
    problem = replace(training_step(60, 6))
    free = solve(problem)
    limit = 0.6 * evaluate(problem, free.picks).peak["hbm"]
    tight = replace(problem, limits={"hbm": limit})
    exact = solve(tight, reductions=set())
    monkeypatch.setattr("solver.driver.LARGE", 0)
    monkeypatch.setattr("solver.backends.lagrange.LOOSE", -1.0)
    monkeypatch.setattr("solver.backends.kernel.MOST_PAIRS", 0)
    raced = solve(tight, reductions=set(), time_limit_s=10)
    assert raced.stats["generations"] > 0
    assert raced.bound <= exact.cost * (1 + 1e-9) and exact.bound <= raced.cost * (1 + 1e-9)
    assert raced.cost <= 1.02 * exact.cost


@pytest.mark.parametrize("large", [True, False])
def test_a_search_that_is_stopped_gives_what_it_has(monkeypatch, large):
    problem = grid(21, rows=12, columns=12, options=6, share=1.0)
    if large:
        monkeypatch.setattr("solver.driver.LARGE", 0)
    began, asked = time.monotonic(), []

    def stop():
        asked.append(1)
        return time.monotonic() > began + 2

    solution = solve(problem, time_limit_s=100, stop=stop)
    assert len(asked) > 20 and solution.seconds < 20 and solution.stats["cut_by_time"] == 1
    assert solution.status == "feasible" and solution.bound < solution.cost
    assert evaluate(problem, solution.picks).fits
