"""With what a search under a limit begins, and what it does not find out twice."""

from __future__ import annotations

import re
from typing import Any

import pytest

from autopar.errors import Infeasible, NoAnswerInTime
from autopar.ir.mesh import Mesh
from autopar.search import Question, Request, answer, ask
from autopar.search import solve as solved_module
from autopar.search.problems import Wanted, posed
from autopar.search.solve import solve as real_solve
from cost_models.hardware import Hardware
from solver import Problem, Solution
from tests.support.families import family

H100 = Hardware.load("h100-sxm")
UNKNOWN = Solution("unknown", None, float("inf"), float("-inf"), 1.0)


def asked() -> Question:
    return ask(family("block").graph, Mesh(("data",), (2,)), H100)


def memory_of(question: Question) -> float:
    """What the fastest plan needs."""
    return float(answer(question).peak_bytes["hbm"])


def test_a_plan_of_a_smaller_limit_is_there_when_time_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    question = asked()
    ample = memory_of(question)
    low = answer(question, Request(memory=0.7 * ample))

    def in_no_time(problem: Problem, **given: Any) -> Solution:
        return real_solve(problem, **{**given, "time_limit_s": 1e-6} if given.get("start") is not None else given)

    monkeypatch.setattr(solved_module, "solve", in_no_time)
    high = answer(question, Request(memory=0.75 * ample))
    assert high.step_seconds <= low.step_seconds * (1 + 1e-9)
    assert high.peak_bytes["hbm"] <= 0.75 * ample and high.bound <= high.step_seconds


def test_where_nothing_is_found_in_time_what_people_do_by_hand_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    question = asked()
    limit = 0.7 * memory_of(question)

    def slow(problem: Problem, **given: Any) -> Solution:
        return UNKNOWN if "start" in given else real_solve(problem, **given)

    monkeypatch.setattr(solved_module, "solve", slow)
    plan = answer(question, Request(memory=limit))
    assert plan.peak_bytes["hbm"] <= limit and plan.memory_limit == limit
    by_hand = answer(question, Request(memory=limit, policy="checkpoint-every-block", tied=True))
    assert plan.step_seconds <= by_hand.step_seconds * (1 + 1e-9)
    with pytest.raises(NoAnswerInTime):  # not even that fits
        monkeypatch.setattr("autopar.search.drive.policies_for", lambda mesh, saving=False: ())
        answer(question, Request(memory=0.99 * limit))


def test_why_a_policy_has_no_plan_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    question = asked()
    limit = 0.6 * memory_of(question)
    with pytest.raises(Infeasible, match="no data-parallel plan fits") as first:
        answer(question, Request(memory=limit, policy="data-parallel"))
    monkeypatch.setattr(solved_module, "solve", lambda problem, **given: pytest.fail("solved again"))
    with pytest.raises(Infeasible) as second:
        answer(question, Request(memory=limit, policy="data-parallel"))
    assert str(second.value) == str(first.value)


def test_a_large_search_begins_among_known_layouts_and_is_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solved_module, "EXACT_BELOW_PAIRS", 0)
    told: list[str] = []
    question = asked()
    limit = 0.7 * memory_of(question)
    plan = answer(question, Request(memory=limit), progress=told.append)
    assert any(re.match(r"the best among the layouts of \d plans takes", text) for text in told), told
    assert plan.peak_bytes["hbm"] <= limit and plan.bound <= plan.step_seconds
    again = answer(asked(), Request(memory=limit))
    assert again == plan
    by_hand = answer(question, Request(memory=limit, policy="checkpoint-every-block", tied=True))
    assert plan.step_seconds <= by_hand.step_seconds * (1 + 1e-9)


def test_a_bound_proven_with_more_memory_is_that_of_less_in_the_same_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    question = asked()
    ample = memory_of(question)
    more, less = (Request(memory=share * ample, buckets_for=0.75 * ample) for share in (0.75, 0.7))
    exact = answer(asked(), less)
    monkeypatch.setattr(solved_module, "EXACT_BELOW_PAIRS", 0)
    monkeypatch.setattr(solved_module, "SAME", 1.0)  # what it began with counts as the best, whatever was found
    answer(question, more)
    (proven,) = question.proven
    assert proven.memory == more.memory
    begun = answer(question, less)
    assert question.proven == [proven], "nothing was proven anew"
    assert begun.bound == min(proven.bound, begun.step_seconds) <= exact.step_seconds * (1 + 1e-9)
    assert begun.peak_bytes["hbm"] <= 0.7 * ample and begun.step_seconds >= exact.bound * (1 - 1e-9)
    answer(question, Request(memory=0.8 * ample, buckets_for=0.75 * ample))
    assert len(question.proven) == 2, "with more memory it does not hold"


def test_a_problem_is_assembled_once_whatever_its_limits() -> None:
    question = asked()
    wanted = Wanted(1e9, "sharded", {}, 60.0, tied=True)
    within, without = posed(question, 0, "fsdp", wanted), posed(question, 0, "fsdp", wanted.unbound)
    assert within.assembled.problem.edges is without.assembled.problem.edges
    assert dict(within.assembled.problem.limits) == {"hbm": 1e9} and not without.assembled.problem.limits
    other = posed(question, 0, "data-parallel", wanted).assembled.problem
    assert other.edges is not within.assembled.problem.edges
