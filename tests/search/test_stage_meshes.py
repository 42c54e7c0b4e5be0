"""How many stages: the bound below every cut, and no arrangement that is searched by itself is better."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from autopar.errors import Infeasible
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.pipeline import Durations, make_schedule, play
from autopar.plan.renamed import names_of
from autopar.rewrite.micro_batches import in_rounds
from autopar.search import Request, search
from autopar.search.context import Question, ask
from autopar.search.orders import within_stage
from autopar.search.pipeline import Pipeline
from autopar.search.pipelines import find_pipeline, pipeline_of
from autopar.search.solve import floor_s
from autopar.search.stage_meshes import Arranged, arrangements, best_arranged, documents, least_of_stages, table
from autopar.trace import capture, graph_of
from cost_models.hardware import Link
from tests.search.test_pipelines import Layers
from tests.support.machines import FAST, LEAST, machine

BETWEEN = replace(  # within a node all is quick; between nodes even a gradient costs more than the work
    machine(1e12, flops=1e13), name="slow-between", ranks_per_node=2,
    links={"intra": Link(LEAST, 1e12), "inter": Link(LEAST, 2e9)},
)  # fmt: skip
ALONE = Request(allow=())
WIDE = 64  # rows of a batch


@cache
def graph() -> Graph:
    return graph_of(capture(Layers(*(1024,) * 8), (torch.randn(WIDE, 64), torch.randn(WIDE, 64)), {}))


def counts(stages: int) -> list[int]:
    return [stages * times for times in (1, 2, 4) if WIDE % (stages * times) == 0]


@cache
def question(mesh: Mesh, count: int) -> Question:
    return ask(in_rounds(graph(), count), within_stage(mesh), BETWEEN)


def floor(mesh: Mesh, count: int) -> float:
    return floor_s(question(mesh, count), None)


def find(mesh: Mesh, count: int, request: Request, moved: bool) -> Pipeline:
    return pipeline_of(question(mesh, count), mesh, request, moved=moved, named=True)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_no_cut_is_played_in_less_than_the_bound(stages: int, name: str) -> None:
    draw = random.Random(stages)
    for _ in range(40):
        count = draw.randint(1, 20)
        forward = tuple(draw.choice((0.0, draw.random(), 5 * draw.random())) for _ in range(stages))
        backward = tuple(draw.random() * 3 for _ in range(stages))
        halves = tuple(one / 2 for one in backward)
        durations = Durations(forward, halves, halves, (0.0,) * (stages - 1))
        work = count * (sum(forward) + sum(backward))
        played = play(make_schedule(name, stages, count), durations).makespan
        assert least_of_stages(work, stages, count) <= played * (1 + 1e-12)


@pytest.mark.parametrize(("stages", "count"), [(1, 1), (1, 7), (2, 8), (4, 4), (4, 16), (8, 64)])
def test_the_bound_is_that_of_the_cut_for_which_it_is_least(stages: int, count: int) -> None:
    share = 1 - 1 / count
    shares = [share**stage for stage in range(stages)]
    each = [one / sum(shares) / count for one in shares]  # of one second of work
    takes = [count * one + sum(each[:stage]) for stage, one in enumerate(each)]
    if count > 1:
        assert max(takes) == pytest.approx(min(takes)) == pytest.approx(least_of_stages(1.0, stages, count))
    else:
        assert least_of_stages(1.0, stages, count) == 1.0


def test_every_divisor_and_mesh_of_a_stage_is_arranged() -> None:
    rows = arrangements(8, BETWEEN, None, counts)
    assert [str(row.mesh) for row in rows] == [
        "pipe=2,data=2,tensor=2", "pipe=2,data=4", "pipe=4,data=2", "pipe=8",
    ]  # fmt: skip
    assert rows[2].counts == (16, 8, 4)  # what is nearest to four times as many as stages comes first
    assert [str(row.mesh) for row in arrangements(8, BETWEEN, (4,), counts)] == ["pipe=4,data=2"]
    assert arrangements(8, BETWEEN, (3,), counts) == () == arrangements(8, BETWEEN, None, lambda _: [])


def test_the_best_arrangement_is_at_least_as_quick_as_each_by_itself() -> None:
    devices = Mesh(("data",), (4,))
    unstaged = search(graph(), devices, BETWEEN, ALONE)
    rows = best_arranged(
        arrangements(4, BETWEEN, None, counts), Arranged(devices, found=unstaged, searched=True), find, floor, ALONE
    )
    best = rows[0]
    assert isinstance(best.found, Pipeline) and best.searched and best.seconds < unstaged.predicted_seconds
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    alone = {
        (mesh, count): find_pipeline(graph(), mesh, BETWEEN, count, ALONE).step_seconds
        for mesh in (Mesh(("pipe", "data"), (2, 2)), Mesh(("pipe",), (4,)))
        for count in counts(mesh.sizes[0])
    }
    assert best.seconds <= min(alone.values()) * (1 + 1e-9)
    for (mesh, count), seconds in alone.items():
        assert least_of_stages(floor(mesh, count), mesh.sizes[0], count, in_halves=True) <= seconds
    told = table(rows)
    assert told.splitlines()[2].split()[0] == str(best.mesh) and "1.00 x" in told.splitlines()[2]
    assert documents(rows)[0]["simulated_seconds"] == best.seconds


def test_what_cannot_be_quicker_is_not_searched() -> None:
    """On links as quick as memory stages only add a bubble; the bound says so before anything is solved."""
    mesh = Mesh(("data",), (4,))
    unstaged = search(graph(), mesh, FAST, ALONE)

    def never(mesh: Mesh, count: int, request: Request, moved: bool) -> Pipeline:
        raise AssertionError(f"searched {mesh} in {count}")

    def work(mesh: Mesh, count: int) -> float:
        return mesh.sizes[0] * unstaged.predicted_seconds  # as much as makes even a perfect division as slow

    rows = best_arranged(
        arrangements(4, FAST, None, counts), Arranged(mesh, found=unstaged, searched=True), never, work, ALONE
    )
    assert rows[0].found is unstaged
    assert all("skipped: every step takes" in row.why and row.least_s >= unstaged.predicted_seconds for row in rows[1:])


def test_the_time_limit_and_ctrl_c_leave_the_best_by_then() -> None:
    rows = arrangements(4, BETWEEN, None, counts)
    hurried = best_arranged(rows, None, find, floor, replace(ALONE, time_limit_s=1e-3))
    assert hurried[0].found is not None and "the time was up" in hurried[1].why
    pressed = best_arranged(rows, None, find, floor, ALONE, stop=lambda: True)
    assert pressed[0].found is not None and sum(row.found is not None for row in pressed) == 1


def test_where_nothing_fits_the_least_that_would_is_said() -> None:
    rows = arrangements(4, BETWEEN, None, counts)
    why = r"^of 2 arrangements of 4 devices in stages none fits; on the best: "
    with pytest.raises(Infeasible, match=why) as error:
        best_arranged(rows, None, find, floor, replace(ALONE, memory=1e3))
    assert error.value.enough is not None and error.value.enough > 1e3


def test_axes_are_called_by_what_they_do() -> None:
    found = find(Mesh(("pipe", "odd"), (2, 2)), 8, ALONE, False)
    (name,) = found.whole.mesh.names
    assert name in ("data", "tensor", "sequence") and found.mesh.names == ("pipe", name)
    assert names_of(found.whole) == (name,)
    assert all(plan.mesh == found.whole.mesh for plan in found.plans)
