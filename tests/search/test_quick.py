"""Candidates are solved quickly; where that finds nothing, once more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.search import Request, ask
from autopar.search import solve as solve_module
from autopar.search.drive import of_policy
from autopar.search.memory_options import MemoryOptions
from autopar.search.problems import Wanted
from cost_models.hardware import Hardware
from solver import Problem, Solution
from tests.support.check import mesh_of
from tests.support.families import family


def test_where_a_quick_solve_finds_nothing_a_candidate_is_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plainly, quick = solve_module.solve, list[bool]()

    def finds_nothing(problem: Problem, **options: Any) -> Solution:
        quick.append(bool(options.get("quick")))
        found = plainly(problem, **options)
        return replace(found, status="unknown", picks=None) if quick[-1] else found

    monkeypatch.setattr(solve_module, "solve", finds_nothing)
    asked = ask(family("block").wide_graph, mesh_of(2, 2), Hardware.load("h100-sxm"))
    wanted = Wanted.of(Request(simulation=True), MemoryOptions(), lambda: False)
    found = of_policy(asked, "fsdp", replace(wanted, tied=True, quick=True), lambda text: None)
    assert quick[:2] == [True, False] and found.plan.step_seconds > 0
