"""Among known layouts: plans carried from one problem to another, and the best of what combines them."""

from __future__ import annotations

import random

import pytest

from autopar.assemble.problem import assemble
from autopar.decide.picks import tidied
from autopar.price.overlap_discounts import MOVES
from autopar.price.pricer import Pricer
from autopar.propose.strategies import propose
from autopar.rewrite import narrowed
from autopar.search.memory_options import MemoryOptions, checkpointed
from autopar.search.policies import by_hand, restrict
from autopar.search.restricted import Known, best_among, carried
from cost_models.hardware import Hardware
from solver import evaluate
from tests.assemble.drawn import drawn
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.plans import random_picks

H100 = Hardware.load("h100-sxm")
NOTHING = MemoryOptions()


@pytest.mark.parametrize("name", ["mlp", "block", "gpt2"])
def test_what_keeps_everything_is_carried_to_the_problem_in_which_all_may_be_recomputed_and_offloaded(
    name: str,
) -> None:
    graph, pricer = family(name).graph, Pricer.on(mesh_of(2), H100, "adamw")
    before, after = drawn(graph, pricer, NOTHING), drawn(graph, pricer)
    for seed in range(3):
        picks = tuple(random_picks(before.assembled, random.Random(seed)))
        found = carried(Known(before.assembled, picks), after.assembled)
        assert found is not None
        found = tidied(after.assembled, found)
        plan = after.plan(found, after.priced(found))
        assert {n.name for n in plan.graph.nodes} == {n.name for n in narrowed(graph, {}).nodes} and not plan.residence
        told = {n.name: plan.choices[n.name].gives for n in graph.nodes}
        assert told == {n: c.gives for n, c in before.plan(picks, before.priced(picks)).choices.items()}


def test_a_plan_of_a_policy_is_carried_with_how_its_values_come_back() -> None:
    graph, pricer = family("gpt2").graph, Pricer.on(mesh_of(2), H100, "adamw")
    strategies, _ = propose(graph, pricer.mesh)
    kept = restrict("checkpoint-every-block", graph, strategies, pricer.mesh)
    before = drawn(graph, pricer, MemoryOptions(modes=checkpointed), strategies=kept)
    after = drawn(graph, pricer, strategies=strategies)
    for seed in range(3):
        picks = before.tidy(random.Random(seed))
        found = carried(Known(before.assembled, picks), after.assembled)
        assert found is not None
        assert after.priced(found).cost == pytest.approx(before.priced(picks).cost, rel=1e-9)
        plan = after.plan(found, after.priced(found))
        assert plan.graph == before.plan(picks, before.priced(picks)).graph


def test_what_has_no_like_in_a_problem_is_not_carried() -> None:
    graph, pricer = family("mlp").graph, Pricer.on(mesh_of(2), H100, "adamw")
    before = drawn(graph, pricer, ("host",))
    on_host = [
        picks
        for seed in range(5)
        if before.plan((picks := before.tidy(random.Random(seed))), before.priced(picks)).residence
    ]
    after = drawn(graph, pricer, ("recompute",)).assembled
    assert on_host and all(carried(Known(before.assembled, picks), after) is None for picks in on_host)


@pytest.mark.parametrize("name", ["block", "gpt2"])
def test_the_best_among_layouts_is_no_worse_than_any_of_them_and_made_of_them(name: str) -> None:
    graph, pricer = family(name).graph, Pricer.on(mesh_of(2), H100, "adamw")
    plain, found = drawn(graph, pricer, NOTHING), drawn(graph, pricer)
    known = [Known(plain.assembled, tuple(random_picks(plain.assembled, random.Random(seed)))) for seed in range(3)]
    solution = best_among(known, found.assembled, found.wide.again, 30.0)
    assert solution is not None and solution.picks is not None
    mine = Known(found.assembled, solution.picks)
    for one in known:
        assert solution.cost <= plain.priced(one.picks).cost * (1 + 1e-6)
    for node in graph.nodes:
        assert any(mine.pick(node.name) == one.pick(node.name) for one in known), node.name


def test_moves_cost_their_share_and_nothing_else_changes() -> None:
    graph, pricer = family("block").graph, Pricer.on(mesh_of(2), H100, "adamw")
    strategies = by_hand(propose(graph, pricer.mesh)[0])  # at a discount loops have other prices
    full = drawn(graph, pricer, strategies=strategies)
    for share in (1.0, 0.25):
        shares = {(MOVES, stream): share for stream in ("h2d", "d2h", "host")}
        less = assemble(
            full.wide.graph, strategies, pricer,
            memory=None, again=full.wide.again, residences=("device", "host", "stream"), shares=shares,
        )  # fmt: skip
        changed = 0
        for seed in range(10):
            picks = full.tidy(random.Random(seed))
            moves = sum(
                seconds
                for stream, seconds in full.plan(picks, full.priced(picks)).seconds_by.items()
                if stream in ("h2d", "d2h")
            )
            before, after = full.priced(picks).cost, evaluate(less.problem, picks).cost
            assert after <= before - (1 - share) * moves + 1e-12  # the host's own work is cheaper, too
            changed += after < before
        assert (changed > 0) == (share < 1)
