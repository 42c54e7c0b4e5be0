"""Step time over memory: what more memory cannot worsen, what the picture and the table say, and the flags for it."""

import json
import math
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import Infeasible, NoAnswerInTime
from autopar.plan import Plan
from autopar.search import Question, Request, answer, ask, curve
from autopar.search.__main__ import main
from autopar.search.memory_options import ALLOWED, allowed
from autopar.trace import capture, graph_of
from cost_models.hardware import Hardware
from cost_models.reserve import room_in
from tests.support.check import mesh_of
from tests.support.tiny import BUILD, TINY

H100 = Hardware.load("h100-sxm")
GOOD = ("tiny.py:build", "--mesh", "a=2", "--hardware", "h100-sxm", "--quiet")
SVG = "{http://www.w3.org/2000/svg}"


class Layers(nn.Module):
    """Its activations are what memory goes to."""

    def __init__(self) -> None:
        super().__init__()
        one, two = ([nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)] for _ in range(2))
        self.layers = nn.Sequential(*one, nn.GELU(), *two)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@cache
def question() -> Question:
    with torch.device("meta"):
        model, x = Layers(), torch.empty(4096, 64)
    return ask(graph_of(capture(model, (x,), {})), mesh_of(2), H100)


@cache
def fastest() -> Plan:
    return answer(question())


@cache
def points_of(*allow: str, simulation: bool = False) -> tuple[curve.Point, ...]:
    return curve.memory_curve(question(), Request(allow=allow or None, simulation=simulation), points=4)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.py").write_text(TINY + BUILD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"__pycache__", "tiny.py"}


# --- the curve -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("simulation", [False, True], ids=["sum", "simulated"])
def test_step_time_never_rises_with_memory_and_every_plan_fits(simulation: bool) -> None:
    points = points_of(simulation=simulation)
    assert len(points) == 4
    for lower, upper in pairwise(points):
        assert lower.limit < upper.limit
        assert lower.plan.predicted_seconds >= upper.plan.predicted_seconds
    for point in points:
        assert point.plan.peak_bytes["hbm"] <= point.limit == point.plan.memory_limit
        assert 0 < point.plan.bound <= point.plan.step_seconds


def test_the_ends_are_the_least_that_does_and_what_the_fastest_plan_needs() -> None:
    least, *_, last = points_of()
    assert last.limit == fastest().peak_bytes["hbm"]
    assert last.plan.predicted_seconds == pytest.approx(fastest().predicted_seconds)
    assert least.plan.predicted_seconds > last.plan.predicted_seconds
    with pytest.raises(Infeasible):
        answer(question(), Request(memory=least.limit / 2))


def test_what_is_recomputed_and_offloaded_is_counted() -> None:
    rows = {way: curve.rows_of(points_of(way)) for way in ("recompute", "offload-activations", "offload-parameters")}
    for way, (least, *_, last) in rows.items():
        told = {
            "recompute": least["recomputed"],
            "offload-activations": least["offloaded_bytes"],
            "offload-parameters": least["host_bytes"] - least["offloaded_bytes"],
        }
        assert {one for one, figure in told.items() if figure} == {way}
        assert (last["recomputed"], last["offloaded_bytes"], last["host_bytes"]) == (0, 0, 0)
        assert least["to_fastest"] > last["to_fastest"] == 1.0


def test_a_search_that_is_cut_leaves_the_plans_of_lower_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    points = points_of()
    limits = [point.limit for point in points]

    def cut(question: Question, request: Request, **given: Any) -> Plan:
        if request.memory is not None and limits[1] <= request.memory < limits[-1]:
            raise NoAnswerInTime("no plan was found")
        return answer(question, request, **given)

    monkeypatch.setattr(curve, "answer", cut)
    least, *between, last = curve.memory_curve(question(), points=4)
    assert [least.limit, *(point.limit for point in between), last.limit] == limits
    assert all(point.plan.choices == least.plan.choices for point in between)
    assert all(point.plan.gap >= least.plan.gap for point in between)
    assert last.plan.predicted_seconds < least.plan.predicted_seconds


