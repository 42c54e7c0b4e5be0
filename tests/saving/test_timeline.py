"""Events of plans with copies between device and host: they add up to what the plan says, in the program's order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from math import isclose

import pytest

from autopar.decide.referee import refereed, unfilled
from autopar.emit import emit
from autopar.lower import lower
from autopar.lower.memory import changes, peaks
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.simulate.timeline import events_of, timeline_of
from cost_models.hardware import Hardware
from cost_models.simulator import COMPUTE
from cost_models.steps import Compute, Move
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.residence import ResidenceSampler, hosted

CASES = [
    (name, sizes, machine, seed)
    for name, count in (("mlp", 6), ("block", 3), ("cnn", 3), ("gpt2", 1))
    for sizes in ((2,), (2, 2))
    for machine in ("h100-sxm", "cpu-gloo")
    for seed in range(count)
]
some_plans = pytest.mark.parametrize(("name", "sizes", "machine", "seed"), CASES, ids=str)


@cache
def drawn(name: str, sizes: tuple[int, ...], machine: str, seed: int) -> tuple[Plan, Pricer]:
    sampler = ResidenceSampler(family(name).graph, mesh_of(*sizes), Hardware.load(machine))
    return sampler.draw(seed), sampler.pricer


@some_plans
def test_without_overlap_a_plan_takes_and_holds_what_it_says(name, sizes, machine, seed) -> None:
    plan, pricer = drawn(name, sizes, machine, seed)
    timeline = timeline_of(plan, pricer)
    assert isclose(timeline.seconds, plan.step_seconds, rel_tol=1e-12)
    held = peaks(lower(plan, None, pricer))
    assert timeline.memory.keys() == plan.peak_bytes.keys()
    for tier, memory in timeline.memory.items():
        assert memory.peak_bytes == plan.peak_bytes[tier] == held[tier]
        assert memory.levels[0] == memory.levels[-1]
    for stream in ("h2d", "d2h"):
        assert isclose(timeline.busy_s.get(stream, 0.0), plan.seconds_by.get(stream, 0.0), rel_tol=1e-9)


@some_plans
def test_with_overlap_the_same_work_is_done_within_its_bounds(name, sizes, machine, seed) -> None:
    plan, pricer = drawn(name, sizes, machine, seed)
    for bucket_bytes in (0, 3000):
        pricer = replace(pricer, bucket_bytes=bucket_bytes)
        priced = refereed(
            plan.graph, plan.choices, plan.deliveries, pricer, objective=None, bound=0.0, memory=None,
            outputs="sharded", residence=plan.residence,
        )  # fmt: skip
        alone = timeline_of(priced, pricer)
        beyond = unfilled(lower(priced, None, pricer), pricer)  # buckets' waiting
        for prefetch in (0, 2):
            timeline = timeline_of(priced, pricer, prefetch=prefetch)
            assert timeline.seconds <= (priced.step_seconds + sum(beyond.values())) * (1 + 1e-12)
            assert timeline.busy_s.keys() == alone.busy_s.keys()
            for stream, busy in alone.busy_s.items():
                assert isclose(timeline.busy_s[stream], busy, rel_tol=1e-9)
            for tier, memory in timeline.memory.items():
                assert memory.levels[0] == memory.levels[-1] == alone.memory[tier].levels[0]
                assert min(memory.levels) >= 0


def played(plan: Plan, pricer: Pricer, prefetch: int) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    number_of: dict[int, int] = {}
    for place, event in enumerate(events_of(plan, pricer, prefetch)):
        if event.phase == "optimizer":
            continue
        if event.stream != COMPUTE:
            number_of[place] = len(number_of)
            found.append(("launch", dict(event.about).get("collective") or event.name.split()[0]))
        elif event.name.startswith("wait for"):
            found.append(("wait", number_of[event.after[0]]))
    return found


def emitted(plan: Plan) -> list[tuple[str, object]]:
    program = emit(plan, {axis: axis for axis in plan.mesh.groups})
    assert program.backward is not None
    found: list[tuple[str, object]] = []
    number_of: dict[object, int] = {}
    for node in (*program.forward.graph.nodes, *program.backward.graph.nodes):
        library, _, op = str(node.target).partition(".")
        op = op.split(".")[0].removesuffix("_")
        if op in ("wait_tensor", "wait_copy"):
            found.append(("wait", number_of[node.args[0]]))
        elif library == "_c10d_functional" or (library == "autopar" and op in ("store", "fetch", "shift", "mirror")):
            number_of[node] = len(number_of)
            found.append(("launch", op.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")))
    return found


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@some_plans
def test_what_is_played_is_launched_and_waited_for_as_in_the_program(name, sizes, machine, seed, prefetch) -> None:
    plan, pricer = drawn(name, sizes, machine, seed)
    assert played(plan, pricer, prefetch) == emitted(replace(plan, prefetch=prefetch))


@some_plans
def test_prices_of_a_parameter_are_those_of_its_residence(name, sizes, machine, seed) -> None:
    """Each part of the step by hand, from the steps of the graph and one formula for updates."""
    plan, pricer = drawn(name, sizes, machine, seed)
    moved: Counter[str] = Counter()
    for node in plan.graph.nodes:
        for step in plan.choices[node.name].steps:
            if isinstance(step, Move):
                moved["h2d" if step.dst == "hbm" else "d2h"] += pricer.seconds((step,))  # type: ignore[assignment]
    updates = 0.0
    for result in plan.graph.results:
        if result.kind == "gradient" and result.ref is not None:
            (node,) = (n for n in plan.graph.nodes if n.op == "parameter" and n.target == result.target)
            nbytes = pricer.local_bytes(plan.graph.type_of(result.ref), plan.choices[node.name].gives[0])
            where = plan.residence.get(result.target, "device")
            for step in pricer.update_steps(nbytes, plan.graph.type_of(result.ref).dtype, where):
                if isinstance(step, Compute):
                    updates += pricer.seconds((step,))
                    assert (step.kind == "host") == (where == "host")
                else:
                    assert isinstance(step, Move)
                    moved["h2d" if step.dst == "hbm" else "d2h"] += pricer.seconds((step,))  # type: ignore[assignment]
    assert isclose(plan.seconds_by["optimizer"], updates, rel_tol=1e-9)
    for way in ("h2d", "d2h"):
        assert isclose(plan.seconds_by.get(way, 0.0), moved[way], rel_tol=1e-9)


@some_plans
def test_what_lies_on_the_host_is_told(name, sizes, machine, seed) -> None:
    plan, pricer = drawn(name, sizes, machine, seed)
    program = lower(plan, None, pricer)
    buffers = [*program.resident, *(buffer for _, buffer, _ in changes(program))]
    tenants = {(buffer.owner, buffer.tier) for buffer in buffers}
    for name_of in hosted(plan.residence):
        assert (f"parameter {name_of}", "host") in tenants and (f"parameter {name_of}", "hbm") not in tenants
        assert (f"gradient of {name_of}", "host") in tenants
        assert (f"optimizer states of {name_of}", "host") in tenants
    for name_of, where in plan.residence.items():
        if where == "stream":
            assert (f"parameter {name_of}", "hbm") in tenants and (f"streamed states of {name_of}", "hbm") in tenants
            assert (f"optimizer states of {name_of}", "hbm") not in tenants
