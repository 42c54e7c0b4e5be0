"""What is known of a stage is what would be found of it: cuts of one plan, in any order. Stages that are alike but for
their names are planned and priced once.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from autopar.decide.stages import in_stages, plan_of_stage
from autopar.errors import NotCut
from autopar.ir.mesh import Mesh
from autopar.price.pricer import Pricer
from autopar.rewrite.cast_once import in_rounds_of_stages
from autopar.rewrite.micro_batches import in_rounds
from autopar.rewrite.stages import forward_order
from autopar.search import Request, search
from autopar.search.known_stages import KnownStages
from autopar.search.stage_prices import price_of
from autopar.trace import capture, graph_of
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.machines import FAST


@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])  # both have a tied weight
def test_known_stages_are_those_of_a_cut_made_anew(name: str) -> None:
    whole = search(in_rounds(family(name).graph, 2), mesh_of(2), FAST, Request(allow=()))
    pricer = Pricer.on(whole.mesh, FAST, whole.optimizer, whole.bucket_bytes, whole.graph.rounds)
    known, drawn, right = KnownStages(whole, pricer), random.Random(name), 0
    while right < 6:
        ends, inputs_first = sorted(drawn.sample(range(1, len(forward_order(whole.graph))), 2)), right % 2 == 1
        try:
            anew = in_stages(whole, ends, pricer, inputs_first=inputs_first)
        except NotCut:
            with pytest.raises(NotCut):
                known.cut(ends, inputs_first=inputs_first)
            continue
        for _ in range(2):
            found = known.cut(ends, inputs_first=inputs_first)
            assert found == anew
            assert [known.price(stage) for stage, _ in found] == [price_of(stage, plan, pricer) for stage, plan in anew]
        right += 1


def test_an_end_that_moves_leaves_the_other_stages_as_they_are() -> None:
    whole = search(family("gpt2").graph, mesh_of(2), FAST, Request(allow=()))
    pricer = Pricer.on(whole.mesh, FAST, whole.optimizer, whole.bucket_bytes, whole.graph.rounds)
    known, last = KnownStages(whole, pricer), len(forward_order(whole.graph))
    legal = [end for end in range(1, last) if is_legal(known, [end])]
    first, second, third, fourth = [end for end in legal if is_legal(known, sorted({legal[0], end}))][:4]
    before, after = known.cut([first, second, fourth]), known.cut([first, third, fourth])
    assert [mine is theirs for (_, mine), (_, theirs) in zip(before, after, strict=True)] == [True, False, False, True]


def is_legal(known: KnownStages, ends: list[int]) -> bool:
    try:
        known.cut(ends)
    except NotCut:
        return False
    return True


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
    """Of the plan in two micro-batches on four devices."""
    if name == "tied":
        graph = graph_of(capture(Tied(), (torch.randn(32, 32), torch.randn(32, 32)), {}))
    else:
        graph = family(name).wide_graph
    in_rounds, mesh = in_rounds_of_stages(graph, 2), Mesh(("data", "tensor"), (2, 2))
    whole = search(in_rounds, mesh, FAST, Request(allow=allow))
    return KnownStages(whole, Pricer.on(mesh, FAST, whole.optimizer, whole.bucket_bytes, in_rounds.rounds))


def places(known: KnownStages) -> list[int]:
    """Where the model can be cut in two."""
    return [end for end in range(1, len(forward_order(known.whole.graph)), 2) if is_legal(known, [end])]


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
