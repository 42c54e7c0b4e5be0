"""Several machines and numbers of devices in one table: figures follow from the plans, the answer from figures."""

import json
import math
import os
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from autopar.assemble.liveness import liveness
from autopar.ir.graph import Graph
from autopar.search import Request, answer, ask, sizing
from autopar.search.__main__ import main
from autopar.search.command import sized
from autopar.search.sizing import BOTH, Point, Sizing, counted, told
from cost_models.hardware import Hardware
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.tiny import TINY

MODEL = f"""{TINY}
def build():
    with torch.device("meta"):
        return Tiny(), (torch.empty(8, 24), torch.empty(8, 24))
"""
MACHINES = ("h100-sxm", "a100-80gb")


@cache
def points() -> tuple[Point, ...]:
    """Of a block whose steps take longer than their latencies."""
    found = [
        Point(name, ranks, answer(ask(family("block").graph, mesh_of(ranks), Hardware.load(name)), Request()))
        for name in MACHINES
        for ranks in (1, 2, 4)
    ]
    return (*found, Point("h100-sxm", 8, None, "does not fit"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path / 'model.py'}:build"


def test_figures_follow_from_the_plans() -> None:
    unit, per_step = counted(points()[0].plan)  # type: ignore[arg-type]
    found = Sizing(points(), unit, per_step, {"h100-sxm": 3.0}, wanted=1e9)
    for point in found.points[:-1]:
        steps = 1e9 / per_step
        assert point.plan is not None
        assert found.training_days(point) == pytest.approx(steps * point.plan.predicted_seconds / 86400)
        smallest = next(other for other in found.points if other.hardware == point.hardware)
        speedup = smallest.seconds / point.seconds
        assert found.efficiency(point) == pytest.approx(speedup * smallest.devices / point.devices)
        cost = found.cost(point)
        if point.hardware == "h100-sxm":
            hours = 1e6 / per_step * point.seconds / 3600 * point.devices
            assert cost == pytest.approx(3.0 * hours)
        else:
            assert cost is None


def test_the_answer_is_the_cheapest_that_is_quick_enough() -> None:
    unit, per_step = counted(points()[0].plan)  # type: ignore[arg-type]
    everywhere = {"h100-sxm": 3.0, "a100-80gb": 1.0}
    days = sorted(Sizing(points(), unit, per_step, wanted=1e9).training_days(point) for point in points()[:-1])  # type: ignore[type-var]
    for limit in (days[0] * 0.9, *(one * 1.001 for one in days if one)):  # type: ignore[operator]
        for prices in (everywhere, {}):
            found = Sizing(points(), unit, per_step, prices, wanted=1e9, days=limit)
            able = [point for point in points()[:-1] if found.training_days(point) <= limit]  # type: ignore[operator]
            if not able:
                assert found.answer is None and "none of these does it" in sizing.told(found)
            elif prices:
                assert found.cost(found.answer) == min(found.cost(point) for point in able)  # type: ignore[arg-type,type-var]
            else:
                assert found.answer.devices == min(point.devices for point in able)  # type: ignore[union-attr]


def test_the_command_prints_and_draws_the_table(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "table.svg"
    asked = [model, "--hardware", ",".join(MACHINES), "--devices", "1,2,3", "--quiet", "--no-simulation"]
    assert main([*asked, "--price", "2", "--tokens", "1e6", "--days", "30", "--picture", str(picture)]) == 0
    told = capsys.readouterr().out
    lines = told.splitlines()
    assert [line.split()[:2] for line in lines[2:8]] == [[name, n] for name in MACHINES for n in "123"]
    assert "in 30 days: 1 device of" in lines[-1]
    circles = [one for one in ElementTree.parse(picture).iter() if one.tag.endswith("circle")]
    assert len(circles) == 6
    assert main([*asked, "--json"]) == 0
    told = capsys.readouterr().out
    document = json.loads(told)
    assert told.endswith("}\n")
    assert document["unit"] == "samples" and document["per_step"] == 8
    for point in document["points"]:
        assert point["rate_per_device"] == pytest.approx(8 / point["predicted_seconds"] / point["devices"])
        assert math.prod(point["mesh"].values()) == point["devices"]


def test_a_mesh_that_is_found_is_told(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[Graph] = []
    monkeypatch.setattr("autopar.assemble.facts.liveness", lambda graph: looked_at.append(graph) or liveness(graph))
    plan = tmp_path / "plan.json"
    asked = [model, "--devices", "4", "--hardware", "h100-sxm", "--quiet"]
    assert main([*asked, "-o", str(plan)]) == 0
    assert sum(graph is looked_at[0] for graph in looked_at) == 1, "once for all meshes"
    told = capsys.readouterr().out
    assert "meshes of 4 devices, predicted" in told and plan.is_file()
    assert main([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["meshes"]) == 2 and document["meshes"][0]["mesh"] == document["mesh"]
    assert document["meshes"][0]["predicted_seconds"] == min(row["predicted_seconds"] for row in document["meshes"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "give --mesh, for example data=8,tensor=8, or --devices 64"),
        (["--mesh", "data=2", "--devices", "2"], "one of the two"),
        (["--devices", "0"], "0 devices are none"),
        (["--devices", "many"], "'many' is not a number of devices; write for example 64"),
        (["--devices", "2,"], "names nothing between two commas"),
        (["--devices", "2,2"], "names '2' twice"),
        (["--devices", "2,4", "-o", "plan.json"], "-o is about one plan, not about a table, and several devices"),
        (["--devices", "2,4", "--baselines"], "--baselines is about one plan"),
        (["--devices", "2,4", "--html", "plan.html"], "--html is about one plan"),
        (["--devices", "2,4", "--top", "3"], "--top is about one plan"),
        (["--devices", "2", "--price", "3", "--top", "3"], "and --price gives one; leave one of the two out"),
        (["--devices", "2", "--price", "2,h100-sxm=3"], "--price says twice what h100-sxm costs; leave one out"),
        (["--devices", "2", "--price", "free"], "--price 'free' is no price; write 2.5, or h100-sxm=2.5"),
        (["--devices", "2", "--price", "tpu=1"], "--price names 'tpu'; of the table are h100-sxm"),
        (["--devices", "2", "--days", "7"], "--days says within what time, and not for how much; give --tokens"),
        (["--devices", "2", "--tokens", "-1"], "--tokens -1 makes no sense"),
        (["--devices", "2", "--picture", "table.png"], "is no picture; name a file.svg"),
    ],
)
def test_wrong_words_are_refused_in_a_sentence(
    model: str, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([model, "--hardware", "h100-sxm", *words]) == 2
    told = capsys.readouterr()
    assert sentence in told.err and not told.out


def test_a_picture_that_cannot_be_written_is_told(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    picture = tmp_path / "table.svg"
    asked = [model, "--hardware", "h100-sxm", "--devices", "1,2", "--quiet", "--picture", str(picture)]
    assert main(asked) == 2
    assert capsys.readouterr().err == f"autopar.search: cannot write {picture}: No space left on device\n"
    assert [one.name for one in tmp_path.iterdir() if one.suffix == ".svg" or one.suffix == ".tmp"] == []


def test_ctrl_c_leaves_the_points_that_were_found(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    searched: list[int] = []
    work = sized.in_best_rounds

    def pressing(*args: Any) -> Any:
        found = work(*args)
        searched.append(found[1].plan.mesh.ranks)
        if len(searched) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return found

    monkeypatch.setattr(sized, "in_best_rounds", pressing)
    asked = [model, "--hardware", "h100-sxm", "--devices", "1,2,3", "--quiet"]
    assert main(asked) == 130
    told = capsys.readouterr()
    assert told.err == "autopar.search: interrupted: the table has what was found by then\n"
    assert searched == [1, 2]
    rows = told.out.splitlines()[2:]
    assert "data=1" in rows[0] and all("not searched: interrupted" in row for row in rows[1:]) and len(rows) == 3


def test_a_table_of_both_measures_says_so() -> None:
    plan = points()[1].plan
    assert plan is not None
    plans = [Point("h100-sxm", 2, replace(plan, simulated_seconds=seconds)) for seconds in (None, 1.0)]
    assert told(Sizing(tuple(plans), "samples", 8)).startswith(f"the best plan of each, {BOTH};")
    assert told(Sizing(tuple(plans[1:]), "samples", 8)).startswith("the best plan of each, predicted (simulated);")
