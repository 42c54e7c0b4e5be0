"""The training script learns on any number of ranks what one process learns, also where it was stopped or killed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.killed_in_saving import MOMENTS

ROOT = Path(__file__).parents[2]
SCRIPT, KILLED = ROOT / "examples" / "train_lm.py", Path(__file__).with_name("killed_in_saving.py")
SMALL = "--size tiny --sequence 32 --batch 8 --accumulate 2 --warmup 2 --eval-every 3 --eval-batches 2 --save-every 3"


def run(
    ranks: int, out: Path, *args: str, script: Path = SCRIPT, at: str = "behind the data, before what tells of it"
) -> subprocess.CompletedProcess[str]:
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | {"PYTHONPATH": str(ROOT)}
    environment["KILLED_AT"] = at  # of the script that is killed
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *torchrun, str(script), *SMALL.split(), "--out", str(out), *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def losses(out: Path) -> dict[str, float]:
    """Of each step and evaluation, the last that the log has."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {line["what"]: line[name] for line in lines for name in ("loss", "held_out") if name in line}


def begun(out: Path) -> list[tuple[str, float]]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [(line["what"], line["ranks"]) for line in lines if "ranks" in line]


@pytest.mark.slow
def test_any_ranks_learn_the_same_and_go_on_where_others_stopped_or_were_killed(tmp_path: Path) -> None:
    """Four runs of 6 updates: one process; two that are killed in their second checkpoint; one process that goes on
    from the first of these, two ranks that go on from that of the one process.
    """
    alone, pair = tmp_path / "alone", tmp_path / "pair"
    exact = ("--steps", "6", "--precision", "fp32")
    ran = run(1, alone, *exact)
    assert ran.returncode == 0, ran.stderr
    wanted = losses(alone)
    assert set(wanted) == {*(f"step {step}" for step in range(1, 7)), "eval 3", "eval 6"}
    assert wanted["eval 6"] < wanted["eval 3"] < 5.3  # it learns: nothing known is log(256) = 5.55

    ran = run(2, pair, *exact, script=KILLED)
    assert ran.returncode != 0
    assert losses(pair) == pytest.approx(wanted, rel=1e-5)
    assert {path.name for path in pair.iterdir()} == {"log.jsonl", "step-00000003", "unfinished"}

    ran = run(1, pair, *exact)
    assert ran.returncode == 0, ran.stderr
    assert begun(pair) == [("begin 0", 2), ("begin 3", 1)]
    assert losses(pair) == pytest.approx(wanted, rel=1e-5)
    assert {path.name for path in pair.iterdir()} == {"log.jsonl", "step-00000003", "step-00000006"}

    shutil.rmtree(alone / "step-00000006")
    (alone / "log.jsonl").unlink()
    ran = run(2, alone, *exact)
    assert ran.returncode == 0, ran.stderr
    assert begun(alone) == [("begin 3", 2)]
    assert losses(alone) == pytest.approx({what: wanted[what] for what in losses(alone)}, rel=1e-5)
    assert len(losses(alone)) == 4


@pytest.mark.slow
def test_a_kill_at_any_moment_of_saving_costs_no_more_than_what_came_behind_the_last_checkpoint(tmp_path: Path) -> None:
    """Six updates of two ranks, with a checkpoint behind every three; the second is the one that is killed. One process
    goes on.
    """
    whole = tmp_path / "whole"
    exact = ("--steps", "9", "--precision", "fp32")
    ran = run(1, whole, *exact)
    assert ran.returncode == 0, ran.stderr
    wanted = losses(whole)
    for number, moment in enumerate(MOMENTS):
        out = tmp_path / str(number)
        ran = run(2, out, *exact, script=KILLED, at=moment)
        assert ran.returncode != 0, moment
        there = {path.name for path in out.glob("step-*")}
        saved = 6 if moment == "once it has its name" else 3
        assert there == {f"step-{step:08}" for step in range(3, saved + 1, 3)}, moment
        ran = run(1, out, *exact)
        assert ran.returncode == 0, (moment, ran.stderr)
        assert begun(out) == [("begin 0", 2), (f"begin {saved}", 1)], moment
        assert losses(out) == pytest.approx(wanted, rel=1e-5), moment
        assert "unfinished" not in {path.name for path in out.iterdir()}


@pytest.mark.slow
def test_in_bfloat16_with_dropout_a_resumed_run_is_an_uninterrupted_one(tmp_path: Path) -> None:
    """Steps 4 to 6, made before rank 0 was killed in their checkpoint, and again from that of step 3."""
    options = ("--steps", "6", "--dropout", "0.1", "--precision", "bf16")
    ran = run(2, tmp_path, *options, script=KILLED)
    assert ran.returncode != 0
    wanted = losses(tmp_path)
    (tmp_path / "log.jsonl").unlink()
    ran = run(2, tmp_path, *options)
    assert ran.returncode == 0, ran.stderr
    assert begun(tmp_path) == [("begin 3", 2)]
    assert losses(tmp_path) == {what: wanted[what] for what in ("step 4", "step 5", "step 6", "eval 6")}


def test_what_has_no_equal_parts_is_refused_before_anything_is_planned(tmp_path: Path) -> None:
    ran = run(1, tmp_path, "--batch", "7")
    assert ran.returncode == 2
    assert "a --batch of 7 sequences has no 2 equal micro-batches" in ran.stderr
