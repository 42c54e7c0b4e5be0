"""Steps one behind the other, with the host's updates beside the next forward: a bound from each side, and by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from math import isclose

import pytest

from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.simulate.steady_state import read_order, steady_s
from autopar.simulate.timeline import events_of, timeline_of
from cost_models.hardware import Hardware
from cost_models.simulator import COMPUTE
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.residence import ResidenceSampler, hosted

HOST, FETCH = "host", "h2d"
H100 = Hardware.load("h100-sxm")


def with_host(rate: float) -> Hardware:
    """An H100 whose host updates so many bytes a second."""
    tier = replace(H100.tiers["host"], bytes_per_s=rate)
    return replace(H100, tiers={**H100.tiers, "host": tier})


@cache
def drawn(name: str, seed: int, rate: float) -> tuple[Plan, Pricer]:
    sampler = ResidenceSampler(family(name).graph, mesh_of(2), with_host(rate))
    return replace(sampler.draw(seed), prefetch=seed % 3), sampler.pricer


@cache
def offloaded(name: str, rate: float) -> tuple[Plan, Pricer]:
    """All parameters on the host."""
    sampler = ResidenceSampler(family(name).graph, mesh_of(2), with_host(rate))
    names = [node.target for node in sampler.graph.nodes if node.op == "parameter"]
    plan = sampler.plan({}, dict.fromkeys(names, "host"), random.Random(0))
    return replace(plan, prefetch=1), sampler.pricer


CASES = [(name, seed, rate) for name in ("mlp", "block", "gpt2") for seed in range(3) for rate in (1e9, 1e10, 1e12)]


@pytest.mark.parametrize(("name", "seed", "rate"), CASES, ids=str)
def test_a_step_takes_no_longer_than_alone_and_no_less_than_its_busiest_stream(name, seed, rate) -> None:
    plan, pricer = drawn(name, seed, rate)
    alone = timeline_of(plan, pricer, plan.prefetch or 0)
    steady = steady_s(plan, pricer)
    assert steady <= alone.seconds * (1 + 1e-9)
    assert steady >= max(alone.busy_s.values()) * (1 - 1e-9)
    assert steady >= alone.seconds - alone.exposed_s.get(HOST, 0.0) - 1e-12


def test_without_parameters_on_the_host_a_step_is_what_it_is_alone() -> None:
    sampler = ResidenceSampler(family("gpt2").graph, mesh_of(2), H100)
    plan = replace(sampler.plan({}, {}, random.Random(0)), prefetch=2)
    alone = timeline_of(plan, sampler.pricer, prefetch=2)
    assert isclose(steady_s(plan, sampler.pricer), alone.seconds, rel_tol=1e-9) and not read_order(plan)


@pytest.mark.parametrize("rate", [1e8, 1e9, 1e10, 1e11, 1e12])
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_a_step_is_that_of_two_played_by_hand(name: str, rate: float) -> None:
    """The second of two steps, by rules of its own: queues, and when each parameter was updated."""
    plan, pricer = offloaded(name, rate)
    once = events_of(plan, pricer, 1)
    updates = {dict(event.about)["target"]: event.seconds for event in once if event.stream == HOST}
    parameter_of = {node.name: node.target for node in plan.graph.nodes if node.op == "parameter"}
    parameter_of |= {
        node.name: parameter_of[node.operands[0].name] for node in plan.graph.nodes if node.op == "autopar.fetch"
    }
    free, began, updated = {}, 0.0, dict.fromkeys(updates, 0.0)
    for _ in range(4):
        ends: list[float] = []
        for event in once:
            ready = [ends[other] for other in event.after if once[other].stream != HOST]
            start = max([began, free.get(event.stream, 0.0), *ready])
            if event.stream == FETCH:
                start = max(start, updated.get(parameter_of.get(dict(event.about)["node"]), 0.0))
            if event.phase == "backward" and event.stream == COMPUTE:
                start = max([start, *updated.values()])
            ends.append(start if event.stream == HOST else start + event.seconds)
            if event.stream != HOST:
                free[event.stream] = ends[-1]
        step_s, began = ends[-1] - began, ends[-1]
        arrived = max(ends[other] for event in once if event.stream == HOST for other in event.after)
        clock = max(arrived, *updated.values())
        for parameter in read_order(plan):
            clock += updates[parameter]
            updated[parameter] = clock
    assert isclose(steady_s(plan, pricer), step_s, rel_tol=1e-9)
    assert len(updates) == len(read_order(plan)) > 3


def test_the_host_updates_first_what_is_fetched_first() -> None:
    plan, _ = drawn("block", 2, 1e10)
    order, fetches = read_order(plan), [node for node in plan.graph.nodes if node.op == "autopar.fetch"]
    node_of = plan.graph.by_name
    read = [node_of[node.operands[0].name].target for node in fetches if node_of[node.operands[0].name].is_source]
    assert set(order) == set(hosted(plan.residence)) and [name for name in dict.fromkeys(read)] == list(order)


def test_where_nothing_runs_beside_compute_there_is_nothing_to_say() -> None:
    sampler = ResidenceSampler(family("mlp").graph, mesh_of(2), Hardware.load("cpu-gloo"))
    with pytest.raises(ValueError, match=r"profile cpu-gloo says that nothing overlaps with compute"):
        steady_s(sampler.draw(0), sampler.pricer)
