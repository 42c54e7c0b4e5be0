"""What a plan's file answers is what a trace would: the same question, whose best plan is never above the same plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autopar.plan import Plan
from autopar.plan.store import dumps
from autopar.price.pricer import Pricer
from autopar.search import Question, Request, answer, ask, search
from autopar.search.kept import repriced
from autopar.search.memory_options import MemoryOptions, ways_on
from autopar.search.problems import Wanted, never, posed
from autopar.what_if.changes import changes_of, imagined
from autopar.what_if.question import Answers, Asked, optimum_s, what_if, worth_of_memory
from cost_models.hardware import Hardware
from cost_models.reserve import Room
from solver import Edge, Prices, Problem, Solution, solve
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.machines import machine

H100 = Hardware.load("h100-sxm")
HIDES = replace(machine(1e9, flops=1e10, memory=1e12), name="hides", overlaps=True)
SUMS = machine(1e9, flops=1e10)
# All memory is for tensors, and what moves pays for its bytes alone, as small models have few.
BARE = replace(H100, reserve={}, dispatch_s=None)
HAIR = 1 + 1e-9
QUICKER = [{"bandwidth": "all=2x"}, {"bandwidth": "a=8x", "flops": "2x"}]
SLOWER = [{"bandwidth": "all=0.1x"}, {"bandwidth": "a=0.5x", "latency": "a=9x"}]
CASES = [("mlp", (2,), HIDES), ("mlp", (2, 2), SUMS)]
some = pytest.mark.parametrize(("name", "sizes", "hardware"), CASES, ids=lambda one: getattr(one, "name", str(one)))


@cache
def plan_of(name: str, sizes: tuple[int, ...], hardware: Hardware) -> Plan:
    return search(family(name).graph, mesh_of(*sizes), hardware, Request(simulation=True))


def answers_to(plan: Plan, hardware: Hardware, room: Room | None = None, **changes: str) -> Answers:
    then = imagined(hardware, changes_of(hardware, plan.mesh, **changes))
    return what_if(plan, hardware, Asked(then, room))


# --- other hardware --------------------------------------------------------------------------------------------------


@some
def test_nothing_is_quicker_than_proven_and_the_best_plan_no_slower_than_the_same(
    name: str, sizes: tuple[int, ...], hardware: Hardware
) -> None:
    plan = plan_of(name, sizes, hardware)
    for changes in (*QUICKER, *SLOWER):
        found = answers_to(plan, hardware, **changes)
        assert found.best is not None and found.fits
        assert found.best.predicted_seconds <= found.same.predicted_seconds * HAIR
        assert found.best.bound <= found.same.step_seconds * HAIR, "which is proven of all plans"
        assert optimum_s(found.best) <= found.same.step_seconds * HAIR
        was, now = found.before.step_seconds, found.same.step_seconds
        assert now < was if changes in QUICKER else now > was
        assert {found.same.hardware, found.best.hardware} == {found.asked.hardware.name} != {plan.hardware}
        assert {found.same.hardware_digest, found.best.hardware_digest} == {found.asked.hardware.digest}
        assert plan.hardware_digest != found.asked.hardware.digest


@some
def test_the_plan_as_it_is_takes_what_it_says(name: str, sizes: tuple[int, ...], hardware: Hardware) -> None:
    plan = plan_of(name, sizes, hardware)
    assert answers_to(plan, hardware, flops="2x").before == plan


def test_only_what_is_changed_takes_another_time() -> None:
    plan = plan_of("mlp", (2, 2), SUMS)
    for axis in plan.mesh.names:
        found = answers_to(plan, SUMS, bandwidth=f"{axis}=2x")
        before, after = found.before.seconds_by, found.same.seconds_by
        assert {part for part in before if before[part] != after[part]} <= {f"comm:{axis}"}
        if found.before.comm_bytes and any(over == axis for _, over in found.before.comm_bytes):
            assert after[f"comm:{axis}"] < before[f"comm:{axis}"]


def test_the_question_of_a_plan_is_that_of_the_traced_graph() -> None:
    """Also where values run again: the answer is the plan that a search finds from the model."""
    graph, mesh = family("mlp").graph, mesh_of(2)
    free = search(graph, mesh, BARE)
    room = Room(0.9 * free.peak_bytes["hbm"])
    plan = search(graph, mesh, BARE, Request(memory=room.tensors))
    assert len(plan.graph.nodes) > len(graph.nodes)
    found = answers_to(plan, BARE, room, bandwidth="all=0.2x", flops="3x")
    fresh = search(graph, mesh, found.asked.hardware, Request(memory=room.tensors))
    assert found.best is not None and not found.is_same
    assert dumps(found.best).splitlines()[2:] == dumps(fresh).splitlines()[2:]


# --- other memory ----------------------------------------------------------------------------------------------------


@cache
def question(name: str) -> Question:
    return ask(family(name).graph, mesh_of(2), BARE)


def problem_of(asked: Question, allow: str, limit: float) -> Problem:
    """All that is decided under the limit, gradients summed one by one."""
    options = MemoryOptions(ways_on(asked.pricer, (allow,)))
    return posed(asked, 0, None, Wanted.of(Request(memory=limit), options, never)).assembled.problem


def floor(problem: Problem, prices: Prices) -> float:
    """What no plan costs less than, once memory is paid for at these prices and not limited (weak duality).

    Less what the limits give away: so it is a line in the limit, whose slope is the sum of the prices.
    """
    costs, edges = [cost.copy() for cost in problem.costs], [edge.cost.copy() for edge in problem.edges]
    for (resource, instant), price in prices.items():
        for usage in problem.usages:
            if usage.resource == resource and usage.start <= instant < usage.end:
                costs[usage.item] += price * usage.nbytes
        for held in problem.edge_usages:
            if held.resource == resource and held.start <= instant < held.end:
                edges[held.edge] += price * held.nbytes
    paid = [Edge(edge.src, edge.dst, cost) for edge, cost in zip(problem.edges, edges, strict=True)]
    free = solve(Problem(tuple(costs), tuple(paid), names=problem.names))
    return free.bound - sum(price * problem.limits[resource] for (resource, _), price in prices.items())


@pytest.mark.parametrize(("name", "allow"), [("mlp", "offload-parameters"), ("cnn", "recompute")])
def test_no_change_of_the_limit_is_worth_more_than_the_price_of_memory_says(name: str, allow: str) -> None:
    """value(limit') >= floor(limit) - price * (limit' - limit), for limits below and above; at the price it is near."""
    asked = question(name)
    top = answer(asked).peak_bytes["hbm"]
    limits = [share * top for share in (0.85, 0.9, 0.95)]
    solved: dict[float, Solution] = {limit: solve(problem_of(asked, allow, limit)) for limit in limits}
    unlimited = solve(problem_of(asked, allow, 10.0 * top)).cost
    binding = 0
    for limit, solution in solved.items():
        price = sum(solution.prices.values())
        proven = floor(problem_of(asked, allow, limit), solution.prices)
        assert proven <= solution.cost * HAIR
        if price:
            binding += 1
            assert proven >= unlimited * (1 - 1e-9), "with prices of 0 it would be this much"
        for other, there in solved.items():
            assert there.cost >= (proven - price * (other - limit)) * (1 - 1e-9), (limit, other)
    assert binding >= 2


def test_the_worth_of_memory_stands_beside_what_was_solved() -> None:
    asked = question("mlp")
    top = answer(asked).peak_bytes["hbm"]
    plan = answer(asked, Request(memory=0.9 * top))
    assert isinstance(plan.search["ms_per_gib:hbm"], float)
    for share in (0.88, 0.95):
        found = what_if(plan, BARE, Asked(BARE, Room(share * top)))
        worth = worth_of_memory(found)
        assert worth is not None and found.best is not None
        assert (worth.by_price_s > 0) == (share > 0.9) and worth.solved_s * worth.by_price_s >= 0
        gap = found.before.step_seconds - found.before.bound  # the price is of the bound
        assert worth.solved_s <= worth.by_price_s + gap + 1e-3 * plan.step_seconds
        assert found.fits == (plan.peak_bytes["hbm"] <= share * top)
        assert found.best.hardware_digest == plan.hardware_digest, "a plan like any other"
    assert worth_of_memory(answers_to(plan, BARE, Room(0.95 * top), flops="2x")) is None


def test_where_nothing_fits_the_same_plan_is_told() -> None:
    plan = plan_of("mlp", (2,), SUMS)
    found = answers_to(plan, SUMS, Room(10.0), flops="2x")
    assert found.best is None and "no plan fits in 10 B" in str(found.why) and not found.fits
    pricer = Pricer.on(plan.mesh, found.asked.hardware, plan.optimizer, plan.bucket_bytes)
    assert found.same.predicted_seconds == repriced(plan, pricer).predicted_seconds
