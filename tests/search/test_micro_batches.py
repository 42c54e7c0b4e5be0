"""A search over micro-batches: what they cost, what they save, and how many are taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.errors import Infeasible, NotCut
from autopar.plan.utilisation import flops_by_dtype, utilisation
from autopar.rewrite.cast_once import in_rounds_of_stages
from autopar.rewrite.micro_batches import in_rounds
from autopar.search import Request, search
from autopar.search.__main__ import main
from autopar.search.micro_batches import best_plan, count_near, counts_of
from autopar.trace import capture, graph_of
from tests.processes.stage_arguments import Reading, given
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.machines import FAST, machine

ALONE = Request(allow=())


def test_a_step_costs_what_its_rounds_cost_and_one_update() -> None:
    graph, mesh = family("gpt2").graph, mesh_of(2)
    cut = in_rounds(graph, 4)
    plan, at_once = search(cut, mesh, FAST, ALONE), search(graph, mesh, FAST, ALONE)
    flops = sum(flops_by_dtype(cut).values()) * 4
    assert flops == pytest.approx(sum(flops_by_dtype(graph).values()), rel=1e-12)
    assert utilisation(plan).model_flops == flops == utilisation(at_once).model_flops
    assert utilisation(plan).samples == utilisation(at_once).samples
    # of a round, each step of work is there four times
    comms = sum(comm.nbytes for comm in plan.comms())
    assert sum(plan.comm_bytes.values()) % 4 == 0 and (comms > 0) == (sum(plan.comm_bytes.values()) > 0)
    assert plan.step_seconds > at_once.step_seconds  # smaller work, and sums of gradients four times
    assert plan.bound <= plan.step_seconds


@pytest.mark.parametrize("asked", ["scale", "x y scale late"])
def test_gradients_of_arguments_are_summed_in_each_round(asked: str) -> None:
    """Those of parameters are summed behind all of them; the plan costs what the solver says of both."""
    graph = in_rounds_of_stages(graph_of(capture(Reading().double(), (), given(16, asked))), 2)
    cheap = machine(1e10, flops=1e10)
    plan = search(graph, mesh_of(2), cheap, Request(simulation=False))
    sums = {r.target: d for r, d in zip(graph.results, plan.deliveries, strict=True) if r.kind == "gradient" and d}
    assert sums["['scale']"].changes and not sums["['scale']"].once
    assert any(one.once for target, one in sums.items() if "layers" in target)


def test_with_less_memory_there_are_more_of_them() -> None:
    """Also where nothing may be recomputed, and what fits at once is done at once."""
    graph, mesh = family("vit").graph, mesh_of(1)
    at_once = search(graph, mesh, FAST, ALONE)

    def find(count: int) -> object:
        return search(in_rounds(graph, count), mesh, FAST, Request(allow=(), memory=limit))

    limit = float(at_once.peak_bytes["hbm"])
    assert best_plan(graph, find).graph.rounds.count == 1
    least = search(in_rounds(graph, 4), mesh, FAST, ALONE).peak_bytes["hbm"]
    assert least < at_once.peak_bytes["hbm"]
    limit = 1.02 * least  # a search counts on the safe side
    assert limit < at_once.peak_bytes["hbm"]
    found = best_plan(graph, find)
    assert found.graph.rounds.count > 1 and found.peak_bytes["hbm"] <= limit
    limit = 0.5 * least
    with pytest.raises(Infeasible):
        best_plan(graph, find)


def test_numbers_of_them() -> None:
    graph = family("gpt2").graph  # a batch of 4
    assert counts_of(graph) == [1, 2, 4]
    assert [count_near(graph, wanted) for wanted in (1, 2, 3, 4, 8)] == [1, 2, 4, 4, 1]
    with pytest.raises(NotCut, match="a batch of 4 cannot be cut into 3 equal micro-batches"):
        in_rounds(graph, 3)
    with pytest.raises(ValueError, match="is one of 2 rounds already"):
        in_rounds(in_rounds(graph, 2), 2)


MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.inner, self.norm = nn.Linear(12, 24), nn.BatchNorm1d(24) if norm else nn.Identity()

    def forward(self, x):
        return self.norm(self.inner(x)).square().mean()

def build():
    return Net(False), (torch.empty(8, 12, device="meta"),)

def normed():
    return Net(True), (torch.empty(8, 12, device="meta"),)
"""


def test_the_command_takes_a_number_or_leaves_it_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "net.py"
    model.write_text(MODEL)
    common = ["--mesh", "data=2", "--hardware", "cpu-gloo", "--quiet"]
    assert main([f"{model}:build", *common, "--micro-batches", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["micro_batches"] == 4
    assert main([f"{model}:build", *common, "--micro-batches", "auto", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["micro_batches"] == 1  # fits, and no more of them are quicker
    for wrong, told in (("0", "is no number of micro-batches"), ("3", "a batch of 8 cannot be cut into 3")):
        assert main([f"{model}:build", *common, "--micro-batches", wrong]) == 2
        assert told in capsys.readouterr().err
    assert main([f"{model}:normed", *common, "--micro-batches", "2"]) == 2
    assert "works on the whole batch at once" in capsys.readouterr().err
    assert main([f"{model}:normed", *common, "--micro-batches", "auto", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["micro_batches"] == 1
