"""The command line in pipeline stages: what it prints and writes, and what it refuses in one sentence."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from autopar.pipeline import verify
from autopar.pipeline.schedule import COMPUTES
from autopar.plan import Plan
from autopar.search.__main__ import main
from autopar.search.command.arguments import parser
from autopar.search.command.staged import NOT_YET
from autopar.search.pipeline import Pipeline
from autopar.search.stage_policies import STAGED
from cost_models.hardware import Hardware
from cost_models.reserve import room_in

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in layers)

    def forward(self, x, y):
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.mse_loss(x, y)

def build(layers=6, batch=16):
    print("a model may print")
    with torch.device("meta"):
        return Model(range(layers)), (torch.empty(batch, 64), torch.empty(batch, 64))

def one_layer():
    return build(1)

def odd():
    return build(batch=15)
"""
GIVEN = ("--mesh", "pipe=2,data=2", "--hardware", "h100-sxm")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_prints_one_object_and_writes_the_same_pipeline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["model.py:build", *GIVEN, "--micro-batches", "4", "--schedule", "gpipe", "--memory", "4GiB"]
    assert main([*arguments, "--quiet", "--json", "-o", "pipeline.json"]) == 0
    out, err = capsys.readouterr()
    told, found = json.loads(out), Pipeline.load("pipeline.json")
    assert "a model may print" in err and {path.name for path in folder.glob("*.json")} == {"pipeline.json"}
    verify(found.schedule)
    assert told["schedule"] == found.schedule.name == "gpipe"
    assert told["micro_batches"] == found.schedule.micro_batches == 4
    assert told["simulated_seconds"] == found.step_seconds > told["schedule_seconds"] == found.played.makespan
    assert told["least_schedule_seconds"] == found.least_seconds <= found.played.makespan
    assert told["peak_bytes"] == found.peak_bytes and told["ends"] == list(found.ends)
    assert told["mesh"] == {"pipe": 2, "data": 2} and told["parameters"] == 6 * (2 * 64 * 256 + 64 + 256)
    room = room_in(2**32, Hardware.load("h100-sxm"), (2, 2))
    assert told["memory_limit"] == 2**32 and told["reserve_bytes"] == room.left
    assert [row["in_flight"] for row in told["stages"]] == [4, 4]
    assert told["stages"][0]["sent_bytes"] > 0 and told["stages"][1]["sent_bytes"] is None
    assert told["seconds"]["total"] >= told["seconds"]["search"] > 0


def test_the_text_has_the_step_a_line_per_stage_and_what_was_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model.py:build", *GIVEN, "--quiet"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "mesh pipe=2,data=2 (4 ranks) on h100-sxm, optimizer adamw"
    text = " ".join(out.split())
    assert "simulated: 2 stages," in text and re.search(r"schedule \S+, bubble", text) and "memory peak" in text
    assert "no order of these stages takes less than" in text and "MFU" in text and "samples/s" in text
    assert [line[2] for line in lines if re.match(r"  \d  ", line)] == ["0", "1"]
    assert out.index("layers.0") < out.index("\n  1  ") < out.rindex("layers.5" if "layers.5" in out else "..5")
    tried = text.partition("numbers of micro-batches that were tried:")[2]
    assert [f" {count} micro-batches" in tried for count in (2, 4, 8, 16)] == [True] * 4


def test_the_same_command_writes_the_same_file() -> None:
    for name in ("one.json", "two.json"):
        assert main(["model.py:build", *GIVEN, "--micro-batches", "2", "--quiet", "-o", name]) == 0
    assert Path("one.json").read_bytes() == Path("two.json").read_bytes()