def test_without_a_word_of_what_would_do_the_least_limit_is_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def silent(question: Question, request: Request, **given: Any) -> Plan:
        memory = request.memory
        asked.append(memory or 0.0)
        if memory is not None and memory < 1e7:
            raise Infeasible("no plan fits")
        return replace(fastest(), memory_limit=memory, peak_bytes={"hbm": int(memory or 1e8)})

    monkeypatch.setattr(curve, "answer", silent)
    found = curve.memory_curve(question(), points=2)
    assert 1e7 <= found[0].limit < found[-1].limit == 1e8
    assert len(asked) <= 1 + curve.TRIES


def test_the_best_at_a_limit_is_the_quickest_that_fits_wherever_it_was_found() -> None:
    def made(seconds: float, peak: int, limit: float, bound: float) -> Plan:
        return replace(fastest(), step_seconds=seconds, peak_bytes={"hbm": peak}, memory_limit=limit, bound=bound)

    plans = [made(3.0, 10, 10, 2.0), made(4.0, 15, 20, 3.5), made(1.0, 30, 30, 1.0)]
    points = curve.best_at([5, 10, 20, 30], plans)
    told = [(point.limit, point.plan.step_seconds, point.plan.bound) for point in points]
    assert told == [(10, 3.0, 2.0), (20, 3.0, 1.0), (30, 1.0, 1.0)], "what a better plan disproves is not told"


# --- the picture, the table and the price ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5])
def test_the_picture_is_xml_with_a_point_for_each_limit_within_its_frame(count: int) -> None:
    points = points_of()[-count:]
    mesh = points[0].plan.mesh
    named = [replace(point, plan=replace(point.plan, hardware="<&>")) for point in points]
    root = ElementTree.fromstring(curve.picture(named))
    circles = root.findall(f"{SVG}circle")
    assert len(circles) == len(points)
    across, down = ([float(circle.attrib[key]) for circle in circles] for key in ("cx", "cy"))
    assert across == sorted(across) and down == sorted(down), "more memory is to the right, less time is further down"
    assert across[0] >= curve.LEFT and across[-1] <= curve.WIDTH - curve.RIGHT
    assert down[0] >= curve.TOP and down[-1] <= curve.HEIGHT - curve.BOTTOM
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert {f"Step time over memory: {mesh}, <&> (predicted)", "ms per step"} <= {*texts}
    assert any(text is not None and text.startswith("memory per rank, ") for text in texts)


def test_the_table_has_a_line_for_each_limit() -> None:
    points = points_of()
    head, names, *lines = curve.table(points).splitlines()
    assert head.startswith("step time over memory per rank, predicted (summed): ")
    assert all(name in names for name in ("limit", "ms per step", "gap", "recomputed", "offloaded", "on the host"))
    assert len(lines) == len(points) and len({len(line) for line in (names, *lines)}) == 1


def test_where_the_limit_binds_the_price_of_memory_is_told_and_no_more_is_saved() -> None:
    """By the prices of a bound, more memory saves at most so much of the bound."""
    top = fastest().peak_bytes["hbm"]
    limit = float(int(0.6 * top))
    plan = answer(question(), Request(memory=limit, allow=("recompute",)))
    price = plan.search["ms_per_gib:hbm"]
    assert isinstance(price, float) and price > 0 and "price of memory: +" in plan.explain()
    assert "it shapes the plan; the fastest takes " in " ".join(plan.explain().split())
    for more in (1.05, 1.2, 1.5):
        roomier = answer(question(), Request(memory=limit * more, allow=("recompute",)))
        most = price / 1e3 / 2**30 * limit * (more - 1)
        assert plan.bound - roomier.step_seconds <= most + 1e-3 * plan.step_seconds


def test_where_the_limit_does_not_bind_there_is_no_price_of_memory() -> None:
    for limit in (None, 2.0 * fastest().peak_bytes["hbm"]):
        plan = answer(question(), Request(memory=limit))
        assert "price of memory" not in plan.explain() and not any("ms_per_gib" in fact for fact in plan.search)


# --- on the command line ---------------------------------------------------------------------------------------------


