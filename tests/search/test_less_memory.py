"""Pipelines in little memory: however little time a search has, it goes on from the best that was found."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.errors import Infeasible
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.rewrite.micro_batches import in_rounds
from autopar.search import Request, pipelines
from autopar.search.context import ask
from autopar.search.cutting import Cutting
from autopar.search.less_memory import Clock, saving_less
from autopar.search.orders import orders_of, within_stage
from autopar.search.pipeline import Pipeline
from autopar.search.pipelines import find_pipeline
from autopar.search.request import Held
from autopar.search.search import answer
from autopar.trace import capture, graph_of
from tests.search.test_pipelines import Layers
from tests.support.machines import FAST


@cache
def large() -> Graph:
    """Activations are most of what is held."""
    rows = 4096
    return graph_of(capture(Layers(*(256,) * 4), (torch.randn(rows, 64), torch.randn(rows, 64)), {}))


def test_a_limit_that_is_just_missed_costs_little_however_little_time_there_is() -> None:
    """No search throws away what another one found, and none is given too little time to find anything."""
    graph, mesh = large(), Mesh(("pipe",), (2,))
    limit, before = 1.0, 0.0
    for time_limit_s in (60.0, 1e-3, 60.0, 1e-3):
        request = Request(memory=limit if before else None, allow=("recompute",), time_limit_s=time_limit_s)
        found = find_pipeline(graph, mesh, FAST, 4, request, schedule="1f1b")
        assert not before or (found.peak_bytes <= limit and found.step_seconds < 1.1 * before)
        limit, before = found.peak_bytes - 1.0, found.step_seconds


def test_a_find_is_not_given_up_for_a_worse_one() -> None:
    """The second search finds the quickest plan again, as one that was cut short may: far too large."""
    graph, mesh = large(), Mesh(("pipe",), (2,))
    question = ask(in_rounds(graph, 4), within_stage(mesh), FAST)
    orders = orders_of("1f1b", 2, 4, None)

    def cutting(held: tuple[Held, ...]) -> Cutting:
        return Cutting.of(answer(question, Request(held=held, allow=("recompute",))), mesh, FAST, orders, None)

    free, asked = cutting(()).first(), list[tuple[Held, ...]]()
    limit = 0.85 * free.peak_bytes

    def whole_holding(held: tuple[Held, ...]) -> Cutting:
        asked.append(held)
        loose = tuple(replace(one, most=one.most + 0.1 * limit) for one in held)
        return cutting(loose if len(asked) == 1 else () if len(asked) == 2 else held)

    near = saving_less(free, limit, whole_holding, Clock(60.0), lambda text: None)
    assert near is not None and near[1].peak_bytes <= limit and len(asked) > 2
    for one, other in itertools.pairwise(asked):
        assert all(less.most <= more.most for less, more in zip(other, one, strict=True))


@pytest.mark.parametrize("far", [True, False])
def test_however_late_it_is_another_start_is_tried_where_what_fits_is_far_from_the_quickest(
    far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first one the search may end at whatever fits, with all of it on the host."""
    graph, mesh = large(), Mesh(("pipe",), (2,))
    free = find_pipeline(graph, mesh, FAST, 4, schedule="1f1b")
    limit, ends = 0.9 * free.peak_bytes, free.ends
    found, starts = replace(free, memory=tuple(replace(one, peak=0) for one in free.memory)), list[Any]()

    def first_is_far(start: Pipeline, *_: Any) -> tuple[Any, Pipeline]:
        starts.append(start)
        made = replace(found, step_seconds=9 * free.step_seconds) if far and len(starts) == 1 else found
        as_it_is = SimpleNamespace(moved=lambda _: made, best=lambda *_, **__: made)
        return as_it_is, made

    monkeypatch.setattr(pipelines, "saving_less", first_is_far)
    monkeypatch.setattr(Cutting, "for_what_stays", lambda _, quickest: replace(quickest, ends=(ends[0] - 1, *ends[1:])))
    request = Request(memory=limit, allow=("recompute",), time_limit_s=1e-3)
    made = find_pipeline(graph, mesh, FAST, 4, request, schedule="1f1b")
    assert len(starts) == (2 if far else 1) and made.step_seconds == free.step_seconds


def test_where_nothing_else_fits_all_layers_are_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As people do it by hand; but not where nothing may be run again."""
    graph, mesh = large(), Mesh(("pipe",), (2,))
    free = find_pipeline(graph, mesh, FAST, 4, schedule="1f1b")
    monkeypatch.setattr(pipelines, "saving_less", lambda *_: None)
    asked: list[float] = []

    def with_less_room(found: Pipeline, limit: float, *_: Any) -> Any:
        asked.append(limit)
        raise Infeasible("nothing fits")

    monkeypatch.setattr(pipelines, "with_less_room", with_less_room)
    request = Request(memory=0.75 * free.peak_bytes, allow=("recompute",))
    found = find_pipeline(graph, mesh, FAST, 4, request, schedule="1f1b")
    assert found.peak_bytes <= 0.75 * free.peak_bytes and len(asked) == 1
    assert free.step_seconds < found.step_seconds < 1.5 * free.step_seconds
    with pytest.raises(Infeasible, match=r"the least that was found takes 10\.0 MiB"):
        find_pipeline(graph, mesh, FAST, 4, replace(request, allow=("offload-activations",)), schedule="1f1b")


def test_less_is_saved_of_stages_as_the_first_order_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever order is the best of the plan in which all layers are run again: its ends are not those of one stage on
    each rank, with which the search goes on.
    """
    graph, mesh = large(), Mesh(("pipe",), (2,))
    free, starts = find_pipeline(graph, mesh, FAST, 4, schedule="1f1b"), list[int]()

    def interleaved(self: Cutting, orders: Any, best: Pipeline, *, moved: bool) -> Pipeline:
        cuts = replace(self.cuts, count=4, _closed=set())
        return replace(self, schedules=("interleaved",), chunks=2, cuts=cuts).first()

    def counted(start: Pipeline, *others: Any) -> Any:
        starts.append(start.schedule.stages_per_rank)
        return saving_less(start, *others)

    monkeypatch.setattr(Cutting, "best", interleaved)
    monkeypatch.setattr(pipelines, "FAR", 0.0)
    monkeypatch.setattr(pipelines, "saving_less", counted)
    with pytest.raises(Infeasible):
        find_pipeline(graph, mesh, FAST, 4, Request(memory=0.4 * free.peak_bytes, allow=("recompute",)))
    assert len(starts) >= 2 and {*starts} == {1}
