"""What is known of a stage is what would be found of it: cuts of one plan, in any order."""

from __future__ import annotations

import random

import pytest

from autopar.decide.stages import in_stages
from autopar.price.pricer import Pricer
from autopar.rewrite.micro_batches import NotCut, in_rounds
from autopar.rewrite.stages import forward_order
from autopar.search import Request, search
from autopar.search.known_stages import KnownStages
from autopar.search.stage_prices import price_of
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
