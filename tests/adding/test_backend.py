"""docs/adding.md, "A solver backend": a file beside the others and a name, used on the problem of a search."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import solver.backends
from solver import Problem, evaluate, solve
from solver.__main__ import main
from solver.backends import BACKENDS
from solver.solution import BackendError
from solver.store import write_problem
from tests.solver.problems import assignments, random_problem
from tests.support.check import mesh_of
from tests.support.families import Case
from tests.support.machines import WIRES
from tests.support.plans import PlanSampler

NAME = "toy_greedy"
FILE = '''"""Items in a drawn order, each with the cheapest option that fits those before it; the best of some tries."""

import math
import random

from solver.referee import evaluate
from solver.solution import Outcome

TRIES = 40


def run(core, budget):
    near = [[] for _ in core.costs]
    for edge in core.edges:
        near[edge.src].append((edge.dst, edge.cost.T))  # rows: options of the other
        near[edge.dst].append((edge.src, edge.cost))
    rng, best, least = random.Random(0), None, math.inf
    for _ in range(TRIES):
        if not budget.left_s():
            break
        picks = {}
        for item in rng.sample(range(len(core.costs)), len(core.costs)):
            cost = core.costs[item].copy()
            for other, towards in near[item]:
                if other in picks:
                    cost += towards[picks[other]]
            picks[item] = int(cost.argmin())
        tried = tuple(picks[item] for item in range(len(core.costs)))
        evaluation = evaluate(core, tried)
        if evaluation.fits and evaluation.cost < least:
            best, least = tried, evaluation.cost
    return Outcome("unknown" if best is None else "feasible", best, least, -math.inf)
'''


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Puts the file, in a folder that counts as one of the backends', and its name; both end with the test."""

    def added(text: str) -> None:
        (tmp_path / f"{NAME}.py").write_text(text)

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(solver.backends, "__path__", [*solver.backends.__path__, str(tmp_path)])
    monkeypatch.setattr(solver.backends, "BACKENDS", (*BACKENDS, NAME))
    yield added
    sys.modules.pop(f"solver.backends.{NAME}", None)
    vars(solver.backends).pop(NAME, None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x)).sum()


@pytest.fixture(scope="module")
def problem() -> Problem:
    """Of a search on two ranks, with less memory than the cheapest plan takes: else presolve settles all of it."""
    found = PlanSampler(Case(Net(), {"x": torch.randn(4, 8)}).graph, mesh_of(2), WIRES).assembled.problem
    cheapest = solve(found)
    assert cheapest.picks is not None and cheapest.stats["core_items"] == 0
    peak = evaluate(found, cheapest.picks).peak["hbm"]
    return replace(found, limits={"hbm": 0.9 * peak})


def test_it_solves_the_problem_of_a_search_and_claims_no_more_than_it_knows(
    add: Callable[[str], None], problem: Problem
) -> None:
    add(FILE)
    proven, greedy = (solve(problem, backend=name) for name in ("exhaustive", NAME))
    assert proven.status == "optimal" and proven.stats["core_items"] > 3
    assert greedy.picks is not None and evaluate(problem, greedy.picks).fits
    assert greedy.cost == evaluate(problem, greedy.picks).cost >= proven.cost * (1 - 1e-9)
    assert greedy.status == "feasible" and greedy.bound == -math.inf and greedy.gap == math.inf
    assert solve(problem, backend=NAME, start=proven.picks).cost == pytest.approx(proven.cost)  # never worse than that


def test_on_random_problems_it_is_never_below_the_cheapest_and_never_calls_a_feasible_one_infeasible(
    add: Callable[[str], None],
) -> None:
    add(FILE)
    above = equal = asked = 0
    for seed in range(60):
        if assignments(random_problem(seed)) > 1500:
            continue
        found = random_problem(seed)
        proven, greedy = (solve(found, backend=name, reductions=False) for name in ("exhaustive", NAME))
        assert greedy.cost >= proven.cost - 1e-9, f"seed {seed}"
        if greedy.stats.get("core_items"):  # else presolve has settled all of it
            asked += 1
            assert greedy.status == ("unknown" if greedy.picks is None else "feasible"), f"seed {seed}"
        equal += greedy.cost == pytest.approx(proven.cost) and proven.picks is not None
        above += greedy.cost > proven.cost + 1e-9
    assert asked > 20 and equal > 10 and above > 3  # it is of use, and it is not exact


def test_a_cost_that_the_picks_do_not_have_is_refused(add: Callable[[str], None], problem: Problem) -> None:
    add(FILE.replace("best, least, -math.inf", "best, 0.9 * least, -math.inf"))
    with pytest.raises(BackendError, match="claimed cost"):
        solve(problem, backend=NAME)


def test_a_bound_is_believed_so_that_comparing_with_exhaustive_is_what_finds_a_false_one(
    add: Callable[[str], None], problem: Problem
) -> None:
    """The dearest picks of all tries, called optimal: the referee prices picks and knows nothing of bounds."""
    dearest = FILE.replace("None, math.inf", "None, -math.inf").replace(
        "evaluation.cost < least", "evaluation.cost > least"
    )
    add(dearest.replace("best, least, -math.inf", "best, least, least"))
    false, proven = (solve(problem, backend=name) for name in (NAME, "exhaustive"))
    assert false.status == proven.status == "optimal" and false.cost > proven.cost * (1 + 1e-6)


def test_the_command_knows_it_by_name(
    add: Callable[[str], None], problem: Problem, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(FILE)
    file = tmp_path / "problem.json"
    write_problem(problem, file)
    assert main([str(file), "--backend", NAME]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["status"] == "feasible" and evaluate(problem, told["choice"]).fits
    assert main([str(file), "--backend", "toy_gredy"]) == 2
    assert f"known backends: auto, {', '.join(BACKENDS)}, {NAME}" in capsys.readouterr().err
