"""A step in micro-batches gives what the whole step gives: loss, outputs and every gradient, in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import NotCut
from autopar.ir.graph import Graph
from autopar.rewrite.micro_batches import in_rounds
from autopar.trace import capture, graph_of
from tests.support.check import mesh_of, worst_difference
from tests.support.families import FAMILIES, family
from tests.support.plans import PlanSampler
from tests.support.rounds import run_rounds

TOLERANCE = 1e-10
QUICK = ("mlp", "block", "gpt2", "llama")
OF_THE_BATCH = ("cnn", "resnet", "queue")  # statistics of the batch are written to buffers


def cases() -> list[object]:
    return [
        pytest.param(name, count, marks=() if name in QUICK else pytest.mark.slow)
        for name in FAMILIES
        if name not in OF_THE_BATCH
        for count in (2, 4)
    ]


def whole_results(graph: Graph) -> int:
    return sum(result.ref is not None for result in graph.results)


@pytest.mark.parametrize(("name", "count"), cases())
def test_the_rounds_together_are_the_step(name: str, count: int) -> None:
    case = family(name)
    graph = in_rounds(case.wide_graph, count)
    assert graph.rounds.count == count and graph.rounds.cut
    plan = PlanSampler(graph, mesh_of(2)).draw(count)
    ran = run_rounds(plan, case.values(graph), case.seed)
    assert len([one for one in ran.results.values() if one is not None]) == whole_results(graph)
    difference, where = worst_difference(ran, case.wide_reference)
    assert difference < TOLERANCE, where


class RunningMean(nn.Module):
    """A buffer that each micro-batch would write from its own part."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        self.mean = 0.9 * self.mean + 0.1 * made.detach().mean(0)
        return made.square().mean()


def test_a_buffer_of_the_whole_batch_is_named() -> None:
    graph = graph_of(capture(RunningMean(), (torch.randn(8, 6),), {}))
    with pytest.raises(NotCut, match=r"forward writes the buffer mean from the whole batch, and 2 micro-batches would"):
        in_rounds(graph, 2)
