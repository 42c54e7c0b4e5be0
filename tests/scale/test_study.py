"""What becomes of a plan as things grow, and the command that says it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.scale import DoesNotSplit, graph_at, growth_of, plan_at, usual_sources
from autopar.scale.__main__ import main
from autopar.scale.report import differences, report
from autopar.scale.study import Ground, Study, communication, study
from autopar.search import Request, search
from autopar.trace import capture, graph_of
from cost_models.hardware import Hardware
from examples import mlp
from tests.scale.retrace import growth, retraced
from tests.scale.test_grow import Apart, Positions
from tests.support.machines import FAST, machine

ROOT = Path(__file__).parent.parent.parent
MESH = Mesh(("data", "tensor"), (2, 2))
H100 = Hardware.load("h100-sxm")


def traced(batch: int = 64, width: int = 256) -> Graph:
    model, (x, y) = mlp.build(layers=2, width=width, hidden=4 * width, batch=batch)
    return graph_of(capture(model, (), {"x": x, "y": y}))


def ground(plan: Plan, hardware: Hardware) -> Ground:
    return Ground(plan, growth_of(plan.graph, usual_sources(plan.graph)), hardware)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(traced(8192, 4096), MESH, H100, Request(memory=3e9))


@pytest.fixture(scope="module")
def found(plan) -> Study:
    return study(ground(plan, H100), (2, 4), search_s=20)


@pytest.fixture(scope="module")
def file(plan, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("scale") / "plan.json"
    plan.save(path)
    return str(path)


# --- a study ---------------------------------------------------------------------------------------------------------


def test_rows_grow_one_thing_at_a_time_and_the_batch_with_the_axis_that_splits_it(found):
    labels = [row.label for row in found.rows]
    assert labels[:7] == ["", "batch 16384", "batch 32768", "data 4", "data 8", "tensor 4", "tensor 8"]
    assert set(labels[7:]) <= {
        "data 4, batch 16384", "data 8, batch 32768", "tensor 4, batch 16384", "tensor 8, batch 32768",
    }  # fmt: skip
    assert len(labels) > 7


def test_the_first_row_is_the_plan(found, plan):
    kept = found.rows[0].kept
    assert (kept.step_seconds, kept.peak_bytes) == (pytest.approx(plan.step_seconds, rel=1e-12), plan.peak_bytes)


def test_a_new_search_is_never_worse_than_the_plan_that_was_kept(found):
    compared = 0
    for row in found.rows[1:]:
        if row.kept is not None and row.best is not None and row.kept.peak_bytes["hbm"] <= found.limit:
            assert row.best.step_seconds <= row.kept.step_seconds * (1 + 1e-6), row.label
            compared += 1
    assert compared > 3


def test_a_search_at_another_size_is_the_search_of_a_trace_there():
    found = growth("block")
    values = {**found.base, "batch": 2 * found.base["batch"]}
    ours, theirs = (search(graph, MESH, H100) for graph in (graph_at(found, values), retraced("block", "batch", 2)))
    assert ours.step_seconds == pytest.approx(theirs.step_seconds, rel=1e-12)
    assert ours.bound == pytest.approx(theirs.bound, rel=1e-9)


def test_the_last_batch_that_fits_fits_and_the_next_does_not(found, plan):
    (reach,) = found.reaches
    assert reach.fits is not None and reach.too_large == reach.fits + reach.unit and reach.fits > 8192
    pricer = Pricer.on(MESH, H100, plan.optimizer, plan.bucket_bytes)
    peaks = [
        plan_at(plan, found.growth, {"batch": size}, pricer).peak_bytes["hbm"] for size in (reach.fits, reach.too_large)
    ]
    assert peaks[0] <= found.limit < peaks[1]
    for size in range(1, 2 * reach.unit):
        if size % reach.unit:
            with pytest.raises(DoesNotSplit):
                plan_at(plan, found.growth, {"batch": size}, pricer)


def test_the_limit_is_the_machines_where_the_plan_has_none(plan):
    free = ground(search(traced(), MESH, H100), H100)
    assert free.limit == (H100.tiers["hbm"].capacity_bytes, "all of a h100-sxm")


def test_communication_takes_longer_than_the_rest_up_to_some_batch():
    """Gradients of one size are summed, whatever the batch: compute grows and takes over."""
    slow = machine(1e9, flops=1e13)
    plan = search(traced(batch=1024), Mesh(("data",), (4,)), slow, Request(policy="data-parallel"))
    on = ground(plan, slow)
    (turn,) = study(on, (2,)).turns
    shares = [share for _, share in turn.points]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.5 > shares[-1]
    assert turn.flip is not None
    low, high = (plan_at(plan, on.growth, {"batch": size}, on.pricer(plan.mesh)) for size in turn.flip)
    assert communication(low) > 0.5 * low.step_seconds
    assert communication(high) <= 0.5 * high.step_seconds
    assert "communication takes longer than the rest, from" in report(study(on, (2,)))


def test_memory_of_activations_grows_with_the_batch_and_that_of_parameters_does_not(found):
    here = found.totals.here
    once, twice = found.totals.peak(here), found.totals.peak({**here, "batch": 2 * here["batch"]})
    assert once < twice < 2 * once


def test_differences_name_parameters_and_count_products(plan):
    other = search(plan.graph, MESH, FAST)
    assert differences(plan, plan) == [differences(plan, plan)[0]]
    assert re.fullmatch(r"0 of \d+ products are split otherwise", differences(plan, plan)[0])
    assert plan.parameters != other.parameters
    assert any(" -> [" in line for line in differences(plan, other))


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_says_how_it_grows_where_it_ends_and_what_changes(file, capsys):
    assert main([file, "--times", "2"]) == 0
    out, err = capsys.readouterr()
    for wanted in (
        "mesh data=2,tensor=2 (4 ranks) on h100-sxm, optimizer adamw; batch 8192",
        "batch is dim 0 of x, y",
        "this plan elsewhere, its choices kept",
        "as it is",
        "closed forms, for one rank",
        " * batch / (data * tensor)",
        "2.79 GiB per rank (the plan's limit)",
        "does not (",
        "communication and the rest of the step",
        "where the plan would change: what a new search finds",
    ):
        assert wanted in out, f"{wanted}\n{out}"
    assert "searching at batch 16384" in err
    assert max(map(len, out.splitlines())) < 150


def test_no_search_is_quick_and_says_so(file, capsys):
    assert main([file, "--no-search", "--quiet", "--times", "3"]) == 0
    out, err = capsys.readouterr()
    assert "where the plan would change was not searched" in out and "best plan there" not in out
    assert "batch 24576" in out and "batch 16384" not in out
    assert err == ""


def test_a_size_can_be_named(file, capsys):
    assert main([file, "--no-search", "--quiet", "--grow", "rows=x:0,y:0"]) == 0
    out, _ = capsys.readouterr()
    assert "rows is dim 0 of x, y" in out and "rows 16384" in out and "batch is" not in out


def test_a_size_can_be_taken_out(file, capsys):
    assert main([file, "--grow", "batch="]) == 2
    assert "say what grows with --grow NAME=INPUT:DIM" in capsys.readouterr().err
    assert main([file, "--no-search", "--quiet", "--grow", "batch=", "--grow", "rows=x:0"]) == 0
    out, _ = capsys.readouterr()
    assert "rows 16384" in out and "batch" not in out


def test_what_cannot_grow_is_said(tmp_path, capsys):
    graph = graph_of(capture(Positions(), (), {"x": torch.randn(4, 6, 10)}))
    search(graph, MESH, H100).save(tmp_path / "plan.json")
    assert main([str(tmp_path / "plan.json"), "--no-search", "--quiet", "--grow", "sequence=x:1"]) == 0
    out, _ = capsys.readouterr()
    assert "note: how it grows with sequence is not known: %" in out and "batch 8" in out


def test_an_assumption_is_said(tmp_path, capsys):
    apart = graph_of(capture(Apart(), (), {"x": torch.randn(6, 12, 8)}))
    search(apart, Mesh(("data",), (2,)), H100).save(tmp_path / "plan.json")
    grow = ["--grow", "batch=x:0", "--grow", "sequence=x:1"]
    assert main([str(tmp_path / "plan.json"), "--no-search", "--quiet", "--times", "2", *grow]) == 0
    out, _ = capsys.readouterr()
    assert re.search(r"note: dim 0 of %expand float32\[6, 12\] \(.*\) is taken to be batch; no other value tells", out)
    assert "160 B * batch * sequence  100 %" in out


WRONG = [
    (["nowhere.json"], "plan nowhere.json cannot be read: No such file or directory; make one with"),
    (["FILE", "--times", "1"], "--times '1' are not whole numbers from 2"),
    (["FILE", "--times", "two"], "--times 'two' are not whole numbers from 2"),
    (["FILE", "--time-limit", "0"], "--time-limit 0 is not a time"),
    (["FILE", "--time-limit", "inf"], "--time-limit inf is not a time"),
    (["FILE", "--grow", "x:1"], "--grow 'x:1' is not NAME=INPUT:DIM"),
    (["FILE", "--grow", "rows=x"], "'x' is not INPUT:DIM"),
    (["FILE", "--grow", "rows=z:0"], "no input 'z'; this plan has x, y"),
    (["FILE", "--grow", "rows=x:7"], "it has no dim 7"),
    (["FILE", "--hardware", "a100-80gb"], "the plan was priced on h100-sxm with figures"),
    (["FILE", "--hardware", "no-such-profile"], "no-such-profile"),
    (["FILE", "--memory", "1"], "unrecognized arguments: --memory 1; see python -m autopar.scale --help"),
    ([], "the following arguments are required: PLAN"),
]


@pytest.mark.parametrize("arguments, sentence", WRONG, ids=lambda value: " ".join(value) if type(value) is list else "")
def test_bad_input_ends_with_one_sentence_and_status_2(arguments, sentence, file, capsys):
    assert main([file if argument == "FILE" else argument for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and sentence in err
    lines = [line for line in err.splitlines() if " s  " not in line]
    assert len(lines) == 1 and lines[0].startswith("autopar.scale: ")


def test_a_plan_that_is_none_is_refused(tmp_path, capsys):
    for name, content in (
        ("half.json", '{"autopar_plan": 1, "digest"'),
        ("other.json", "[1]"),
        ("bytes.json", b"\xff\xfe"),
    ):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert main([str(path)]) == 2
        _, err = capsys.readouterr()
        assert err.startswith(f"autopar.scale: {path}") and len(err.splitlines()) == 1


@pytest.mark.slow
def test_the_command_as_a_process(file):
    ran = subprocess.run(
        [sys.executable, "-m", "autopar.scale", file, "--no-search"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert ran.returncode == 0 and "closed forms" in ran.stdout, ran.stderr
    missing = subprocess.run(
        [sys.executable, "-m", "autopar.scale", "nowhere.json"], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1, missing.stderr
