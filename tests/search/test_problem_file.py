"""--problem FILE: the program whose bound the plan carries, which `python -m solver` solves to the same cost."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar import Plan
from autopar.assemble.problem import Assembled
from autopar.errors import Infeasible
from autopar.price.pricer import Pricer
from autopar.search import Request, answer, ask
from autopar.search.__main__ import main
from autopar.search.command import posing
from autopar.search.problems import write
from cost_models.hardware import Hardware
from cost_models.reserve import Room
from solver.__main__ import main as solver_main
from solver.store import read_problem
from tests.support.check import mesh_of
from tests.support.families import family

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = (f"{EXAMPLES / 'mlp.py'}:build", "--mesh", "data=2,tensor=2", "--hardware", "h100-sxm", "--quiet")


def solved(path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert solver_main([str(path), *more]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["problem.json", "problem.json.gz"])
def test_with_all_the_memory_there_is_it_costs_what_the_plan_takes_in_sum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    files = ("--problem", str(tmp_path / name), "-o", str(tmp_path / "plan.json"))
    assert main([*MODEL, "--no-simulation", *files]) == 0
    capsys.readouterr()
    plan, found = Plan.load(tmp_path / "plan.json"), solved(tmp_path / name, capsys)
    assert found["cost"] == pytest.approx(plan.step_seconds, rel=1e-6)
    assert found["bound"] == pytest.approx(plan.bound, rel=1e-6)
    assert {path.name for path in tmp_path.iterdir()} == {name, "plan.json"}, "whole, and nothing beside it"


@pytest.mark.parametrize("share", [None, 0.7])
def test_in_little_memory_it_has_the_limit_and_costs_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], share: float | None
) -> None:
    asked = ask(family("block").graph, mesh_of(2), Hardware.load("h100-sxm"))
    memory = None if share is None else share * answer(asked).peak_bytes["hbm"]
    problems: list[Assembled] = []
    plan = answer(asked, Request(memory=memory), as_posed=problems.append)
    write(problems[-1], tmp_path / "problem.json")
    assert ("hbm" in read_problem(tmp_path / "problem.json").limits) == ("fastest_bytes" in plan.search) == bool(share)
    found = solved(tmp_path / "problem.json", capsys, "--gap", "0.001")
    assert found["bound"] <= plan.step_seconds * (1 + 1e-6)
    assert found["cost"] == pytest.approx(plan.step_seconds, rel=2e-3)  # either is within a thousandth of the best


def test_of_a_simulated_search_it_is_the_problem_of_the_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("--problem", str(tmp_path / "problem.json"), "-o", str(tmp_path / "plan.json"))
    assert main([*MODEL, *files]) == 0
    capsys.readouterr()
    plan, found = Plan.load(tmp_path / "plan.json"), solved(tmp_path / "problem.json", capsys)
    least_sum = next(one for one in plan.candidates if one.name == "optimum without overlap")
    assert found["cost"] == pytest.approx(least_sum.step_seconds, rel=1e-6)
    assert plan.bound <= found["bound"] * (1 + 1e-6)


def test_a_folder_that_does_not_exist_is_told_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MODEL, "--problem", str(tmp_path / "lost" / "problem.json")]) == 2
    assert "of --problem" in capsys.readouterr().err


def test_where_there_is_no_plan_in_less_memory_the_problem_is_that_of_the_plan_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The allocator would reserve more than there is, and in so much less nothing fits."""

    def tried_again(room: Room, find: Callable[[float], Plan], pricer: Pricer) -> Plan:
        plan = find(room.tensors)
        with pytest.raises(Infeasible):
            find(1.0)
        return plan

    monkeypatch.setattr(posing, "held_within", tried_again)
    file = tmp_path / "problem.json"
    assert main([*MODEL, "--memory", "70GiB", "--allow", "recompute", "--problem", str(file)]) == 0
    assert read_problem(file) and "step time" in capsys.readouterr().out
