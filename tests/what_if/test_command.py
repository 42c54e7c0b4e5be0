"""The command: a plan's file in, two answers out; what it writes passes for no real machine's plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from autopar.__main__ import main as autopar
from autopar.measure.__main__ import main as measure
from autopar.plan import Plan
from autopar.scale.__main__ import main as scale
from autopar.search.__main__ import main as search
from autopar.what_if.__main__ import main
from cost_models.hardware import Hardware
from tests.support.tiny import BUILD, TINY

Printed = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model and its plan."""
    made = tmp_path_factory.mktemp("what-if")
    (made / "tiny.py").write_text(TINY + BUILD)
    asked = [f"{made}/tiny.py:build", "--mesh", "data=2,tensor=2", "--hardware", "h100-sxm", "--quiet"]
    assert search([*asked, "-o", f"{made}/plan.json"]) == 0
    return made


def test_both_answers_stand_beside_each_other(folder: Path, capsys: Printed) -> None:
    capsys.readouterr()
    assert main([f"{folder}/plan.json", "--bandwidth", "all=0.01x", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "data=2,tensor=2, h100-sxm; what if: bandwidth all=0.01x" in out
    assert re.search(r"this plan, now +this plan then +the best plan then\n", out)
    for told in ("step, simulated ", "sum of its times ", "fits (", "proven, of sums: ", "what changes: "):
        assert told in out
    assert autopar(["what-if", f"{folder}/plan.json", "--bandwidth", "all=0.01x", "--quiet"]) == 0
    assert capsys.readouterr().out == out
    assert autopar(["what_if", f"{folder}/plan.json", "--flops", "2x"]) == 0
    assert "the same plan: " in capsys.readouterr().err


def test_the_object_has_what_the_text_says(folder: Path, capsys: Printed) -> None:
    capsys.readouterr()
    assert main([f"{folder}/plan.json", "--hbm", "0.5x", "--memory", "100GiB", "--json", "--quiet"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["hardware"] == "h100-sxm with imagined hbm 0.5x, memory 100 GiB" and told["same"]["fits"]
    assert told["what_if"] == "hbm 0.5x, memory 100 GiB of each device"
    assert told["limit_bytes"] == 100 * 2**30, "more than the device has"
    assert told["best"]["predicted_seconds"] <= told["same"]["predicted_seconds"]
    assert told["same"]["step_seconds"] > told["before"]["step_seconds"]
    assert told["best"]["bound"] <= told["same"]["step_seconds"] and told["memory"] is None


def test_an_imagined_plan_is_no_plan_of_a_real_machine(folder: Path, tmp_path: Path, capsys: Printed) -> None:
    new = tmp_path / "new.json"
    assert main([f"{folder}/plan.json", "--latency", "tensor=0.5x", "-o", str(new), "--quiet"]) == 0
    plan, before = Plan.load(new), Plan.load(folder / "plan.json")
    assert plan.hardware == "h100-sxm with imagined latency tensor=0.5x"
    assert plan.hardware_digest != before.hardware_digest
    assert "h100-sxm with imagined latency tensor=0.5x" in plan.explain()
    with pytest.raises(ValueError, match="no machine is"):
        Hardware.known(plan.hardware)
    capsys.readouterr()
    model = f"{folder}/tiny.py:build"
    for command in (
        lambda: main([str(new), "--flops", "2x"]),
        lambda: scale([str(new)]),
        lambda: measure([str(new), model, "--hardware", "h100-sxm"]),
    ):
        assert command() == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and "h100-sxm" in err and "latency tensor=0.5x" in err


def test_other_memory_alone_makes_a_plan_like_any_other(folder: Path, tmp_path: Path, capsys: Printed) -> None:
    new = tmp_path / "new.json"
    assert main([f"{folder}/plan.json", "--memory", "40GiB", "-o", str(new), "--quiet"]) == 0
    assert Plan.load(new).hardware_digest == Plan.load(folder / "plan.json").hardware_digest
    assert "what if: memory 40.0 GiB of each device" in capsys.readouterr().out


def test_where_nothing_fits_the_same_plan_is_told_all_the_same(folder: Path, tmp_path: Path, capsys: Printed) -> None:
    new = tmp_path / "new.json"
    assert main([f"{folder}/plan.json", "--memory", "64MiB", "-o", str(new), "--quiet"]) == 3
    out, err = capsys.readouterr()
    assert "this plan then\n" in out and "no best plan then: no plan fits" in out and "no plan fits" in err
    assert not new.exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "nothing is changed; ask with --bandwidth"),
        (["--bandwidth", "tensr=2x"], "has no axis 'tensr'; choose data, tensor, or all"),
        (["--flops", "2"], "for a factor write 2x"),
        (["--memory", "0x"], "memory '0x' is not a size"),
        (["--pin", "nowhere=save"], "pin 'nowhere' is no module or parameter"),
        (["--allow", "everything"], "allow 'everything' is not known"),
        (["--flops", "2x", "--hardware", "cpu-gloo"], "the plan was priced on h100-sxm with figures"),
        (["--flops", "2x", "--time-limit", "0"], "--time-limit 0 is not a time"),
        (["--flops", "2x", "-o", "/nowhere/x.json"], "folder /nowhere of -o"),
        (["--flops", "2x", "-o", "PLAN"], "is a file that this command reads, and would be overwritten"),
        (["--flop", "2x"], "unrecognized arguments: --flop 2x"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(folder: Path, capsys: Printed, arguments: list[str], told: str) -> None:
    arguments = [f"{folder}/sub/../plan.json" if word == "PLAN" else word for word in arguments]
    (folder / "sub").mkdir(exist_ok=True)
    assert main([f"{folder}/plan.json", "--quiet", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and told in err and err.startswith("autopar.what_if: ") and err.count("\n") == 1


def test_a_file_that_is_no_plan_is_told(folder: Path, tmp_path: Path, capsys: Printed) -> None:
    text = (folder / "plan.json").read_text()
    broken, older = tmp_path / "broken.json", tmp_path / "older.json"
    broken.write_text(text[: len(text) // 2])
    older.write_text(text.replace('"autopar_plan": 2', '"autopar_plan": 1'))
    for path, told in ((broken, "cut short or edited"), (older, "version 1"), (tmp_path / "none", "cannot be read")):
        assert main([str(path), "--flops", "2x"]) == 2
        assert told in capsys.readouterr().err
