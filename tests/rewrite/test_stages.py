"""Stages of a pipeline give together what the whole model gives: loss, outputs, every gradient, in double precision."""

from __future__ import annotations

import random
from functools import cache

import pytest

from autopar.rewrite.micro_batches import NotCut
from autopar.rewrite.stages import cut_in_stages, forward_order
from tests.support.check import mesh_of, worst_difference
from tests.support.families import FAMILIES, family
from tests.support.plans import PlanSampler
from tests.support.staged import run_stages

TOLERANCE = 1e-10
QUICK = ("mlp", "block", "gpt2", "t5", "cnn")


@cache
def places(name: str) -> list[int]:
    """Where the model can be cut in two."""
    graph = family(name).wide_graph
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
        stages = cut_in_stages(graph, ends)
        plans = [PlanSampler(stage.graph, mesh_of(2)).draw(seed) for stage in stages]
        ran = run_stages(stages, plans, case.values(graph), case.seed)
        difference, where = worst_difference(ran, case.wide_reference)
        assert difference < TOLERANCE, (ends, where)
