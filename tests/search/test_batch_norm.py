"""What is searched, compared and told where batch norms may have other statistics."""

import json
from pathlib import Path

import pytest

from autopar import Plan
from autopar.errors import PlanMismatch
from autopar.ir.batch_norm import statistics_of
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.measure.twin import traced
from autopar.plan.fit import check
from autopar.search import Request, answer, ask, search
from autopar.search.__main__ import main
from autopar.search.baselines import compare, table
from cost_models.hardware import Hardware

FACTORY = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, norm):
        super().__init__()
        layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), norm(16), nn.ReLU()) for _ in range(6)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(16, 8)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(self.layers(x).mean((2, 3))), y)

def build(batch=8192, norm=nn.BatchNorm2d):
    with torch.device("meta"):
        return Model(norm), (torch.empty(batch, 16, 32, 32), torch.empty(batch, dtype=torch.long))

def uneven():
    return build(8194)

def without():
    return build(norm=lambda width: nn.GroupNorm(4, width))
"""
H100, MESH = Hardware.load("h100-sxm"), Mesh(("data",), (4,))
BUILT: dict[str, object] = {}
exec(FACTORY, BUILT)


def graph(parts: int, make: str = "build") -> Graph:
    model, args = BUILT[make]()  # type: ignore[operator]
    return traced(model, args, {}, parts=parts)


def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str, make: str = "build") -> str:
    path = tmp_path / "model.py"
    path.write_text(FACTORY)
    given = [f"{path}:{make}", "--mesh", "data=4", "--hardware", "h100-sxm", "--quiet", *arguments]
    assert main(given) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("what", ["global", "local"])
def test_a_plan_file_is_of_the_statistics_that_were_asked_for(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    told = run(tmp_path, capsys, "--batch-norm", what, "-o", str(file))
    over = {"global": "of the whole batch", "local": "of each rank's part of the batch, as DDP"}[what]
    assert told.splitlines()[1] == f"batch norm: statistics {over}"
    plan = Plan.load(file)
    assert plan.batch_norm == what
    check(plan, graph(4 if what == "local" else 1), MESH)
    other = {"global": "local", "local": "global"}[what]
    with pytest.raises(PlanMismatch, match=f"made for batch_norm='{what}', this call asks for batch_norm='{other}'"):
        check(plan, graph(1 if what == "local" else 4), MESH)


def test_a_model_without_batch_norms_has_one_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"{what}.json" for what in ("global", "local")]
    told = [run(tmp_path, capsys, "--batch-norm", file.stem, "-o", str(file), make="without") for file in files]
    assert files[0].read_text() == files[1].read_text() and "batch norm:" not in told[0]


def test_the_baseline_of_ddp_has_its_statistics_and_takes_nobodys_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = run(tmp_path, capsys, "--baselines")
    lines = {" ".join(line.split()[:2]): line for line in told.split("baselines, predicted")[1].splitlines()}
    assert "rank's part" in next(line for name, line in lines.items() if name.startswith("data-parallel "))
    assert "whole batch" in lines["data-parallel, synced"] and "whole batch" in lines["this plan"]
    assert "trains otherwise" in told and "data-parallel, synced" in told.split("baselines, predicted")[0]
    found = json.loads(run(tmp_path, capsys, "--baselines", "--json"))
    assert found["batch_norm"] == "global"
    rows = [(row["policy"], row["batch_norm"]) for row in found["baselines"]]
    assert rows[:2] == [("data-parallel", "local"), ("data-parallel", "global")]
    assert {norms for _, norms in rows[1:]} == {"global"}
    ddp = found["baselines"][0]
    assert ddp["simulated_seconds"] < found["simulated_seconds"], "it is faster, and yet not the answer"


def test_where_all_are_local_none_is_another_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = run(tmp_path, capsys, "--baselines", "--batch-norm", "local")
    assert "trains otherwise" not in told and "synced" not in told and "whole batch" not in told
    assert "rank's part" in told


def test_a_batch_that_ddp_could_not_cut_says_so_in_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    why = "a batch of 8194 cannot be cut into 4 equal parts"
    assert f"-  rank's part  {why}" in run(tmp_path, capsys, "--baselines", make="uneven")
    assert main([f"{tmp_path / 'model.py'}:uneven", "--mesh", "data=4", "--hardware", "h100-sxm", "--quiet",
                 "--batch-norm", "local"]) == 2  # fmt: skip
    assert why in capsys.readouterr().err


def test_a_faster_baseline_of_other_statistics_is_not_said_to_be_quicker() -> None:
    asked = ask(graph(1), MESH, H100)
    chosen = answer(asked)
    rows = compare(asked, chosen, Request(), as_ddp=ask(graph(4), MESH, H100))
    assert rows[0].policy == "data-parallel" and rows[0].batch_norm == "local" and rows[0].plan is not None
    assert rows[0].plan.step_seconds < chosen.step_seconds and statistics_of(chosen.graph) == ("global",)
    assert "data-parallel is quicker" not in table(chosen, rows)
    assert compare(asked, chosen, Request()) == rows[1:]
    assert table(chosen, rows).count("rank's part") == 2, "its column, and the line below"


def test_a_baseline_asked_for_by_name_says_what_it_is() -> None:
    for parts, name in ((1, "data-parallel, synced"), (4, "data-parallel")):
        notes = search(graph(parts), MESH, H100, Request(policy="ddp")).notes
        assert f"only {name} plans were searched; the gap is to the best of them" in notes
