"""Stages of a pipeline give together what the whole model gives: loss, outputs, every gradient, in double precision."""

from __future__ import annotations

import random
import re
from functools import cache

import pytest
import torch

from autopar.decide.stages import in_stages
from autopar.errors import NotCut
from autopar.ir.graph import Graph
from autopar.rewrite.stages import cut_in_stages, forward_order
from tests.processes.stage_arguments import Conditioned
from tests.support.check import mesh_of, worst_difference
from tests.support.families import FAMILIES, Case, family
from tests.support.plans import PlanSampler
from tests.support.residence import ResidenceSampler
from tests.support.staged import run_stages

TOLERANCE = 1e-10
QUICK = ("mlp", "block", "gpt2", "cnn")


@cache
def places(name: str) -> list[int]:
    """Where the model can be cut in two."""
    return legal_ends(family(name).wide_graph)


def legal_ends(graph: Graph) -> list[int]:
    found: list[int] = []
    for end in range(1, len(forward_order(graph))):
        try:
            cut_in_stages(graph, [end])
        except NotCut:
            continue
        found.append(end)
    return found


def cases() -> list[object]:
    return [
        pytest.param(name, count, marks=() if name in QUICK and count < 4 else pytest.mark.slow)
        for name in FAMILIES
        for count in (2, 3, 4)
    ]


@pytest.mark.parametrize(("name", "count"), cases())
def test_stages_together_are_the_model(name: str, count: int) -> None:
    """Wherever a model can be cut in two, it can be cut there and elsewhere, too."""
    case, drawn = family(name), random.Random(f"{name} {count}")
    graph = case.wide_graph
    assert len(places(name)) >= 7
    for seed in range(3):
        ends = sorted(drawn.sample(places(name), count - 1))
        stages = cut_in_stages(graph, ends, inputs_first=seed == 1)
        plans = [PlanSampler(stage.graph, mesh_of(2)).draw(seed) for stage in stages]
        ran = run_stages(stages, plans, case.values(graph), case.seed)
        difference, where = worst_difference(ran, case.wide_reference)
        assert difference < TOLERANCE, (ends, where)


def test_llama_can_be_cut_behind_each_of_its_layers() -> None:
    """Also where the layers share what is made of inputs alone: the rotary positions, which each layer's backward
    reads, too.
    """
    order = forward_order(family("llama").wide_graph)
    adds = [end for end, node in enumerate(order, 1) if node.op == "aten.add.Tensor" and node.outputs[0] is not None]
    behind = {order[end - 1].module: end for end in adds if re.search(r"layers?\.\d+$", order[end - 1].module)}
    assert len(behind) >= 2, behind
    assert {*behind.values()} <= {*places("llama")}


def test_stages_of_rotary_positions_are_the_model() -> None:
    """Cut where both stages read the positions."""
    case = family("llama")
    graph = case.wide_graph
    order = forward_order(graph)
    end = next(end for end in places("llama") if order[end].module == "model.layers.1.input_layernorm")
    stages = cut_in_stages(graph, [end])
    assert all(any(node.op == "aten.cos.default" for node in stage.graph.nodes) for stage in stages)
    plans = [PlanSampler(stage.graph, mesh_of(2)).draw(3) for stage in stages]
    difference, where = worst_difference(run_stages(stages, plans, case.values(graph), case.seed), case.wide_reference)
    assert difference < TOLERANCE, where


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "llama", "vit"))]
)
def test_what_backward_brings_back_is_cut_where_the_model_is(name: str) -> None:
    """Random plans that run values again, offload them and have parameters on the host, cut into their stages."""
    case, drawn = family(name), random.Random(name)
    sampler = ResidenceSampler(case.wide_graph, mesh_of(2))
    cut = 0
    for seed in range(8):
        plan = sampler.draw(seed)
        ends = sorted(drawn.sample(places(name), 1 + seed % 2))
        try:
            stages, plans = zip(*in_stages(plan, ends, sampler.pricer, inputs_first=seed == 1), strict=True)
        except NotCut as error:
            assert "partial sum" in str(error) or "no parameter that trains" in str(error), error
            continue
        cut += 1
        difference, where = worst_difference(
            run_stages(stages, plans, case.values(case.wide_graph), case.seed), case.wide_reference
        )
        assert difference < TOLERANCE, (seed, ends, where)
    assert cut >= 4


def test_what_all_layers_read_leaves_places_for_cuts_between_them() -> None:
    """Forward and backward of each stage read what the first one makes, through shares of their own."""
    drawn = random.Random(0)
    values = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))
    case = Case(Conditioned(), dict(zip("xyt", values, strict=True)))
    graph = case.wide_graph
    legal = legal_ends(graph)
    assert len(legal) == len(forward_order(graph)) - 1
    for seed in range(4):
        stages = cut_in_stages(graph, sorted(drawn.sample(legal, 3)), inputs_first=seed == 1)
        plans = [PlanSampler(stage.graph, mesh_of(2)).draw(seed) for stage in stages]
        difference, where = worst_difference(run_stages(stages, plans, case.values(graph), 0), case.wide_reference)
        assert difference < TOLERANCE, where
