"""Batch and sequence as one dim of tokens, split by two axes: the sequence where the batch is in pieces of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.emit.run_all_ranks import fake_ranks, run
from autopar.ir.graph import Node
from autopar.ir.layout import Shard
from autopar.plan import Plan
from autopar.plan.fit import check_rules
from autopar.price.pricer import Pricer
from autopar.propose.strategies import Strategy, propose
from autopar.scale import DoesNotSplit, growth_of, plan_at, usual_sources
from autopar.scale.__main__ import main
from cost_models.hardware import Hardware
from tests.support.check import difference, mesh_of, worst_difference
from tests.support.families import Case
from tests.support.plans import PlanSampler

H100 = Hardware.load("h100-sxm")


class Classifier(nn.Module):
    """Of each token, whose loss is taken of all tokens in one dim; and back into rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 10), nn.Linear(10, 8)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.other(self.one(x).flatten(0, 1).tanh())
        return functional.cross_entropy(logits, labels.flatten()), logits.unflatten(0, x.shape[:2]).sum(1)


def case_of(batch: int, length: int) -> Case:
    torch.manual_seed(batch)
    return Case(Classifier(), {"x": torch.randn(batch, length, 6), "labels": torch.randint(8, (batch, length))})


def behind(node: Node, options: tuple[Strategy, ...], axes: int) -> list[Strategy]:
    """Those in which all axes split the dim of tokens, and not all of them the batch."""
    shards = {(Shard(0),) * axes}
    return [one for one in options if {*one.takes[:1], *one.gives[:1]} >= shards and len({*one.roles}) > 1]


@pytest.mark.parametrize(("sizes", "batch"), [((2, 2), 2), ((4, 2), 4), ((2, 2, 2), 4), ((2, 2, 2), 2)], ids=str)
def test_every_such_plan_gives_what_one_process_gives(sizes: tuple[int, ...], batch: int, tmp_path: Path) -> None:
    case, mesh = case_of(batch, 12), mesh_of(*sizes)
    sampler, found = PlanSampler(case.wide_graph, mesh, H100), 0
    for node in case.wide_graph.nodes:
        if node.op != "aten.view.default":
            continue
        for option in behind(node, sampler.strategies[node.name], len(sizes)):
            plan = sampler.best({node.name: lambda one, wanted=option: one == wanted})
            check_rules(plan)
            assert plan.choices[node.name].roles == option.roles
            off, where = difference(plan, case)
            assert off <= 1e-10, (node.name, option, where)
            found += 1
    assert found >= 4
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    with fake_ranks(mesh) as device_mesh:
        off, where = worst_difference(run(plan, device_mesh, case.values(plan.graph)), case.wide_reference)
    assert off <= 1e-10, where


@pytest.mark.parametrize(("sizes", "batch"), [((2, 2), 4), ((2, 2), 6), ((2, 4), 4)], ids=str)
def test_of_a_batch_in_larger_pieces_the_sequence_is_not_split(sizes: tuple[int, ...], batch: int) -> None:
    graph = case_of(batch, 12).wide_graph
    found, _ = propose(graph, mesh_of(*sizes))
    views = [node for node in graph.nodes if node.op == "aten.view.default"]
    assert views and not any(behind(node, found[node.name], 2) for node in views)


def test_at_other_sizes_such_a_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case, mesh = case_of(2, 12), mesh_of(2, 2)
    sampler = PlanSampler(case.wide_graph, mesh, H100)
    node = next(node for node in case.wide_graph.nodes if node.op == "aten.view.default")
    wanted = behind(node, sampler.strategies[node.name], 2)[0]
    plan = sampler.best({node.name: lambda one: one == wanted})
    plan.save(tmp_path / "plan.json")
    assert main([str(tmp_path / "plan.json"), "--no-search", "--hardware", "h100-sxm"]) == 2
    assert f"splits the tokens of %{node.name} by the sequence behind a batch" in capsys.readouterr().err
    growth = growth_of(plan.graph, usual_sources(plan.graph))
    pricer = Pricer.on(mesh, H100, plan.optimizer, plan.bucket_bytes)
    assert plan_at(plan, growth, {"batch": 2, "sequence": 24}, pricer).graph.by_name[node.name].outputs != node.outputs
    with pytest.raises(DoesNotSplit, match="splits what stands behind 4 that are in 2 pieces"):
        plan_at(plan, growth, {"batch": 4, "sequence": 12}, pricer)
