"""The demo from end to end, as a newcomer runs it, but for fewer steps."""

import csv
import os
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
    assert not ran.stderr, "a newcomer sees no warnings"
    written = {path.name for path in out.iterdir()}
    assert written == {"plan.json", "plan.dot", "loss.png", "losses.csv", "checkpoint", "model.pt"}

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
