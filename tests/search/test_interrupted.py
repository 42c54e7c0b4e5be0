"""Ctrl-C while a plan is searched: what was found by then is printed and written, and said to be no more than that."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar import NoAnswerInTime, Plan
from autopar.search import Request, answer, ask
from autopar.search import drive as rounds_module
from autopar.search import solve as solved_module
from autopar.search.__main__ import main
from autopar.search.baselines import compare
from autopar.search.solve import solve as real_solve
from cost_models.hardware import Hardware
from solver import Problem, Solution
from tests.support.check import mesh_of
from tests.support.families import family

EXAMPLES = Path(__file__).parents[2] / "examples"
GIVEN = (f"{EXAMPLES / 'mlp.py'}:build", "--mesh", "data=2,tensor=2", "--hardware", "h100-sxm")
BEST = "interrupted: this is the best plan found by then, and its gap is what was proven by then"


def pressing(work: Callable[..., Any], at: int = 1) -> Callable[..., Any]:
    """The same, with Ctrl-C at its `at`-th call."""
    calls: list[int] = []

    def pressed(*args: Any, **given: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return work(*args, **given)

    return pressed


@pytest.mark.parametrize("at", [1, 3])
def test_the_best_plan_so_far_is_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at: int
) -> None:
    """In the first solve, and in that of a baseline."""
    monkeypatch.setattr(solved_module, "solve", pressing(real_solve, at))
    written = str(tmp_path / "plan.json"), str(tmp_path / "plan.dot"), str(tmp_path / "problem.json")
    files = ("-o", written[0], "--dot", written[1], "--problem", written[2])
    assert main([*GIVEN, *files]) == 130
    out, err = capsys.readouterr()
    plan = Plan.load(written[0])
    assert out == plan.explain() and BEST in plan.notes and "note: interrupted: this is the best plan" in out
    assert err.splitlines()[-1] == f"autopar.search: {BEST}"
    assert "stopping with the best plan so far; Ctrl-C again ends at once" in err
    assert plan.bound <= plan.step_seconds and all(Path(path).exists() for path in written)
    assert len(plan.candidates) <= at + 1, "what was not tried is not told"


def test_its_gap_is_what_was_proven_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a time limit at that moment: the bound of the solver's answer, whatever would have been proven later."""
    loose: list[Solution] = []

    def cut(problem: Problem, **given: Any) -> Solution:
        loose.append(real_solve(problem, **{**given, "stop": lambda: True, "gap": 0.5}))
        return loose[-1]

    monkeypatch.setattr(solved_module, "solve", cut)
    asked = ask(family("gpt2").graph, mesh_of(2, 2), Hardware.load("h100-sxm"))
    stopped: list[int] = []
    plan = answer(asked, stop=lambda: len(stopped) > 0 or stopped.append(1) is not None)
    assert plan.bound == loose[0].bound and plan.search["status"] == loose[0].status


def test_a_json_object_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GIVEN, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["interrupted"] is False
    monkeypatch.setattr(solved_module, "solve", pressing(real_solve))
    assert main([*GIVEN, "--json", "--quiet"]) == 130
    out, err = capsys.readouterr()
    assert json.loads(out)["interrupted"] is True and err == f"autopar.search: {BEST}\n"


def test_where_there_is_no_plan_yet_it_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = Solution("unknown", None, float("inf"), float("-inf"), 1.0)
    monkeypatch.setattr(solved_module, "solve", pressing(lambda problem, **given: nothing))
    assert main([*GIVEN, "--quiet", "-o", str(tmp_path / "plan.json")]) == 130
    out, err = capsys.readouterr()
    assert (out, err) == ("", "autopar.search: interrupted before any plan was found; nothing is written\n")
    assert not (tmp_path / "plan.json").exists()


def test_pressed_twice_it_ends_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(solved_module, "solve", pressing(pressing(real_solve)))
    assert main([*GIVEN, "--quiet"]) == 130
    assert capsys.readouterr() == ("", "autopar.search: interrupted before any plan was found; nothing is written\n")


def test_while_baselines_are_compared_with_the_plan_is_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GIVEN, "--quiet"]) == 0
    whole = capsys.readouterr().out
    monkeypatch.setattr("autopar.search.__main__.compare", pressing(compare))
    assert main([*GIVEN, "--quiet", "--baselines", "--memory-curve"]) == 130
    out, err = capsys.readouterr()
    assert out.startswith(whole) and out.count("interrupted") == 9, "each row that is not there"
    assert err == "autopar.search: interrupted: the plan is complete, what it is compared with is not\n"


def test_under_a_limit_what_is_known_by_then_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the fastest plan does not fit, Ctrl-C while others are sought leaves time to find one."""
    asked = ask(family("block").graph, mesh_of(2), Hardware.load("h100-sxm"))
    limit = 0.7 * answer(asked).peak_bytes["hbm"]
    stopped: list[int] = []

    def stopping(*args: Any, **given: Any) -> Any:
        stopped.append(1)
        return solved_within(*args, **given)

    solved_within = rounds_module.solved_within
    monkeypatch.setattr(rounds_module, "solved_within", stopping)
    plan = answer(asked, Request(memory=limit), stop=lambda: bool(stopped))
    assert plan.peak_bytes["hbm"] <= limit and plan.bound <= plan.step_seconds


def test_a_search_that_has_not_begun_gives_nothing() -> None:
    asked = ask(family("mlp").graph, mesh_of(2), Hardware.load("h100-sxm"))
    with pytest.raises(NoAnswerInTime):
        answer(asked, stop=lambda: True)
