"""The events of real plans add up to what the plan says, and overlap lawfully."""

import math
import re
from collections import Counter, defaultdict
from dataclasses import replace
from math import isclose

import pytest

from autopar.decide.referee import refereed, unfilled
from autopar.emit import emit
from autopar.lower import lower
from autopar.lower.memory import holders, peaks
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.simulate.timeline import events_of, timeline_of
from cost_models.simulator import COMPUTE, Event, play
from tests.simulate.plans import CASES, best, called, drawn, repeated
from tests.support.families import FAMILIES
from tests.support.machines import machine

some_plans = pytest.mark.parametrize(("name", "sizes", "seed"), CASES, ids=str)


def sent(events: list[Event]) -> list[Event]:
    return [event for event in events if event.stream.startswith("comm:")]


# --- one after the other -------------------------------------------------------------------------------------------


def check_against_the_referee(plan: Plan, pricer: Pricer) -> None:
    """rel 1e-12: the same numbers, added in another order."""
    timeline = timeline_of(plan, pricer)
    assert isclose(timeline.seconds, plan.step_seconds, rel_tol=1e-12)
    memory = timeline.memory["hbm"]
    assert memory.peak_bytes == plan.peak_bytes["hbm"]
    program = lower(plan, None, pricer)
    assert peaks(program)["hbm"] == memory.peak_bytes and holders(program) == dict(memory.holders)
    assert memory.levels[0] == memory.levels[-1]


@some_plans
def test_without_overlap_a_random_plan_takes_and_holds_what_it_says(name, sizes, seed):
    check_against_the_referee(*drawn(name, sizes, seed))


@pytest.mark.parametrize("name", FAMILIES)
def test_without_overlap_the_best_plan_takes_and_holds_what_it_says(name):
    check_against_the_referee(*best(name, (2, 2)))


@some_plans
def test_without_overlap_each_part_takes_what_the_plan_says(name, sizes, seed):
    plan, pricer = drawn(name, sizes, seed)
    timeline = timeline_of(plan, pricer)
    for axis in plan.mesh.names:
        assert isclose(timeline.busy_s.get(f"comm:{axis}", 0.0), plan.seconds_by.get(f"comm:{axis}", 0.0), rel_tol=1e-9)
        assert isclose(
            timeline.exposed_s.get(f"comm:{axis}", 0.0), timeline.busy_s.get(f"comm:{axis}", 0.0), rel_tol=1e-9
        )
    parts = plan.seconds_by["compute"] + plan.seconds_by["reorder"] + plan.seconds_by["optimizer"]
    assert isclose(timeline.busy_s[COMPUTE], parts, rel_tol=1e-9)
    assert isclose(timeline.phase_seconds["optimizer"], plan.seconds_by["optimizer"], rel_tol=1e-6, abs_tol=1e-12)
    assert list(timeline.phase_seconds) == ["forward", "backward", "optimizer"]


@some_plans
def test_collectives_come_in_the_order_of_the_emitted_program(name, sizes, seed):
    plan, pricer = drawn(name, sizes, seed)
    program = emit(plan, {axis: axis for axis in plan.mesh.groups})
    assert program.backward is not None
    emitted: list[tuple[str, str]] = []
    for part in (program.forward, program.backward):
        for node in part.graph.nodes:
            called_as = re.sub(r"autopar\.(shift|mirror)", r"_c10d_functional.\1", str(node.target))
            target = called_as.removeprefix("_c10d_functional.").split(".")[0].removesuffix("_")
            if "_c10d_functional" in called_as and target != "wait_tensor":
                kind = target.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")
                emitted.append((kind, str(node.args[-1])))
    assert [called(event) for event in sent(events_of(plan, pricer))] == emitted


# --- side by side --------------------------------------------------------------------------------------------------


@some_plans
def test_with_overlap_the_same_work_is_done_within_its_bounds(name, sizes, seed):
    plan, pricer = drawn(name, sizes, seed)
    alone = timeline_of(plan, pricer)
    for prefetch in (0, 1, 3):
        timeline = timeline_of(plan, pricer, prefetch)
        assert Counter(map(called, sent(list(timeline.events)))) == Counter(map(called, sent(list(alone.events))))
        for stream, busy in alone.busy_s.items():
            assert isclose(timeline.busy_s[stream], busy, rel_tol=1e-9)
        assert max(timeline.busy_s.values()) <= timeline.seconds * (1 + 1e-12)
        assert timeline.seconds <= alone.seconds * (1 + 1e-12)
        assert timeline.memory["hbm"].levels[0] == timeline.memory["hbm"].levels[-1] == alone.memory["hbm"].levels[0]
        assert min(timeline.memory["hbm"].levels) >= 0