def test_the_command_prints_the_curve_and_draws_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GOOD, "--memory-curve", "curve.svg", "-o", "plan.json"]) == 0
    out = capsys.readouterr().out
    assert "step time over memory per rank, predicted (simulated): a=2, h100-sxm" in out
    assert files(folder) == {"curve.svg", "plan.json"}
    assert ElementTree.parse(folder / "curve.svg").getroot().tag == f"{SVG}svg"


def test_the_curve_is_part_of_the_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GOOD, "--json", "--memory-curve"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = told["memory_curve"]
    assert len(rows) >= 3 and files(folder) == set()
    assert all(above["predicted_seconds"] <= below["predicted_seconds"] for below, above in pairwise(rows))
    room = room_in(80e9, H100, (2,))  # limits are of the device, of which a part is no plan's
    assert rows[-1]["limit_bytes"] == math.ceil(room.taken(told["peak_bytes"]["hbm"])) and rows[-1]["to_fastest"] == 1.0
    assert all(row["peak_bytes"]["hbm"] <= row["limit_bytes"] and row["gap"] >= 0 for row in rows)
    assert told["seconds"]["memory_curve"] > 0
    assert {"recomputed", "offloaded_bytes", "host_bytes"} <= rows[0].keys()
    assert (told["recomputed"], told["offloaded_bytes"]) == (0, 0) and "ms_per_gib" in told


def test_without_the_flag_there_is_no_curve(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GOOD, "--json"]) == 0
    assert "memory_curve" not in json.loads(capsys.readouterr().out)


def test_a_picture_that_cannot_be_written_leaves_the_old_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "curve.svg").write_text("old")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device", "curve.svg")

    monkeypatch.setattr(os, "replace", full)
    assert main([*GOOD, "--memory-curve", "curve.svg"]) == 2
    assert capsys.readouterr().err == "autopar.search: cannot write curve.svg: No space left on device\n"
    assert files(folder) == {"curve.svg"} and (folder / "curve.svg").read_text() == "old"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--allow", "swap"), "allow 'swap' is not known; choose some of recompute, offload-activations, "),
        (("--allow", "offload-parameters,none"), "allow 'none' is not known; choose some of "),
        (("--allow", "recompute,,offload-parameters"), "allow '' is not known"),
        (("--allow",), "argument --allow: expected one argument"),
        (("--memory-curve", "curve.png"), "--memory-curve curve.png is no picture; name a file.svg"),
        (("--memory-curve", "lost/curve.svg"), "lost of --memory-curve lost/curve.svg does not exist; make it first"),
        (("--memory-curve", "a.svg", "--dot", "a.svg"), "--dot and --memory-curve both name a.svg; give each its own"),
    ],
)
def test_what_makes_no_sense_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], sentence: str
) -> None:
    assert main([*GOOD, *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("autopar.search: ") and sentence in err and err.count("\n") == 1
    assert files(folder) == set()


# --- what may be recomputed and offloaded -----------------------------------------------------------------------------


def test_the_ways_are_words_in_any_order() -> None:
    assert allowed(None) is None
    assert allowed("none") == allowed(["none"]) == allowed(()) == ()
    assert (
        allowed("offload-parameters, recompute")
        == allowed({"recompute", "offload-parameters"})
        == ("recompute", "offload-parameters")
    )
    assert allowed(ALLOWED) == (*ALLOWED,)
    with pytest.raises(
        ValueError, match="allow 'recompute offload' is not known; choose some of recompute, offload-act"
    ):
        allowed(["recompute offload"])


def test_what_is_not_named_is_not_done(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def found(*given: str) -> dict[str, Any]:
        status = main([*GOOD, "--json", *given])
        out, err = capsys.readouterr()
        assert status == (0 if out else 3), err
        return json.loads(out) if out else {}

    rows = found("--memory-curve", "--allow", "offload-parameters")["memory_curve"]
    assert all(row["recomputed"] == row["offloaded_bytes"] == 0 for row in rows) and rows[0]["host_bytes"] > 0
    least = f"{rows[0]['limit_bytes']}B"
    assert found("--memory", least, "--allow", "offload-parameters")["peak_bytes"]["host"] > 0
    assert found("--memory", least, "--allow", "none") == {}
    assert "host" not in found("--memory", least, "--allow", "recompute").get("peak_bytes", {})
