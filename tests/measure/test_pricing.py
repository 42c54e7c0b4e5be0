"""A measured operator is priced by its measurement, before any formula; plans, notes and caches follow."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.plan.store import dumps
from autopar.price.calls import Profiled, Wanted
from autopar.search import Question, Request, answer, ask, search
from autopar.search.baselines import compare
from autopar.simulate.timeline import pricer_of, timeline_of
from cost_models.hardware import Hardware
from cost_models.measured import Key
from cost_models.price import seconds
from cost_models.steps import Compute
from tests.calibrate.test_format import measured as calibrated
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.machines import FAST, SLOW

GRAPH = "block"


def times(rule: Callable[[Wanted], float | None]) -> Callable[[Sequence[Wanted]], Profiled]:
    """A profile that gives each call what `rule` says; None: not measured."""

    def profile(calls: Sequence[Wanted]) -> Profiled:
        return Profiled({want.call.key: value for want in calls if (value := rule(want)) is not None})

    return profile


def asked(rule: Callable[[Wanted], float | None], mesh: Mesh | None = None, hardware: Hardware = SLOW) -> Question:
    return ask(family(GRAPH).graph, mesh or mesh_of(2), hardware, profile=times(rule))


def computes(plan: Plan) -> list[Compute]:
    return [step for choice in plan.choices.values() for step in choice.steps if isinstance(step, Compute)]


def plain() -> Plan:
    return search(family(GRAPH).graph, mesh_of(2), SLOW)


# --- one step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hardware", [FAST, calibrated(), Hardware.load("h100-sxm")], ids=lambda h: h.name)
def test_a_measured_step_takes_what_was_measured_on_any_hardware(hardware: Hardware) -> None:
    step = Compute("aten.mm.default", 1e9, 1e6, seconds=0.125)
    assert seconds(step, hardware, {}) == 0.125 != seconds(replace(step, seconds=None), hardware, {})


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_step_cannot_take_no_time_or_for_ever(value: float) -> None:
    with pytest.raises(ValueError, match=r"Compute 'mm': seconds is .*, must be finite and positive"):
        Compute("mm", 1.0, 1.0, seconds=value)


@pytest.mark.parametrize(("ranks", "matrix", "memory"), [(1, 1, 1), (2, 1, 1), (4, 2, 3)])
def test_a_calibrated_profile_says_how_much_slower_it_is_among_more_ranks(
    ranks: int, matrix: float, memory: float
) -> None:
    question = asked(lambda want: 1e-3, mesh_of(ranks), calibrated())
    for options in question.strategies.values():
        for step in (step for one in options for step in one.steps if isinstance(step, Compute)):
            slower = matrix if step.kind in ("matmul", "attention", "conv") else memory
            assert step.seconds == pytest.approx(slower * 1e-3)


# --- a plan ----------------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_plan_are_the_measured_ones() -> None:
    """Ten times the formula everywhere: the same choices would take ten times the compute."""
    question = asked(lambda want: 10 * want.seconds)
    plan = answer(question)
    assert len(question.measured) > 100
    formula = sum(seconds(replace(step, seconds=None), question.pricer.hardware, {}) for step in computes(plan))
    assert plan.seconds_by["compute"] == pytest.approx(10 * formula)
    assert plan.step_seconds == pytest.approx(sum(plan.seconds_by.values())) and plan.gap == 0


def test_the_note_counts_them() -> None:
    plan = answer(asked(lambda want: 2 * want.seconds if "einsum" in want.call.key[0] else None))
    products = [step for step in computes(plan) if step.op == "autopar.einsum"]
    share = sum(step.seconds or 0 for step in products) / plan.seconds_by["compute"]
    note = f"{len(products)} of {len(computes(plan))} operators are priced from measurements, {share:.0%} of"
    assert plan.notes[0] == f"{note} the compute time" and f"note: {note}" in plan.explain()
    assert plan.search["measured"] == len(products)
    assert all((step.seconds is not None) == (step in products) for step in computes(plan))


def test_without_measurements_nothing_changes() -> None:
    assert answer(asked(lambda want: None)) == plain()
    assert not any("measure" in note for note in plain().notes) and "measured" not in plain().search


def test_what_measures_slow_is_not_chosen() -> None:
    """Splitting is a bargain by the formula. Where whatever is split measures a second, every rank does everything."""
    whole = {key for key in asked(lambda want: 1e-6, mesh_of(1)).measured}  # what one rank by itself calls
    told = answer(asked(lambda want: 1e-6 if want.call.key in whole else 1.0, hardware=FAST))
    fast = search(family(GRAPH).graph, mesh_of(2), FAST)
    assert any("s" in choice.roles[0] for choice in fast.choices.values() if choice.steps)
    assert max(step.seconds or 0.0 for step in computes(told)) < 1e-3 and told.step_seconds < 1.0


def test_baselines_are_measured_too() -> None:
    question = asked(lambda want: 10 * want.seconds)
    rows = compare(question, answer(question), Request(memory=None, outputs="sharded", time_limit_s=60))
    plans = [row.plan for row in rows if row.plan is not None]
    assert plans and all("operators are priced from measurements" in plan.notes[0] for plan in plans)


def test_notes_of_the_profile_are_notes_of_the_plan() -> None:
    def profile(calls: Sequence[Wanted]) -> Profiled:
        return Profiled({}, ("3 calls of operators cannot be timed",))

    assert (
        "3 calls of operators cannot be timed" in search(family(GRAPH).graph, mesh_of(2), SLOW, profile=profile).notes
    )


def test_times_of_calls_that_nobody_asked_for_are_of_no_account() -> None:
    def profile(calls: Sequence[Wanted]) -> Profiled:
        return Profiled({("aten.other.default", "(float32[8])"): 1e-3})

    question = ask(family(GRAPH).graph, mesh_of(2), SLOW, profile=profile)
    assert question.measured == {} and question.measured_digest == ""
    assert answer(question) == plain()


# --- files and caches ------------------------------------------------------------------------------------------------


def test_a_measured_plan_is_written_and_read_and_its_timeline_needs_no_database(tmp_path: Path) -> None:
    plan = answer(ask(family(GRAPH).graph, mesh_of(2), Hardware.load("cpu-gloo"), profile=times(lambda w: 1e-3 / 3)))
    plan.save(tmp_path / "plan.json")
    back = Plan.load(tmp_path / "plan.json")
    assert back == plan and {step.seconds for step in computes(back)} == {1e-3 / 3}
    assert timeline_of(back, pricer_of(back)).seconds == pytest.approx(plan.step_seconds)


def test_a_plan_without_measurements_is_written_as_before() -> None:
    choices = json.loads(dumps(plain()))["choices"]
    rows = [row for choice in choices for row in choice["steps"] if row[0] == "compute"]
    assert rows and {len(row) for row in rows} == {7}
    assert Plan.loads(dumps(plain()), "a plan") == plain()


def test_the_file_and_the_digest_change_with_what_was_measured() -> None:
    digests = [asked(rule).measured_digest for rule in (lambda w: None, lambda w: 1e-3, lambda w: 1e-3, lambda w: 2e-3)]
    assert digests[0] == "" and digests[1] == digests[2] and len(set(digests)) == 3
    texts = [dumps(answer(asked(rule))) for rule in (lambda w: w.seconds, lambda w: w.seconds * (1 + 1e-12))]
    assert texts[0] != texts[1] != dumps(plain()) and texts[0] != dumps(plain())


# --- autopar.compile -------------------------------------------------------------------------------------------------


@pytest.fixture
def one():
    """A CPU mesh of one rank; its process group ends with the test."""
    import torch.distributed as dist

    import autopar

    yield autopar.init_mesh("cpu", data=1)
    dist.destroy_process_group()


def test_compile_profiles_and_its_cache_knows_what_was_measured(
    one: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    import autopar
    from autopar.calibrate import operators as timing
    from autopar.machine.device import operators_path
    from cost_models.measured import Store

    monkeypatch.setenv("AUTOPAR_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.setattr(timing.seconds_of, "__defaults__", (0.001,))
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.ones(4, 8)

    def plan(**given: Any) -> Plan:
        # of what is free, plans differ while others take memory
        return autopar.compile(model, one, example_inputs=(x,), cache=tmp_path / "plans", memory=2**30, **given).plan

    def kept() -> int:
        return len(list((tmp_path / "plans").glob("*.plan.json")))

    without = plan()
    assert not operators_path().exists() and kept() == 1
    first = plan(profile=30.0)
    assert operators_path().exists() and kept() == 2
    assert len(computes(first)) > 3 and all(step.seconds is not None for step in computes(first))
    assert first.notes[0].endswith("operators are priced from measurements, 100% of the compute time")
    assert plan(profile=0) == first and kept() == 2  # the same times: found again
    with Store(operators_path()) as store:
        where = timing.where_of(torch.device("cpu"))
        store.keep(where, {key: 2 * value for key, value in store.known(where).items()})
    assert plan(profile=0).seconds_by["compute"] == pytest.approx(2 * first.seconds_by["compute"]) and kept() == 3
    assert plan() == without and kept() == 3


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"profile": -1.0}, "profile=-1.0 is not a time; give seconds from 0"),
        ({"profile": True}, "profile=True is not a time"),
        ({"profile": math.inf}, "profile=inf is not a time"),
        ({"profile": 5.0, "hardware": "h100-sxm"}, "whose cpu is no h100-sxm; leave hardware= to what is here"),
    ],
)
def test_compile_refuses_a_profile_that_cannot_be(one: object, given: Mapping[str, object], sentence: str) -> None:
    import torch

    import autopar

    with pytest.raises(ValueError, match=sentence):
        autopar.compile(torch.nn.Linear(4, 4), one, **given)  # type: ignore[arg-type]


def test_keys_are_pairs_of_text() -> None:
    keys: list[Key] = list(asked(lambda want: 1e-3).measured)
    assert all(isinstance(part, str) and part for key in keys for part in key)
