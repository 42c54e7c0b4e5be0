"""python -m solver: what it prints, its exit statuses, and what Ctrl-C gives."""

import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from solver import Edge, Problem, Solution, Usage, solve
from solver import __main__ as command
from solver.__main__ import main
from solver.store import problem_document, write_problem
from tests.solver.problems import grid


def tiny(limit: float, forbids: float = 0.0) -> Problem:
    """Two items of two options each; the dear ones hold 1 byte, the cheap ones 2."""
    costs = tuple(array([1.0, 0.0]) for _ in range(2))
    usages = tuple(Usage(item, "hbm", 0, 1, array([1.0, 2.0])) for item in range(2))
    edge = Edge(0, 1, array([[0.0, forbids], [forbids, 0.0]]))
    return Problem(costs, (edge,), usages, limits={"hbm": limit})


def array(values: list[Any]) -> Any:
    import numpy as np

    return np.array(values)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    status = main([*arguments])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out else {}, err


def test_an_answer_exits_with_0_and_a_problem_in_which_nothing_fits_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for limit, status in ((4.0, 0), (1.0, 3)):
        write_problem(tiny(limit), tmp_path / "p.json")
        found, told, err = run(capsys, str(tmp_path / "p.json"))
        assert found == status and told["status"] == ("optimal" if status == 0 else "infeasible")
        assert ("the smallest workable limit is 2 bytes" in err) == (status == 3)


def test_a_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(problem_document(tiny(3.0)))))
    status, told, _ = run(capsys, "-")
    assert status == 0 and told["cost"] == 1.0
    monkeypatch.setattr(sys, "stdin", io.StringIO("{"))
    assert run(capsys, "-")[0] == 2


def test_no_answer_in_time_exits_with_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_problem(grid(3, rows=30, columns=30, options=8, share=0.5), tmp_path / "p.json")
    status, told, _ = run(capsys, str(tmp_path / "p.json"), "--time-limit", "1e-6")
    assert (status, told["status"]) == (4, "unknown")


def test_ctrl_c_before_the_problem_is_read_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "read_as", pressed)
    assert run(capsys, "p.json") == (130, {}, "python -m solver: interrupted before there was an answer\n")


def test_ctrl_c_prints_the_best_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(problem: Problem, **given: Any) -> Solution:
        Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()
        return solve(problem, **given)

    monkeypatch.setattr(command, "solve", interrupted)
    write_problem(grid(21, rows=14, columns=14, options=8, share=1.0), tmp_path / "p.json")
    status, told, err = run(capsys, str(tmp_path / "p.json"), "--time-limit", "300")
    assert status == 130
    assert err.splitlines() == [command.AGAIN, "python -m solver: interrupted; this is what was known by then"]
    assert told["status"] == "feasible" and told["bound"] < told["cost"] and told["seconds"] < 60


@pytest.mark.parametrize("large", [True, False])
def test_who_stops_before_there_are_picks_gets_some(monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    """As a time limit would: it leaves a part of the time to look for picks."""
    if large:
        monkeypatch.setattr("solver.driver.LARGE", 0)
    monkeypatch.setattr("solver.backends.highs.improve", lambda core, lowered, picks, deadline: picks)
    problem = grid(21, rows=12, columns=12, options=6, share=1.0)
    solution = solve(problem, time_limit_s=100, stop=lambda: True)
    assert solution.picks is not None and solution.seconds < 20


@pytest.mark.parametrize("presses", [1, 2])
def test_pressed_twice_it_ends_at_once(presses: int) -> None:
    from solver.pressed import until_pressed

    def press(stop: Callable[[], bool]) -> None:
        for _ in range(presses):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        assert stop()

    with until_pressed() as stop:
        assert not stop()
        if presses == 1:
            press(stop)
        else:
            with pytest.raises(KeyboardInterrupt):
                press(stop)