@some_plans
def test_values_are_ready_before_they_are_read(name, sizes, seed):
    """Every operator starts when its operands, and every update when its gradient, have been made and brought there."""
    plan, pricer = drawn(name, sizes, seed)
    timeline = timeline_of(plan, pricer, 2)
    made: dict[str, float] = defaultdict(float)
    brought: dict[tuple[str, str], float] = defaultdict(float)
    runs: dict[str, float] = {}
    for event, start, end in zip(timeline.events, timeline.starts, timeline.ends, strict=True):
        about = dict(event.about)
        if "value" in about:
            key = str(about["value"]), str(about.get("reader", about.get("result")))
            assert start >= made[key[0]], event
            brought[key] = max(brought[key], end)
        elif "node" in about and event.phase != "optimizer" and event.seconds:
            node = str(about["node"])
            runs.setdefault(node, start)
            made[node] = max(made[node], end)
        elif event.phase == "optimizer" and event.name.startswith("update"):
            runs[event.name] = start
    for node in plan.graph.nodes:
        for ref in node.operands:
            if node.name in runs:
                assert runs[node.name] >= max(made[ref.name], brought[ref.name, node.name]), (node.name, ref)
    for result in plan.graph.results:
        if result.target in {node.target for node in plan.graph.trained} and result.ref is not None:
            arrived = max(made[result.ref.name], brought[result.ref.name, f"gradient {result.target}"])
            assert runs[f"update {result.target}"] >= arrived, result.target


@some_plans
def test_a_collective_starts_after_the_kernels_issued_before_it(name, sizes, seed):
    plan, pricer = drawn(name, sizes, seed)
    timeline = timeline_of(plan, pricer, prefetch=1)
    kernels_end = 0.0
    for event, start, end in zip(timeline.events, timeline.starts, timeline.ends, strict=True):
        if event.stream == COMPUTE:
            kernels_end = end
        else:
            assert start >= kernels_end, event


def test_faster_links_never_make_a_step_slower():
    for name, sizes, seed in CASES[::5]:
        plan, _ = drawn(name, sizes, seed)
        steps = [
            timeline_of(
                plan, Pricer.on(plan.mesh, machine(link, memory=1e11), plan.optimizer, plan.bucket_bytes), prefetch=1
            ).seconds
            for link in (1e9, 1e10, 1e11, 1e15)
        ]
        assert steps == sorted(steps, reverse=True), (name, sizes, seed)


@pytest.mark.parametrize("bucket_bytes", [3000, 1 << 20])
@some_plans
def test_rows_of_gradients_keep_a_step_within_its_bounds(name, sizes, seed, bucket_bytes):
    plan, pricer = drawn(name, sizes, seed)
    pricer = replace(pricer, bucket_bytes=bucket_bytes)
    plan = refereed(
        plan.graph, plan.choices, plan.deliveries, pricer, objective=None, bound=0.0, memory=None, outputs="sharded"
    )
    beyond = unfilled(lower(plan, None, pricer), pricer)  # a bucket's waiting
    for prefetch in (0, 2):
        timeline = timeline_of(plan, pricer, prefetch)
        assert timeline.seconds <= (plan.step_seconds + sum(beyond.values())) * (1 + 1e-12)
        for axis in plan.mesh.names:
            busy = plan.seconds_by.get(f"comm:{axis}", 0.0) + beyond.get(axis, 0.0)
            assert isclose(timeline.busy_s.get(f"comm:{axis}", 0.0), busy, rel_tol=1e-9, abs_tol=1e-15)
            assert busy <= timeline.seconds * (1 + 1e-12)
        assert timeline.memory["hbm"].levels[0] == timeline.memory["hbm"].levels[-1]


def test_a_prefetch_below_zero_is_refused():
    with pytest.raises(ValueError, match="prefetch is -1"):
        events_of(*drawn("mlp", (2,), 0), prefetch=-1)


@pytest.mark.parametrize("prefetch", [None, 1])
def test_twenty_thousand_nodes_are_played(prefetch):
    plan, pricer = drawn("llama", (2, 2), 0)
    large = repeated(plan, pricer, math.ceil(20_000 / len(plan.graph.nodes)))
    assert len(large.graph.nodes) >= 20_000
    timeline = play(events_of(large, pricer, prefetch))
    assert len(timeline.events) > 20_000
    assert timeline.seconds == pytest.approx(large.step_seconds) or (prefetch and timeline.seconds < large.step_seconds)
    if prefetch is None:
        assert timeline.memory["hbm"].peak_bytes == large.peak_bytes["hbm"]


def test_the_two_modes_agree_where_nothing_is_sent():
    plan, pricer = best("gpt2", (2,))
    assert not plan.comm_bytes, "the test wants a plan that sends nothing"
    assert timeline_of(plan, pricer, prefetch=1).seconds == timeline_of(plan, pricer).seconds
