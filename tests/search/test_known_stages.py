"""Stages that are alike but for their names are planned and priced once, and each as it would be by itself."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from autopar.decide.stages import plan_of_stage
from autopar.ir.mesh import Mesh
from autopar.price.pricer import Pricer
from autopar.rewrite.cast_once import in_rounds_of_stages
from autopar.rewrite.micro_batches import NotCut
from autopar.rewrite.stages import forward_order
from autopar.search import Request, search
from autopar.search.known_stages import KnownStages
from autopar.search.stage_prices import price_of
from autopar.trace import capture, graph_of
from tests.support.families import family
from tests.support.machines import FAST


class Tied(nn.Module):
    """Twelve layers (two digits in some of their names), every third with one weight; the last ones are wider."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 32)) for width in (64,) * 10 + (128,) * 2
        )
        for layer in self.layers[2:9:3]:
            layer[0].weight = self.layers[2][0].weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.mse_loss(x, y)


def known_of(name: str, allow: tuple[str, ...]) -> KnownStages:
    if name == "tied":
        graph = graph_of(capture(Tied(), (torch.randn(32, 32), torch.randn(32, 32)), {}))
    else:
        graph = family(name).wide_graph
    in_rounds, mesh = in_rounds_of_stages(graph, 2), Mesh(("data", "tensor"), (2, 2))
    whole = search(in_rounds, mesh, FAST, Request(allow=allow))
    return KnownStages(whole, Pricer.on(mesh, FAST, whole.optimizer, whole.bucket_bytes, in_rounds.rounds))


def places(known: KnownStages) -> list[int]:
    """Where the model can be cut in two."""
    found: list[int] = []
    for end in range(1, len(forward_order(known.whole.graph)), 2):
        try:
            known.cut([end])
        except NotCut:
            continue
        found.append(end)
    return found


@pytest.mark.parametrize("name", ["tied", "gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_each_is_priced_as_by_itself(name: str) -> None:
    known, draw = known_of(name, ("recompute",)), random.Random(name)
    open_, cuts = places(known), 0
    for number in range(8):
        try:
            cut = known.cut(sorted(draw.sample(open_, 3)), inputs_first=bool(number % 2))
        except NotCut:  # a stage without a parameter
            continue
        cuts += 1
        for stage, plan in cut:
            assert plan == plan_of_stage(stage, known.whole, known.pricer)
            assert known.price(stage) == price_of(stage, plan, known.pricer)
    assert cuts >= 4


def test_layers_that_repeat_are_planned_once() -> None:
    known = known_of("tied", ())
    order = forward_order(known.whole.graph)
    behind = [at for at, node in enumerate(order, 1) if node.op == "aten.add.Tensor" and not node.module]
    cut = known.cut(behind[:-1])
    assert len(cut) == 12 and len(known._forms) <= 8