def test_what_is_settled_and_asked_holds_in_stages(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--micro-batches", "2", "--quiet", "--optimizer", "sgd", "--precision", "bf16", "--outputs", "global"]
    pin = ["--pin", "layers.0.0=data: columns", "--allow", "none", "-o", "pipeline.json"]
    assert main(["model.py:build", *GIVEN, *arguments, *pin]) == 0
    out, found = capsys.readouterr().out, Pipeline.load("pipeline.json")
    assert "optimizer sgd" in out and "precision: " in out
    assert all(plan.optimizer == "sgd" and plan.outputs == "global" for plan in found.plans)
    product = next(node for node in found.plans[0].graph.nodes if node.module == "layers.0.0" and "einsum" in node.op)
    assert str(found.plans[0].choices[product.name].takes[1][0]).startswith(("Shard", "S"))


def test_one_axis_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model.py:build", "--mesh", "pipe=4", "--hardware", "h100-sxm", "--micro-batches", "4"]) == 0
    out, err = capsys.readouterr()
    assert "4 stages, 4 micro-batches" in " ".join(out.split()) and "4 stages: " in err


WRONG = [
    (
        ["--mesh", "data=2,pipe=2"],
        "stages lie farthest apart, so that pipe has to be its first axis",
    ),
    (
        ["--mesh", "data=2", "--schedule", "1f1b"],
        "--schedule 1f1b is of pipeline stages; give --mesh",
    ),
    ([*GIVEN, "--micro-batches", "5"], "a batch of 16 cannot be cut into 5 equal micro-batches"),
    ([*GIVEN, "--schedule", "looped-bfs"], "invalid choice: 'looped-bfs'"),
    ([*GIVEN, "--schedule", "zb-v", "--stages-per-rank", "3"], "zb-v has 2 stages on each rank, and 3 are asked for"),
    ([*GIVEN, "--stages-per-rank", "0"], "0 stages per rank are too few; give 1 or more"),
    ([*GIVEN, "--hardware", "h100-sxm,a100-sxm"], "names several machines"),
    ([*GIVEN, "--pin", "layers.0.0=pipe: columns"], "pipe"),
    ([*GIVEN, "--policy", "fsdp"], "--policy 'fsdp' is not known in pipeline stages; choose some of gpipe, 1f1b"),
    ([*GIVEN, "--policy", "1f1b,1f1b"], "--policy '1f1b,1f1b' names '1f1b' twice"),
    (["--mesh", "data=2", "--policy", "gpipe"], "--policy gpipe is one of pipeline stages; give --mesh pipe=2"),
    ([*GIVEN, "--micro-batches", "0"], "--micro-batches '0' is no number of micro-batches"),
]


@pytest.mark.parametrize(("arguments", "why"), WRONG)
def test_bad_arguments_get_one_sentence(
    folder: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    given = arguments if "--hardware" in arguments else [*arguments, "--hardware", "h100-sxm"]
    assert refused(["model.py:build", *given, "-o", "no.json"], capfd, 2).count(why) == 1
    assert not (folder / "no.json").exists()


def refused(arguments: list[str], capfd: pytest.CaptureFixture[str], status: int) -> str:
    """The one line on stderr."""
    assert main([*arguments, "--quiet"]) == status
    out, err = capfd.readouterr()
    told = err.replace("a model may print\n", "")
    assert not out and told.count("\n") == 1 and told.startswith("autopar.search: "), (out, err)
    return told


@pytest.mark.parametrize("name", NOT_YET)
def test_what_is_not_there_yet_is_refused_by_its_name(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    flag = "--" + name.replace("_", "-")
    taken = next(action for action in parser()._actions if flag in action.option_strings)  # what argparse made of it
    value = [] if taken.nargs == 0 else ["2"]
    told = refused(["model.py:build", *GIVEN, flag, *value], capfd, 2)
    assert told.startswith(f"autopar.search: {flag} is not there yet for a step in pipeline stages")


def test_a_model_that_cannot_be_cut_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    given = ["--mesh", "pipe=16", "--hardware", "h100-sxm", "--micro-batches", "2"]
    assert "the model cannot be cut into 16 stages" in refused(["model.py:one_layer", *given], capfd, 2)
    given = ["--mesh", "pipe=2", "--hardware", "h100-sxm"]
    told = refused(["model.py:odd", *given], capfd, 2)
    assert "a batch of 15 does not divide into 2 micro-batches" in told


def test_where_nothing_fits_it_says_what_would_do(capfd: pytest.CaptureFixture[str]) -> None:
    assert "fits in" in refused(["model.py:build", *GIVEN, "--micro-batches", "2", "--memory", "1GiB"], capfd, 3)


def test_the_picture_has_a_cluster_for_each_stage_and_the_trace_a_row() -> None:
    given = ["model.py:build", *GIVEN, "--micro-batches", "4", "--quiet"]
    assert main([*given, "-o", "found.json", "--dot", "found.dot", "--trace", "found.trace.json"]) == 0
    found = Pipeline.load("found.json")
    drawn = Path("found.dot").read_text()
    assert drawn.count("subgraph") == 2 and "stage0 -> stage1" in drawn and drawn.count("{") == drawn.count("}")
    assert "layers.0" in drawn and found.schedule.name in drawn
    told = json.loads(Path("found.trace.json").read_text())
    names = {one["tid"]: one["args"]["name"] for one in told["traceEvents"] if one["name"] == "thread_name"}
    assert {"rank 0", "rank 1", "rank 0 to 1", "rank 1 to 0"} <= {*names.values()}
    rows: dict[str, list[tuple[float, float]]] = {}
    for one in told["traceEvents"]:
        if one["ph"] == "X" and one["cat"] != "phase":
            rows.setdefault(names[one["tid"]], []).append((one["ts"], one["ts"] + one["dur"]))
    for rank, actions in enumerate(found.schedule.lists):
        spans = sorted(rows[f"rank {rank}"])
        assert len(spans) == sum(found.durations.of(one) > 0 for one in actions if one.kind in COMPUTES)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(spans))
    assert max(end for spans in rows.values() for _, end in spans) == pytest.approx(1e6 * found.played.makespan, abs=1)


def test_what_people_do_by_hand_stands_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["model.py:build", *GIVEN, "--micro-batches", "4", "--quiet"]
    assert main([*given, "--baselines", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in told["baselines"]] == [*STAGED]
    assert all(row["to_this_plan"] >= 1 and row["peak_bytes"] > 0 and not row["why"] for row in told["baselines"])
    assert main([*given, "--policy", "megatron-3d"]) == 0
    out = capsys.readouterr().out
    assert out.count("megatron-3d") == 1 and "baselines, simulated: one training step on pipe=2,data=2" in out
    alone = ["model.py:build", "--mesh", "pipe=4", "--hardware", "h100-sxm", "--micro-batches", "4", "--quiet"]
    assert main([*alone, "--policy", "megatron-3d,1f1b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if "megatron-3d" in line).endswith(
        "a stage has one rank, and megatron-3d splits weights over the last axis of its mesh"
    )


# --- how many stages -------------------------------------------------------------------------------------------------

DEVICES = ("--devices", "4", "--hardware", "a100-40gb")


def test_the_number_of_stages_is_searched_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model.py:build", *DEVICES, "--stages", "auto", "--quiet", "--json", "-o", "best.json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = told["arrangements"]
    assert [row["mesh"] for row in rows[1:] if "pipe" in row["mesh"]] and "pipe" not in rows[0]["mesh"]
    assert Plan.load("best.json").predicted_seconds == told["simulated_seconds"] == rows[0]["simulated_seconds"]
    assert all(row["why"].startswith("skipped: every step takes") or row["simulated_seconds"] for row in rows)


def test_stages_that_are_named_are_the_only_ones(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--stages", "2,4", "--micro-batches", "8", "--schedule", "gpipe", "-o", "best.json"]
    assert main(["model.py:build", *DEVICES, *given]) == 0
    out, err = capsys.readouterr()
    found = Pipeline.load("best.json")
    assert len(found.plans) in (2, 4) and found.schedule.micro_batches == 8 and found.schedule.name == "gpipe"
    rows = out.partition("arrangements of 4 devices, simulated: one training step")[2].splitlines()[2:]
    assert sorted(row.split()[0].partition(",")[0] for row in rows) == ["pipe=2", "pipe=4"]
    assert rows[0].split()[0] == str(found.mesh) and f"{found.step_seconds * 1e3:.3f}" in rows[0]
    assert "at a first look" in err and "searching" in err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--mesh", "data=4", "--stages", "2"], "--stages 2 goes with --devices and one number of them"),
        (["--devices", "4,8", "--stages", "2"], "--stages 2 goes with --devices and one number of them"),
        (["--devices", "4", "--stages", "3"], "--stages '3' does not divide 4 devices; give numbers that do"),
        (["--devices", "4", "--stages", "two"], "--stages 'two' does not divide 4 devices"),
        (["--devices", "4", "--stages", "0"], "--stages '0' does not divide 4 devices"),
        (["--devices", "4", "--stages", "2", "--html", "no.html"], "--html is not there yet"),
        (["--devices", "4", "--stages", "2", "--baselines"], "--baselines is not there yet"),
        (["--devices", "4", "--stages", "2", "--pin", "layers.0.0=data: columns"], "names a mesh axis"),
        (["--devices", "4", "--stages", "2", "--micro-batches", "5"], "cannot be cut into 5 equal micro-batches"),
    ],
)
def test_wrong_numbers_of_stages_get_one_sentence(
    capfd: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    assert why in refused(["model.py:build", *arguments, "--hardware", "h100-sxm"], capfd, 2)


def test_a_batch_that_goes_with_no_stages_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    told = refused(["model.py:odd", "--devices", "4", "--stages", "2", "--hardware", "h100-sxm"], capfd, 2)
    assert "the batch divides into no number of micro-batches that goes with so many stages" in told


def test_where_no_arrangement_fits_it_says_what_would_do(capfd: pytest.CaptureFixture[str]) -> None:
    given = ["--devices", "4", "--stages", "2,4", "--memory", "512MiB", "--hardware", "h100-sxm"]
    assert "of 2 arrangements of 4 devices in stages none fits" in refused(["model.py:build", *given], capfd, 3)
