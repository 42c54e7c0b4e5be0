"""`python -m benchmarks.gpu` without a GPU: its machinery, its checks on the CPU, ranks that meet through the host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import staged
from benchmarks.gpu.cases import GRADIENT, LOSS, Case
from benchmarks.gpu.report import DONE, FAILED, SKIPPED, WRONG
from benchmarks.gpu.shared import COLLECTIVES, started, trained
from benchmarks.gpu.stage import Setting, Wrong, errors_of, near, off, same

PROCESSES = pytest.mark.slow


def called(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, what is kept, and the report, of a dry run."""
    report = tmp_path / "gpu.md"
    status = command.main(["--device", "cpu", "-o", str(report), *arguments])
    return status, json.loads((tmp_path / "gpu.json").read_text()), report.read_text()


# --- the machinery ---------------------------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stages that end as a list says, instead of the real ones; which of them ran."""
    ends = {
        "a": (DONE, ""),
        "b": (SKIPPED, "no device"),
        "c": (FAILED, "a reason"),
        "d": (WRONG, "7, not 8"),
        "e": (DONE, ""),
    }
    monkeypatch.setattr(command, "STAGES", {name: (f"{name}:{name}", f"shows {name}") for name in ends})
    names = list[str]()

    def run(name: str, *_: object) -> dict[str, Any]:
        names.append(name)
        status, reason = ends[name]
        return {"status": status, "reason": reason, "seconds": 1.0, "rows": [{"x": 1, "y": 0.5}, {"x": 2, "y": 0.25}]}

    monkeypatch.setattr(command, "run", run)
    return names


def test_a_wrong_number_stops_everything_and_a_failure_does_not(tmp_path: Path, ran: list[str]) -> None:
    status, state, report = called(tmp_path)
    assert (status, ran, list(state)) == (1, ["a", "b", "c", "d"], ["a", "b", "c", "d"])
    assert "Failed: a reason" in report and "Skipped: no device" in report and "Wrong: 7, not 8" in report
    assert "| x | y |\n|---|---|\n| 1 | 0.5 |\n| 2 | 0.25 |" in report and "| e | not run |" in report


def test_what_is_done_here_is_not_run_again_unless_asked_for(tmp_path: Path, ran: list[str]) -> None:
    called(tmp_path)
    ran.clear()
    called(tmp_path)
    assert ran == ["b", "c", "d"]
    ran.clear()
    assert called(tmp_path, "--stages", "a", "e")[0] == 0 and ran == ["e"]
    ran.clear()
    assert called(tmp_path, "--stages", "a", "--again")[0] == 0 and ran == ["a"]
    kept = json.loads((tmp_path / "gpu.json").read_text())
    kept["a"]["machine"] = "another one"
    (tmp_path / "gpu.json").write_text(json.dumps(kept))
    ran.clear()
    assert called(tmp_path, "--stages", "a")[0] == 0 and ran == ["a"]


def test_an_unknown_stage_and_a_foreign_state_are_refused(tmp_path: Path, ran: list[str]) -> None:
    assert command.main(["--device", "cpu", "-o", str(tmp_path / "x.md"), "--stages", "z"]) == 2 and not ran
    (tmp_path / "gpu.json").write_text("[1")
    with pytest.raises(ValueError, match=r"gpu\.json is not what earlier stages left"):
        called(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["-o", str(tmp_path / "gpu.md")])
    assert "this machine has 0; --device cpu runs the machinery without" in capsys.readouterr().err


def test_off_is_in_units_of_the_largest_entry_and_infinite_for_what_is_no_number() -> None:
    wanted = torch.tensor([1.0, -4.0])
    assert off(torch.tensor([1.0, -3.0]), wanted) == 0.25
    assert off(torch.tensor([1.0, torch.nan]), wanted) == off(torch.ones(3), wanted) == float("inf")
    assert off(torch.zeros(2), torch.zeros(2)) == 0.0
    with pytest.raises(Wrong, match=r"x is off by 0\.25 of its largest entry, 0\.1 is allowed"):
        near(torch.tensor([1.0, -3.0]), wanted, 0.1, "x")
    with pytest.raises(Wrong, match="x has 1 of 2 entries with other bits"):
        same(torch.tensor([1.0, -3.0]), wanted, "x")
    one, other = (torch.nn.Linear(2, 2) for _ in range(2))
    one(torch.ones(2)).sum().backward()
    with pytest.raises(Wrong, match="the gradient of weight is there in one of the two alone"):
        errors_of(other, one, "x")


def test_results_of_the_backend_are_no_numbers_before_they_are_waited_for() -> None:
    """One rank; what torch calls with its own objects is in the tests on processes."""
    staged.register()
    group = staged.Staged(0, 1, torch.distributed.ProcessGroupGloo(torch.distributed.HashStore(), 0, 1))
    x = torch.arange(4.0)
    work = group.allreduce([x])
    assert x.isnan().all() and not work.is_completed()
    assert work.wait() and x.tolist() == [0, 1, 2, 3] and work.is_completed()
    work.wait()  # once is enough
    x.add_(1)
    work.get_future().wait()
    assert x.tolist() == [1, 2, 3, 4]


# --- on processes ----------------------------------------------------------------------------------------------------


@PROCESSES
def test_programs_of_two_ranks_through_the_host_give_the_numbers_of_one(tmp_path: Path) -> None:
    """Collectives in flight until they are waited for, as on a GPU; then a wrong task, whose rank says why."""
    cases = [Case("mlp", (2,), "random 2", checkpoint=True), Case("block", (2,), "tensor-parallel")]
    rows = list(started(Setting("cpu", tmp_path), 2, staged.NAME, [COLLECTIVES, *trained(cases)]))
    assert rows[0]["ranks"] == 2
    for row in rows[1:]:
        assert row["loss off"] <= LOSS and row["gradient off"] <= GRADIENT and "calls" in row["received"]
    assert rows[1]["checkpoint"].endswith("whole")
    with pytest.raises(RuntimeError, match=r"rank [01] of 2 ended with status 1"):
        list(started(Setting("cpu", tmp_path), 2, staged.NAME, trained([Case("no model", (2,), "fsdp")])))


@PROCESSES
@pytest.mark.parametrize(
    ("stage", "status"), [("attention", DONE), ("nccl", DONE), ("profile", SKIPPED), ("calibrate", SKIPPED)]
)
def test_a_stage_runs_dry(stage: str, status: str, tmp_path: Path) -> None:
    exit, state, report = called(tmp_path, "--stages", stage)
    assert exit == 0 and state[stage]["status"] == status, state[stage]["reason"]
    assert bool(state[stage]["rows"]) == (stage != "profile") and f"## {stage}" in report


@PROCESSES
def test_a_stage_that_takes_too_long_has_failed_and_ends(tmp_path: Path) -> None:
    exit, state, _ = called(tmp_path, "--stages", "device", "--limit", "1")
    assert exit == 1 and state["device"]["status"] == FAILED
    assert state["device"]["reason"].startswith("it did not end within 1 s")


@PROCESSES
def test_a_node_runs_dry(tmp_path: Path) -> None:
    exit, state, _ = called(tmp_path, "--nproc", "2", "--stages", "node-numbers", "node-gpt2")
    assert exit == 0 and [state[name]["status"] for name in ("node-numbers", "node-gpt2")] == [DONE, DONE]
    assert "predicted ms" in state["node-gpt2"]["rows"][0]
