"""Stores, fetches and their waits in the emitted program: nothing is used before it is there, or gone too early."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import fx

from autopar.emit import Program, emit
from autopar.plan import Plan
from autopar.schedule import Advance, Copy, Run, is_product, schedule
from autopar.work import FETCH, STORE
from tests.support.check import mesh_of, worst_difference
from tests.support.families import family
from tests.support.lockstep import run_all
from tests.support.moves import WAIT, Late
from tests.support.residence import ResidenceSampler, hosted

CASES = [("mlp", (2,), 0), ("mlp", (2, 2), 1), ("block", (2,), 2), ("block", (2, 2), 0), ("cnn", (2,), 1)]
some_plans = pytest.mark.parametrize(("name", "sizes", "seed"), CASES, ids=str)
PREFETCHES = (None, 0, 1, 3)


@cache
def drawn(name: str, sizes: tuple[int, ...], seed: int) -> Plan:
    return ResidenceSampler(family(name).wide_graph, mesh_of(*sizes)).draw(seed)


def program_of(plan: Plan) -> Program:
    return emit(plan, {axis: axis for axis in plan.mesh.names})


def parts(program: Program) -> list[fx.GraphModule]:
    assert program.backward is not None
    return [program.forward, program.backward]


def planned(plan: Plan) -> Counter[tuple[str, str]]:
    """(what, name) of the copies that the plan has."""
    found = Counter(
        (node.op.removeprefix("autopar."), node.name) for node in plan.graph.nodes if node.op in (STORE, FETCH)
    )
    trained = [r.target for r in plan.graph.results if r.kind == "gradient" and r.ref is not None]
    found.update(("store", f"gradient of {name}") for name in trained if name in hosted(plan.residence))
    return found


@pytest.mark.parametrize("prefetch", PREFETCHES)
@some_plans
def test_copies_may_come_as_late_as_they_are_waited_for(name: str, sizes: tuple[int, ...], seed: int, prefetch) -> None:
    plan, case = replace(drawn(name, sizes, seed), prefetch=prefetch, bucket_bytes=3000), family(name)
    with Late() as late:
        ran, _ = run_all(plan, case.values(plan.graph), case.seed)
    off, where = worst_difference(ran, case.wide_reference)
    assert off <= 1e-9, f"{where} is off by {off:.3g}"
    assert not late.early and not late.under_way
    launched = Counter(entry for entry in late.log if entry[0] != "wait")
    ranks = plan.mesh.ranks
    assert launched == Counter({key: ranks * count for key, count in planned(plan).items()})
    assert sum(what == "wait" for what, _ in late.log) == launched.total()


@some_plans
def test_every_copy_survives_the_removal_of_dead_code(name: str, sizes: tuple[int, ...], seed: int) -> None:
    for part in parts(program_of(replace(drawn(name, sizes, seed), prefetch=1))):
        before = Counter(str(node.target) for node in part.graph.nodes if "autopar" in str(node.target))
        swept = copy.deepcopy(part)
        swept.graph.eliminate_dead_code()
        swept.recompile()
        after = Counter(str(node.target) for node in swept.graph.nodes if "autopar" in str(node.target))
        assert after == before


@some_plans
def test_what_is_copied_is_kept_until_the_wait(name: str, sizes: tuple[int, ...], seed: int) -> None:
    """The wait is the first reader of what arrives, and reads the source itself."""
    for prefetch in PREFETCHES:
        for part in parts(program_of(replace(drawn(name, sizes, seed), prefetch=prefetch))):
            place = {node: number for number, node in enumerate(part.graph.nodes)}
            waits = {node.args[0]: node for node in part.graph.nodes if node.target is WAIT}
            made = [n for n in part.graph.nodes if str(n.target) in ("autopar.store.default", "autopar.fetch.default")]
            assert len(made) == len(waits)
            for node in made:
                wait = waits[node]
                assert wait.args[1] is node.args[0]
                assert min(place[user] for user in node.users) == place[wait]


@pytest.mark.parametrize("prefetch", [1, 2])
@some_plans
def test_fetches_are_launched_so_many_products_ahead(
    name: str, sizes: tuple[int, ...], seed: int, prefetch: int
) -> None:
    """Of what runs where it stands; what runs ahead, to be gathered, is fetched ahead of that."""
    plan = drawn(name, sizes, seed)
    for phase in ("forward", "backward"):
        order = schedule(plan, phase, prefetch)
        products = [i for i, a in enumerate(order) if isinstance(a, Run) and is_product(plan.choices[a.node])]
        for node in plan.graph.nodes:
            if node.op == FETCH and node.phase == phase:
                launched, waited = (i for i, action in enumerate(order) if action == Advance(Copy(node.name)))
                between = sum(launched < product < waited for product in products)
                assert between == min(prefetch, sum(product < waited for product in products)), node.name


def test_without_a_device_to_pin_for_memory_is_pageable() -> None:
    made = torch.ops.autopar.store(torch.ones(3), "x")
    assert made.equal(torch.ones(3)) and not made.is_pinned()
    back = torch.ops.autopar.fetch(made, torch.device("cpu"), "x")
    assert back.equal(made) and back.data_ptr() != made.data_ptr()


def test_a_copy_lies_in_memory_as_its_source_does() -> None:
    """Else other kernels might run on it, and give other bits."""
    for x in (torch.randn(4, 5).t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(())):
        assert torch.ops.autopar.store(x, "x").stride() == x.stride()
        assert torch.ops.autopar.fetch(x, torch.device("cpu"), "x").stride() == x.stride()
