"""The demo from end to end, as a newcomer runs it, but for fewer steps."""

import csv
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.plan import Plan

ROOT = Path(__file__).parents[2]


def run_demo(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_three_steps_agree_with_one_process_and_leave_every_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = run_demo("--steps", "3", "--out", str(out))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "SAME" in ran.stdout
    stages = (
        "starting 2 processes",
        "tracing it, and searching",
        "--- the plan",
        "--- training",
        "--- the same on one",
    )
    assert sorted(map(ran.stdout.index, stages)) == [ran.stdout.index(stage) for stage in stages]
    assert "first  3 steps" in ran.stdout and "--long (make demo ARGS=--long) trains for 200 steps" in ran.stdout
    assert not ran.stderr, "a newcomer sees no warnings"
    written = {path.name for path in out.iterdir()}
    assert written == {"plan.json", "plan.dot", "plan.html", "loss.png", "losses.csv", "checkpoint", "model.pt"}

    plan = Plan.load(out / "plan.json")
    assert plan.mesh.ranks == 2
    assert plan.comm_bytes, "a plan that sends nothing is no demonstration"
    assert (out / "plan.dot").read_text() == plan.to_dot()
    with (out / "losses.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert float(rows[2]["parallel_loss"]) < float(rows[0]["parallel_loss"])
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_too_little_memory_is_told_in_one_line_with_its_own_status(tmp_path: Path) -> None:
    ran = run_demo("--memory", "40MiB", "--out", str(tmp_path / "out"))
    assert ran.returncode == 3, ran.stdout + ran.stderr
    assert "no plan fits in 40.00 MiB per rank" in ran.stdout
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "out").exists()


def test_senseless_arguments_are_refused_before_anything_starts() -> None:
    ran = run_demo("--steps", "0")
    assert ran.returncode == 2
    assert "--steps and --processes must be at least 1" in ran.stderr


def test_make_passes_arguments_to_it() -> None:
    ran = subprocess.run(
        ["make", "-n", "--no-print-directory", "-o", ".venv/.ready", "demo", "ARGS=--long"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout.splitlines()[-1].endswith("examples/demo.py --long"), ran.stdout + ran.stderr


@pytest.mark.slow
def test_by_default_it_is_over_soon(tmp_path: Path) -> None:
    """The plan within a minute of processors' time, all of it within two, each of two processes counted."""
    out = tmp_path / "out"
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = run_demo("--out", str(out))
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ended.ru_utime - began.ru_utime < 2 * 120
    (found_s,) = re.findall(r"--- the plan, found in ([0-9.]+) s", ran.stdout)
    assert float(found_s) < 60
