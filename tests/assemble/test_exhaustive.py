"""The solver against all there is: small random programs, every combination of layouts, residences and modes priced.

The referee of the solver prices the combinations, that of autopar the plans that they stand for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from math import inf, isclose

import numpy as np
import pytest

from autopar.assemble.problem import DEVICE, HOST
from autopar.decide.picks import tidied
from autopar.ir.mesh import Mesh
from autopar.price.pricer import Pricer
from autopar.search.memory_options import WAYS
from solver import Evaluation, Problem, evaluate, solve
from tests.assemble.drawn import AMPLE, Drawn, drawn
from tests.assemble.tiny import few_strategies, random_graph
from tests.support.machines import machine

LEAST, MOST = 30, 1200  # combinations of a program
LIMITS = 4
PRICED = 15  # plans of a program that are priced
Picks = tuple[int, ...]


def combinations(problem: Problem, most: int) -> list[Picks] | None:
    """All picks of finite cost; None if there are more than `most`."""
    into: dict[int, list[tuple[int, np.ndarray]]] = {}
    for edge in problem.edges:
        first, last = min(edge.src, edge.dst), max(edge.src, edge.dst)
        cost = edge.cost if edge.src <= edge.dst else edge.cost.T
        into.setdefault(last, []).append((first, np.isfinite(cost)))
    found: list[Picks] = [()]
    for item, cost in enumerate(problem.costs):
        grown: list[Picks] = []
        for picks in found:
            allowed = np.isfinite(cost)
            for other, finite in into.get(item, ()):
                allowed = allowed & (finite.diagonal() if other == item else finite[picks[other]])
            grown += [(*picks, int(option)) for option in np.flatnonzero(allowed)]
        found = grown
        if len(found) > 20 * most:
            return None
    return found if len(found) <= most else None


def program(seed: int) -> tuple[Drawn, list[Picks]]:
    """A random program on a random machine with neither too few combinations nor too many."""
    rng = random.Random(seed)
    while True:
        mesh = Mesh(("a",), (rng.choice([2, 2, 4]),))
        link, host = rng.choice([1e10, 1e12]), rng.choice([1e10, 1e12])
        hardware = machine(link, memory=host if rng.random() < 0.5 else 1e12)
        if rng.random() < 0.5:  # the device's memory is another one than the host's
            fast = replace(hardware.tiers["hbm"], bytes_per_s=4e12)
            hardware = replace(hardware, tiers={**hardware.tiers, "hbm": fast})
        pricer = Pricer.on(mesh, hardware, rng.choice(["adamw", "sgd-momentum", "rmsprop", "none"]))
        graph = random_graph(rng, rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 2))
        strategies = few_strategies(graph, mesh, rng, rng.randint(1, 3))
        ways = WAYS if rng.random() < 0.5 else [way for way in WAYS if rng.random() < 0.6]
        found = drawn(graph, pricer, ways, strategies=strategies)
        picks = combinations(found.assembled.problem, MOST)
        if picks is not None and len(picks) >= LEAST:
            return found, picks


def limits(told: list[Evaluation], rng: random.Random) -> Iterator[dict[str, float]]:
    """Limits between the least that anything needs and the most."""
    for _ in range(LIMITS):
        found = {DEVICE: AMPLE, HOST: AMPLE}
        for tier in (DEVICE,) if rng.random() < 0.6 else (DEVICE, HOST):
            needs = [one.peak.get(tier, 0.0) for one in told]
            found[tier] = round(min(needs) + rng.random() ** 2 * (max(needs) - min(needs)))
        yield found


def check(seed: int) -> None:
    found, picks = program(seed)
    problem, rng = found.assembled.problem, random.Random(seed)
    told = [evaluate(problem, one) for one in picks]
    for one in rng.sample(picks, min(PRICED, len(picks))):
        assert not found.wrong(tidied(found.assembled, one))
    for limit in limits(told, rng):
        fits = [one.cost for one in told if all(one.peak.get(tier, 0.0) <= most for tier, most in limit.items())]
        best = min(fits, default=inf)
        solution = solve(replace(problem, limits=limit), time_limit_s=60.0)
        assert (solution.picks is None) == (best == inf), (limit, solution.status)
        if solution.picks is None:
            assert solution.status == "infeasible"
            continue
        assert isclose(solution.cost, best, rel_tol=1e-6, abs_tol=1e-15), (limit, solution.cost, best)
        ours = tidied(found.assembled, solution.picks)
        said = evaluate(problem, ours)
        assert isclose(said.cost, best, rel_tol=1e-6, abs_tol=1e-15)
        plan = found.plan(ours, said, memory=limit[DEVICE])
        assert all(nbytes <= limit[tier] for tier, nbytes in plan.peak_bytes.items())
    least = min(one.peak[DEVICE] for one in told)
    none = solve(replace(problem, limits={DEVICE: least * 0.99}))
    assert none.picks is None and none.status == "infeasible"


@pytest.mark.parametrize("seeds", [range(start, start + 10) for start in range(0, 100, 10)], ids=str)
def test_the_solver_finds_the_best_of_all_combinations(seeds: range) -> None:
    for seed in seeds:
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(start, start + 30) for start in range(1000, 1300, 30)], ids=str)
def test_the_solver_finds_the_best_of_all_combinations_of_many(seeds: range) -> None:
    for seed in seeds:
        check(seed)


def test_the_programs_have_all_that_there_is_to_choose() -> None:
    seen: set[str] = set()
    for seed in range(40):
        found, picks = program(seed)
        for one in picks[:: max(1, len(picks) // 50)]:
            modes = found.assembled.modes.values()
            seen |= {back.options[one[back.item]][0] for back in modes if back.item is not None}
            seen |= {where[one[item]] for item, where in found.assembled.residences.items()}
    assert seen == {"save", "recompute", "offload", "drop", "device", "host", "stream"}
