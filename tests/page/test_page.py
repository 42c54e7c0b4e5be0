"""The page as text: whole, bounded, always the same, with all that the plan has, and no name becomes a part of it."""

import re
from dataclasses import replace
from math import isclose

import pytest
import torch
from torch import nn

from autopar.errors import PlanMismatch
from autopar.ir.mesh import Mesh
from autopar.page import Beside, to_html, write_html
from autopar.page.blocks import blocks_of
from autopar.page.step import figure
from autopar.page.tenants import stack_of
from autopar.plan import Plan
from autopar.plan.reading import ms
from autopar.plan.store import dumps
from autopar.plan.tell import human
from autopar.plan.value import Candidate
from autopar.search import search
from autopar.simulate.timeline import timeline_of
from autopar.trace import capture, lower, normalise
from cost_models.hardware import Hardware
from cost_models.simulator import Event, Hold, play
from tests.page.pages import Element, read
from tests.simulate.plans import best, drawn
from tests.support.machines import FAST

EVIL = "<script>alert('x & y')</script>"
LARGEST = 2 * 2**20  # bytes of a file


class Evil(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module(EVIL, nn.Linear(16, 16))

    def forward(self, x):
        return self.get_submodule(EVIL)(x).square().mean()


@pytest.fixture(scope="module")
def plan() -> Plan:
    found = replace(drawn("gpt2", (2, 2), 1)[0], prefetch=1, memory_limit=2.0**30, notes=("a <note> & more",))
    names = ("optimum without overlap", "data-parallel", "<fsdp>")
    many = [Candidate(name, 1e-3 * i, 2e-3 * i, 1000 * i, i, "") for i, name in enumerate(names, 1)]
    many.append(Candidate("nothing fits", None, None, None, None, "computes for 17 ms or more"))
    return replace(found, candidates=tuple(many), search={"candidate": "data-parallel"})


@pytest.fixture(scope="module")
def page(plan: Plan) -> Element:
    return read(to_html(plan, model="a <model>"))


def texts(element: Element, name: str) -> list[str]:
    return [one.text for one in element.all(name)]


def test_what_is_drawn_of_a_stream_is_as_wide_as_it_works(plan, page):
    timeline = timeline_of(plan, drawn("gpt2", (2, 2), 1)[1], 1)
    streams = {e.attributes["data-stream"]: e for e in page.all("svg") if "data-stream" in e.attributes}
    assert {*streams} == {stream for stream, busy in timeline.busy_s.items() if busy}
    for stream, element in streams.items():
        rects = [one for one in element.all("rect") if not {"lane", "x"} & {*one.attributes["class"].split()}]
        drawn_part = sum(float(one.attributes["width"].rstrip("%")) for one in rects) / 100
        assert isclose(drawn_part * timeline.seconds, timeline.busy_s[stream], rel_tol=1e-2)
        assert all(len(one.all("title")) == 1 for one in rects)


def test_it_has_the_figures_of_the_plan(plan, page):
    assert texts(page, "h1") == ["a <model>"] and ms(plan.predicted_seconds) in texts(page, "dd")
    assert page.all("title")[0].text == f"a <model>: {ms(plan.predicted_seconds)} a step, {plan.measure}"
    limit = f"of the limit {human(2.0**30)}"
    assert any(limit in told for told in texts(page, "dd"))
    assert "a <note> & more" in texts(page, "li")
    assert [e for e in page.every() if e.attributes.get("data-tier") == "hbm"]


def test_all_candidates_are_there_and_one_is_chosen(plan, page):
    (table,) = [t for t in page.all("table") if "Candidates, simulated" in texts(t, "caption")]
    rows = table.all("tbody")[0].all("tr")
    assert [row.all("th")[0].text for row in rows] == [one.name for one in plan.candidates]
    for row, one in zip(rows, plan.candidates, strict=True):
        assert (one.simulated_seconds is None) or ms(one.simulated_seconds) in texts(row, "td")
        assert (one.peak_bytes is None) or human(one.peak_bytes) in texts(row, "td")
    assert [row.all("th")[0].text for row in rows if "class" in row.attributes] == ["data-parallel"]
    assert "computes for 17 ms or more" in rows[-1].text


def test_what_else_was_searched_is_there_when_it_is_given(plan):
    meshes = [Beside("data=4", 2e-3, 1000, "<fits>"), Beside("data=2,tensor=2", None, None, "does not fit")]
    curve = [(1e9, 3e-3), (2e9, 2.5e-3), (4e9, 2e-3)]
    tree = read(to_html(plan, meshes=meshes, baselines=[Beside("zero2", 1e-3, 5e8)], curve=curve))
    (table,) = [t for t in tree.all("table") if f"Meshes, {plan.measure}" in texts(t, "caption")]
    assert [row.all("th")[0].text for row in table.all("tbody")[0].all("tr")] == ["data=4", "data=2,tensor=2"]
    assert "<fits>" in texts(table, "td")
    circles = tree.all("circle")
    across = [float(one.attributes["cx"].rstrip("%")) for one in circles]
    down = [float(one.attributes["cy"]) for one in circles]
    assert len(circles) == 3 and across == sorted(across) and down == sorted(down)


def test_it_needs_nothing_else_and_says_what_its_pictures_show(plan, page):
    text = to_html(plan)
    assert not re.search(r"https?:|src=|@import|url\((?!#)|<script|<link", text)
    ids = [e.attributes["id"] for e in page.every() if "id" in e.attributes]
    assert len(ids) == len({*ids}) and {*re.findall(r"url\(#([\w-]+)\)", text)} <= {*ids}
    pictures = [e for e in page.all("svg") if e.attributes.get("role") == "img"]
    assert pictures and all(e.all("title") for e in pictures)
    for table in page.all("table"):
        assert all("scope" in one.attributes for one in table.all("th")) and table.all("thead")[0].all("th")
        widths = {len(row.all("th")) + len(row.all("td")) for row in table.all("tr")}
        assert len(widths) == 1


def test_names_are_text(tmp_path):
    graph = normalise(lower(capture(Evil(), (torch.randn(8, 16),), {})))
    found = search(graph, Mesh(("data",), (2,)), Hardware.load("h100-sxm"))
    tree = read(to_html(found, model=EVIL))
    assert not tree.all("script") and f"{EVIL}: " in tree.all("title")[0].text
    assert any(EVIL in code for code in texts(tree, "code")), "the module is named in the table"
    fragment = found._repr_html_()
    assert not read(fragment).all("script") and "alert" in fragment and ms(found.predicted_seconds) in fragment


def test_the_same_plan_gives_the_same_bytes(plan, tmp_path):
    write_html(plan, tmp_path / "one.html")
    write_html(Plan.loads(dumps(plan), "here"), tmp_path / "two.html")
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_it_stays_small_however_long_the_step_is(plan):
    """What grows with the step is the picture; a module more is a row, and equal ones are one."""
    assert len(to_html(plan).encode()) < LARGEST / 4
    timeline = play(tiled(timeline_of(plan, drawn("gpt2", (2, 2), 1)[1], 1).events, 12))
    assert len(timeline.events) > 5_000
    drawn_long = figure(timeline, blocks_of(timeline, plan), [stack_of(timeline, "hbm")], None)
    assert len(drawn_long.encode()) < LARGEST * 3 / 4


def tiled(events: tuple[Event, ...], times: int) -> list[Event]:
    """One step behind the other; what is resident is there once."""

    def moved(hold: Hold, by: int) -> Hold:
        since = None if hold.since is None else hold.since + by
        return replace(hold, since=since, until=hold.until and tuple(other + by for other in hold.until))

    return [
        replace(
            event, after=tuple(other + by for other in event.after),
            holds=tuple(moved(hold, by) for hold in event.holds if not (hold.resident and by)),
        )
        for by in range(0, times * len(events), len(events)) for event in events
    ]  # fmt: skip


def test_a_plan_that_needs_no_transfer_has_a_page():
    found, _ = best("mlp", (2,))
    tree = read(to_html(found))
    assert texts(tree, "h1") == ["plan"] and tree.all("table")


def test_a_page_is_not_made_on_another_machine(plan, tmp_path):
    with pytest.raises(PlanMismatch, match=r"was priced on h100-sxm"):
        write_html(plan, tmp_path / "plan.html", FAST)
    assert not any(tmp_path.iterdir())
