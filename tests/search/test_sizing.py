"""Several machines and numbers of devices in one table: figures follow from the plans, the answer from figures."""

import json
import math
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from autopar.search import Request, answer, ask, sizing
from autopar.search.__main__ import main
from autopar.search.sizing import Point, Sizing, counted
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
    assert "in 30 days: 1 devices of" in lines[-1]
    circles = [one for one in ElementTree.parse(picture).iter() if one.tag.endswith("circle")]
    assert len(circles) == 6
    assert main([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["unit"] == "samples" and document["per_step"] == 8
    for point in document["points"]:
        assert point["rate_per_device"] == pytest.approx(8 / point["predicted_seconds"] / point["devices"])
        assert math.prod(point["mesh"].values()) == point["devices"]


def test_a_mesh_that_is_found_is_told(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    asked = [model, "--devices", "4", "--hardware", "h100-sxm", "--quiet"]
    assert main([*asked, "-o", str(plan)]) == 0
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
        (["--devices", "2,4", "-o", "plan.json"], "-o is about one plan, and this is a table"),
        (["--devices", "2,4", "--baselines"], "--baselines is about one plan"),
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
