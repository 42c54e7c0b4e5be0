"""`python -m autopar.search --profile`: what it prints, keeps and refuses."""

import json
import sys
from pathlib import Path

import pytest
import torch

from autopar import Plan
from autopar.calibrate import operators as timing
from autopar.machine.device import calibrated_path, hardware_or_here, is_here, operators_path
from autopar.search.__main__ import main
from cost_models.hardware import Hardware
from cost_models.measured import MeasuredWarning, Store
from tests.calibrate.test_format import measured as calibrated
from tests.support.tiny import BUILD, TINY

MODEL = TINY + BUILD
HERE = ("tiny.py:build", "--mesh", "a=2", "--hardware", "cpu-gloo")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOPAR_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.setattr(timing.seconds_of, "__defaults__", (0.001,))
    return tmp_path


def test_it_times_what_is_missing_and_prices_with_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*HERE, "--profile", "30", "-o", "one.json"]) == 0
    out, err = capsys.readouterr()
    plan = Plan.load("one.json")
    count = plan.search["measured"]
    assert f"note: {count} of {count} operators are priced from measurements, 100% of the compute time" in out
    assert " calls of operators on " in err and ": 0 known, " in err and "  timed " in err
    with Store(operators_path()) as store:
        known = store.known(timing.where_of(torch.device("cpu")))
    assert operators_path() == folder / "profiles" / "operators.sqlite3" and len(known) > 20
    assert main([*HERE, "--profile", "0", "-o", "two.json"]) == 0  # with nothing left to time, the same plan
    assert ", 0 not" in capsys.readouterr().err
    assert (folder / "one.json").read_bytes() == (folder / "two.json").read_bytes()
    assert main([*HERE, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"] == 0  # not asked for, not used
    assert main([*HERE, "--json", "--quiet", "--profile", "--baselines"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["measured"] == count and told["step_seconds"] == plan.step_seconds


def test_the_database_may_be_named_and_a_broken_one_does_not_stop_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine").write_text("no database at all, whatever its name says")
    with pytest.warns(MeasuredWarning, match="mine cannot be read"):
        assert main([*HERE, "--profile", "30", "--operators", "mine", "--quiet", "-o", "plan.json"]) == 0
    assert Plan.load("plan.json").search["measured"] and not operators_path().exists()
    assert len(list(folder.glob("mine.broken-*"))) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--hardware", "h100-sxm", "--profile"), "which is no h100-sxm; run it on one, or leave --profile out"),
        (("--profile", "-1"), "--profile -1 is not a time; give seconds from 0"),
        (("--profile", "nan"), "--profile nan is not a time"),
        (("--profile", "soon"), "invalid float value: 'soon'"),
        (("--operators", "mine"), "--operators names the database of --profile; give --profile too"),
    ],
)
def test_what_cannot_be_profiled_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    assert main([*HERE, *arguments, "--quiet", "-o", "plan.json"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and sentence in err
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"tiny.py"}


# --- which machine is here -------------------------------------------------------------------------------------------


def test_a_profile_is_of_this_machine_if_autopar_would_take_it_or_it_was_measured_here(folder: Path) -> None:
    assert is_here(Hardware.load("cpu-gloo"), "cpu") and not is_here(Hardware.load("h100-sxm"), "cpu")
    assert not is_here(calibrated(), "cpu")
    calibrated_path("cpu").parent.mkdir()
    calibrated().save(calibrated_path("cpu"))
    assert hardware_or_here(None, "cpu").name == "mine"
    assert is_here(calibrated(), "cpu") and is_here(Hardware.load("cpu-gloo"), "cpu")
    calibrated_path("cpu").write_text("broken")
    assert not is_here(calibrated(), "cpu") and is_here(Hardware.load("cpu-gloo"), "cpu")


def test_a_profile_that_was_calibrated_to_another_file_is_known_by_its_sources() -> None:
    import platform
    from dataclasses import replace

    from autopar.machine.device import device_name

    source = f"measured on {platform.node()}, {device_name('cpu')}, 2 processors, 2026-11-20, torch 2.13"
    hardware = calibrated()
    assert is_here(replace(hardware, sources={**hardware.sources, "launch_s": source}), "cpu")
    elsewhere = source.replace(platform.node(), "elsewhere")
    assert not is_here(replace(hardware, sources={**hardware.sources, "launch_s": elsewhere}), "cpu")


def test_the_command_says_when_the_profile_was_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calibrated().save("mine.toml")
    assert main(["tiny.py:build", "--mesh", "a=2", "--hardware", "mine.toml", "-o", "plan.json"]) == 0
    out, err = capsys.readouterr()
    assert "note: priced with what was measured: profile mine" in out
    assert "2 ranks of mine, a profile that was measured, " in err
    assert Plan.load("plan.json").notes == ("priced with what was measured: profile mine",)
    assert main([*HERE]) == 0
    out, err = capsys.readouterr()
    assert "measured" not in out + err


def test_one_thread_unless_the_environment_says_otherwise(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks run: a profile of a CPU is of one thread, whatever torch would take for a process alone."""
    torch.set_num_threads(2)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert main([*HERE, "--profile", "30", "--quiet"]) == 0
    assert torch.get_num_threads() == 1 and "autopar_model_tiny" in sys.modules
    with Store(operators_path()) as store:
        assert store.known(timing.where_of(torch.device("cpu")))
