"""Stages that are priced by times that were measured: each number of micro-batches has its own, and they count."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autopar.ir.mesh import Mesh
from autopar.price.calls import Profile, Profiled, Wanted
from autopar.rewrite.cast_once import in_rounds_of_stages
from autopar.search import Request
from autopar.search.context import ask
from autopar.search.orders import within_stage
from autopar.search.pipeline import Pipeline
from autopar.search.pipelines import pipeline_of
from tests.support.families import family
from tests.support.machines import FAST


def times(seconds: float) -> Profile:
    """A machine on which every call takes so long."""

    def profile(calls: Sequence[Wanted]) -> Profiled:
        return Profiled({want.call.key: seconds for want in calls}, ("timed by hand",))

    return profile


def found(mesh: Mesh, micro_batches: int, profile: Profile | None) -> Pipeline:
    rounds = in_rounds_of_stages(family("gpt2").graph, micro_batches)
    question = ask(rounds, within_stage(mesh), FAST, profile=profile)
    assert (question.measured_digest != "") == (profile is not None)
    return pipeline_of(question, mesh, Request(allow=()), schedule="zb-h1", moved=False)


@pytest.mark.parametrize("mesh", [Mesh(("pipe",), (2,)), Mesh(("pipe", "data"), (2, 2))])
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_what_was_measured_is_what_stages_take(mesh: Mesh, micro_batches: int) -> None:
    plain, once, twice = (found(mesh, micro_batches, one) for one in (None, times(1e-3), times(2e-3)))
    assert "timed by hand" in once.whole.notes and once.ends == twice.ends
    for what in ("forward", "backward_input", "backward_weight"):
        formulas, ones, twos = (getattr(of.durations, what) for of in (plain, once, twice))
        assert sum(ones) > 100 * sum(formulas) > 0  # which are of microseconds
        assert twos == pytest.approx([2 * one for one in ones], rel=0.01)  # but for collectives
    assert twice.step_seconds == pytest.approx(2 * once.step_seconds, rel=0.01)
    assert Pipeline.loads(twice.dumps(), "here").dumps() == twice.dumps()
