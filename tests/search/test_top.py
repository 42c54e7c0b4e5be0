"""The quickest plans beside the answer of a search: distinct, in order, within the limit, and not at its expense."""

from itertools import combinations

import pytest

from autopar.plan.store import dumps
from autopar.search import Request, answer, ask
from autopar.search.__main__ import main
from autopar.search.overlap_loop import same_choices
from autopar.search.top import top
from tests.search.test_simulated import EVEN, HIDES, question
from tests.support.check import mesh_of
from tests.support.families import family

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x), y)

def build():
    with torch.device("meta"):
        return Model(), (torch.empty(512, 512), torch.empty(512, 512))
"""


@pytest.mark.parametrize("simulation", [True, False])
def test_plans_are_distinct_in_order_and_the_first_is_the_answer(simulation):
    asked, request = question("mlp", (2,), HIDES), Request(simulation=simulation)
    found = top(asked, request, 4)
    alone = answer(ask(family("mlp").graph, mesh_of(2), HIDES), request)
    assert (found.plans[0].choices, found.plans[0].predicted_seconds) == (alone.choices, alone.predicted_seconds)
    assert len(found.plans) > 1
    assert not any(same_choices(*pair) for pair in combinations(found.plans, 2))
    seconds = [plan.predicted_seconds for plan in found.plans]
    assert seconds == sorted(seconds)
    assert found.unlike[0] == "" and all(found.unlike[1:])
    assert (found.why == "") is (len(found.plans) == 4)
    played = {row.name: row.simulated_seconds for row in alone.candidates}
    for plan in found.plans if simulation else ():
        assert played[plan.search["candidate"]] == plan.simulated_seconds
        assert type(plan).loads(dumps(plan), "here").choices == plan.choices


@pytest.mark.slow
def test_no_plan_is_above_the_limit():
    asked = question("gpt2", (2,), EVEN)
    roomy = top(asked, Request(simulation=True), 8)
    limit = min(plan.peak_bytes["hbm"] for plan in roomy.plans)
    for plan in top(asked, Request(memory=limit, simulation=True), 8).plans:
        assert plan.peak_bytes["hbm"] <= limit


@pytest.mark.parametrize("k", [0, -1, 10**9])
def test_no_number_of_plans_is_refused(k, tmp_path, capsys):
    with pytest.raises(ValueError, match="plans cannot be kept"):
        top(question("block", (2,), HIDES), Request(), k)
    (tmp_path / "mlp.py").write_text(MODEL)
    assert main([f"{tmp_path}/mlp.py:build", "--mesh", "data=2", "--hardware", "h100-sxm", "--top", str(k)]) == 2
    assert f"{k} plans cannot be kept; ask for 1 to" in capsys.readouterr().err


def test_the_command_writes_the_others_beside_the_plan(tmp_path, capsys):
    (tmp_path / "mlp.py").write_text(MODEL)
    ask = [f"{tmp_path}/mlp.py:build", "--mesh", "data=2", "--hardware", "h100-sxm", "--quiet"]
    assert main([*ask, "-o", f"{tmp_path}/alone.json"]) == 0
    capsys.readouterr()
    assert main([*ask, "--top", "3", "-o", f"{tmp_path}/plan.json"]) == 0
    out = capsys.readouterr().out
    assert "the quickest distinct plans, predicted (simulated):" in out
    rows = [line for line in out.splitlines() if line.startswith(("  1  ", "  2  ", "  3  "))]
    files = sorted(path.name for path in tmp_path.glob("plan*.json"))
    assert files == ["plan.2.json", "plan.3.json", "plan.json"][3 - len(rows) :] or len(rows) == len(files)
    assert (tmp_path / "plan.json").read_text() == (tmp_path / "alone.json").read_text()
