"""Stores, fetches and their waits in the emitted program: nothing is used before it is there, or gone too early."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar._compat import fx_graph_cse
from autopar.emit import Emitted, emit
from autopar.ir.mesh import Mesh
from autopar.ir.work import FETCH, STORE
from autopar.lower.program import Copy
from autopar.lower.schedule import Advance, Facts, Turn, schedule
from autopar.optim import Streamed
from autopar.plan import Plan
from autopar.plan.value import is_product
from autopar.price.pricer import OPTIMIZER_STATES, Pricer
from autopar.simulate.timeline import events_of
from cost_models.simulator import Event
from cost_models.steps import Move
from tests.support.check import mesh_of, worst_difference
from tests.support.families import family
from tests.support.lockstep import run_all
from tests.support.machines import FAST
from tests.support.moves import WAIT, Late
from tests.support.residence import ResidenceSampler, hosted

CASES = [("mlp", (2,), 0), ("mlp", (2, 2), 1), ("block", (2,), 2), ("block", (2, 2), 0), ("cnn", (2,), 1)]
some_plans = pytest.mark.parametrize(("name", "sizes", "seed"), CASES, ids=str)
PREFETCHES = (None, 0, 1, 3)
COPIES = tuple(f"autopar.{op}." for op in ("store", "fetch", "wait_copy"))


@cache
def drawn(name: str, sizes: tuple[int, ...], seed: int) -> Plan:
    return ResidenceSampler(family(name).wide_graph, mesh_of(*sizes)).draw(seed)


def program_of(plan: Plan) -> Emitted:
    return emit(plan, {axis: axis for axis in plan.mesh.groups})


def parts(program: Emitted) -> list[fx.GraphModule]:
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


def copies_of(plan: Plan, pricer: Pricer) -> list[Event]:
    """What is copied in forward and backward, as the simulator plays it."""
    events = events_of(plan, pricer, plan.prefetch or 0)
    return [event for event in events if "copy" in dict(event.about) and event.phase != "optimizer"]


def nbytes_of(copies: Sequence[Event]) -> Counter[str]:
    found: Counter[str] = Counter()
    for event in copies:
        found["fetch" if event.stream == "h2d" else "store"] += int(dict(event.about)["bytes"])
    return found


@pytest.mark.parametrize(("prefetch", "bucket_bytes"), [(None, 0), (0, 3000), (1, 3000), (3, 0)])
@some_plans
def test_collectives_and_copies_move_the_bytes_of_the_plan(
    name: str, sizes: tuple[int, ...], seed: int, prefetch, bucket_bytes: int
) -> None:
    """And there are as many copies as the simulator plays."""
    plan, case = replace(drawn(name, sizes, seed), prefetch=prefetch, bucket_bytes=bucket_bytes), family(name)
    with Late() as late:
        _, traffic = run_all(plan, case.values(plan.graph), case.seed)
    assert traffic == {key: nbytes for key, nbytes in plan.comm_bytes.items() if nbytes} and traffic
    played = copies_of(plan, Pricer.on(plan.mesh, FAST, "adamw", bucket_bytes))
    ranks = plan.mesh.ranks
    assert late.nbytes == {what: ranks * nbytes for what, nbytes in nbytes_of(played).items()} and late.nbytes
    assert sum(what != "wait" for what, _ in late.log) == ranks * len(played)


@pytest.mark.parametrize("seed", range(3))
def test_the_optimizer_moves_the_states_that_the_plan_streams(one: DeviceMesh, seed: int) -> None:
    """From the second step on: the first makes them."""
    case = family("block")
    sampler = ResidenceSampler(case.graph, Mesh(("data",), (1,)))
    plan, pricer = sampler.draw(seed), sampler.pricer
    parallel = autopar.compile(case.model, one, example_kwargs=case.inputs, plan=plan)
    optimizer = Streamed(torch.optim.AdamW(parallel.parameters(), fused=True), parallel)
    for _ in range(2):
        parallel(**case.inputs).backward()
        with Late() as late:
            optimizer.step()
    streamed = [parallel.get_parameter(name) for name, where in plan.residence.items() if where == "stream"]
    steps = [step for one_of_them in streamed for step in pricer.update_steps(one_of_them.nbytes, "float32", "stream")]
    fetched = sum(step.nbytes for step in steps if isinstance(step, Move) and step.dst == "hbm")
    assert late.nbytes == {"fetch": fetched, "store": fetched} and fetched > 0
    events = [event for event in events_of(plan, pricer, prefetch=1) if event.phase == "optimizer"]
    for what, way in (("fetch", "h2d"), ("store", "d2h")):
        played = sum(event.stream == way for event in events)
        assert sum(entry[0] == what for entry in late.log) == OPTIMIZER_STATES["adamw"] * played == 2 * len(streamed)
    assert not late.early and not late.under_way


@some_plans
def test_every_copy_survives_what_tidies_a_graph(name: str, sizes: tuple[int, ...], seed: int) -> None:
    """No two fetches become one, and none is dead."""
    for part in parts(program_of(replace(drawn(name, sizes, seed), prefetch=1))):
        before = Counter(str(node.target) for node in part.graph.nodes if "autopar" in str(node.target))
        swept, merged = copy.deepcopy(part), fx.GraphModule(part, fx_graph_cse(part.graph))
        for tidied in (swept, merged):
            tidied.graph.eliminate_dead_code()
            tidied.recompile()
            after = Counter(str(node.target) for node in tidied.graph.nodes if "autopar" in str(node.target))
            assert copies(after) == copies(before)
            assert tidied is merged or after == before


def copies(counted: Counter[str]) -> Counter[str]:
    return Counter({op: count for op, count in counted.items() if op.startswith(COPIES)})


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
        order = schedule(Facts(plan), phase, prefetch)
        products = [i for i, a in enumerate(order) if isinstance(a, Turn) and is_product(plan.choices[a.node])]
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
