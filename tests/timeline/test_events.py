"""The events of real plans add up to what the plan says, come in the order of the program, and overlap lawfully."""

import math
import time
from collections import Counter, defaultdict
from functools import cache
from math import isclose

import pytest

from autopar.decide import Referee, peak_of
from autopar.emit import emit
from autopar.plan import Plan
from autopar.price import Pricer
from autopar.search import search
from autopar.timeline import events_of, timeline_of
from cost_models.simulator import COMPUTE, Event, play
from tests.support.check import mesh_of
from tests.support.families import FAMILIES, family
from tests.support.machines import machine
from tests.timeline.plans import best, drawn, repeated

SMALL, LARGE = ("mlp", "block", "cnn"), tuple(sorted(set(FAMILIES) - {"mlp", "block", "cnn"}))
CASES = [(name, sizes, seed) for name in SMALL for sizes in ((2,), (2, 2)) for seed in range(8)]
CASES += [(name, (2, 2), 1) for name in LARGE]
some_plans = pytest.mark.parametrize(("name", "sizes", "seed"), CASES, ids=str)


@cache
def fsdp(name: str) -> tuple[Plan, Pricer]:
    """Parameters in pieces, gathered for each use, on a machine where that takes about as long as the products."""
    mesh, hardware = mesh_of(2), machine(3e9, flops=1e12, memory=1e12)
    plan = search(family(name).graph, mesh, hardware, memory=None, policy="fsdp", tied=False)
    return plan, Pricer.on(mesh, hardware, plan.optimizer, plan.bucket_bytes)


def sent(events: list[Event]) -> list[Event]:
    return [event for event in events if event.stream.startswith("comm:")]


def called(event: Event) -> tuple[str, str]:
    about = dict(event.about)
    return str(about["collective"]), str(about["axis"])


# --- one after the other -------------------------------------------------------------------------------------------


def check_against_the_referee(plan: Plan, pricer: Pricer) -> None:
    """rel 1e-12: the same numbers, added in another order."""
    timeline = timeline_of(plan, pricer)
    assert isclose(timeline.seconds, plan.step_seconds, rel_tol=1e-12)
    memory = timeline.memory["hbm"]
    assert memory.peak_bytes == plan.peak_bytes["hbm"]
    holdings = Referee(plan.graph, plan.choices, plan.deliveries, pricer).holdings()
    _, at = peak_of(holdings)
    held: Counter[str] = Counter()
    for holding in holdings:
        if holding.start <= at < holding.end:
            held[holding.tenant] += holding.nbytes
    assert dict(memory.holders) == held
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
    parts = plan.seconds_by["compute"] + plan.seconds_by["copies"] + plan.seconds_by["optimizer"]
    assert isclose(timeline.busy_s[COMPUTE], parts, rel_tol=1e-9)
    assert isclose(timeline.phase_seconds["optimizer"], plan.seconds_by["optimizer"], rel_tol=1e-6, abs_tol=1e-12)
    assert list(timeline.phase_seconds) == ["forward", "backward", "optimizer"]


@some_plans
def test_collectives_come_in_the_order_of_the_emitted_program(name, sizes, seed):
    plan, pricer = drawn(name, sizes, seed)
    program = emit(plan, {axis: axis for axis in plan.mesh.names})
    assert program.backward is not None
    emitted: list[tuple[str, str]] = []
    for part in (program.forward, program.backward):
        for node in part.graph.nodes:
            target = str(node.target).removeprefix("_c10d_functional.").split(".")[0]
            if "_c10d_functional" in str(node.target) and target != "wait_tensor":
                kind = target.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")
                emitted.append((kind, str(node.args[-1])))
    assert [called(event) for event in sent(events_of(plan, pricer))] == emitted


# --- side by side --------------------------------------------------------------------------------------------------


@some_plans
def test_with_overlap_the_same_work_is_done_within_its_bounds(name, sizes, seed):
    plan, pricer = drawn(name, sizes, seed)
    alone = timeline_of(plan, pricer)
    for prefetch in (0, 1, 3):
        timeline = timeline_of(plan, pricer, overlap=True, prefetch=prefetch)
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
    timeline = timeline_of(plan, pricer, overlap=True, prefetch=2)
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
        if result.kind == "gradient" and result.ref is not None:
            arrived = max(made[result.ref.name], brought[result.ref.name, f"gradient {result.target}"])
            assert runs[f"update {result.target}"] >= arrived, result.target


@some_plans
def test_a_collective_starts_after_the_kernels_issued_before_it(name, sizes, seed):
    plan, pricer = drawn(name, sizes, seed)
    timeline = timeline_of(plan, pricer, overlap=True)
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
                plan, Pricer.on(plan.mesh, machine(link, memory=1e11), plan.optimizer, plan.bucket_bytes), overlap=True
            ).seconds
            for link in (1e9, 1e10, 1e11, 1e15)
        ]
        assert steps == sorted(steps, reverse=True), (name, sizes, seed)


@pytest.mark.parametrize("name", ["block", "gpt2", "llama"])
def test_the_reduction_of_a_gradient_is_waited_for_by_the_optimizer_alone(name):
    events = events_of(*fsdp(name), overlap=True)
    reductions = {
        n for n, event in enumerate(events) if str(dict(event.about).get("result", "")).startswith("gradient")
    }
    comms = {number for number in reductions if events[number].stream != COMPUTE}
    assert comms
    for number, event in enumerate(events):
        if event.phase != "optimizer" and number not in reductions:
            assert not comms & set(event.after), event


@pytest.mark.parametrize("name", ["block", "gpt2", "llama"])
def test_gathers_launched_ahead_hide_behind_products_and_hold_memory_for_longer(name):
    plan, pricer = fsdp(name)
    late, early = (timeline_of(plan, pricer, overlap=True, prefetch=prefetch) for prefetch in (0, 1))
    assert early.seconds < late.seconds < timeline_of(plan, pricer).seconds
    assert early.exposed_s["comm:a"] < late.exposed_s["comm:a"]

    def held(timeline) -> float:
        memory = timeline.memory["hbm"]
        spans = zip(memory.times, memory.times[1:], memory.levels, strict=False)
        return sum((end - begin) * (level - memory.levels[0]) for begin, end, level in spans) / timeline.seconds

    assert held(early) > held(late)


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_gathers_are_launched_that_many_products_ahead(prefetch):
    """Counted in the events themselves: between a gather and its reader, so many operators on matrix units begin."""
    plan, pricer = fsdp("llama")
    node_of = plan.graph.by_name
    products: list[tuple[int, str]] = []
    gathers: dict[int, str] = {}
    reads: dict[str, int] = {}
    events = events_of(plan, pricer, overlap=True, prefetch=prefetch)
    for number, event in enumerate(events):
        about = dict(event.about)
        if event.stream != COMPUTE and "reader" in about and node_of[str(about["value"])].op == "parameter":
            gathers[number] = str(about["reader"])
        elif event.stream == COMPUTE and "value" not in about and event.phase != "optimizer":
            node = str(about.get("node", ""))
            reads.setdefault(node, number)
            if about.get("op") == "autopar.einsum" or "attention" in str(about.get("op")):
                products.append((number, event.phase))
    assert gathers
    for number, reader in gathers.items():
        phase = events[number].phase
        between = sum(number < place < reads[reader] for place, when in products if when == phase)
        ahead = sum(place < reads[reader] for place, when in products if when == phase)
        assert between == min(prefetch, ahead), (reader, between)


def test_a_prefetch_below_zero_is_refused():
    with pytest.raises(ValueError, match="prefetch is -1"):
        events_of(*drawn("mlp", (2,), 0), prefetch=-1)


@pytest.mark.parametrize("overlap", [False, True])
def test_twenty_thousand_nodes_take_at_most_five_seconds(overlap):
    plan, pricer = drawn("llama", (2, 2), 0)
    large = repeated(plan, pricer, math.ceil(20_000 / len(plan.graph.nodes)))
    assert len(large.graph.nodes) >= 20_000
    started = time.process_time()
    timeline = play(events_of(large, pricer, overlap=overlap))
    assert time.process_time() - started < 5
    assert len(timeline.events) > 20_000
    if not overlap:
        assert timeline.memory["hbm"].peak_bytes == large.peak_bytes["hbm"]


def test_the_two_modes_agree_where_nothing_is_sent():
    plan, pricer = best("gpt2", (2,))
    assert not plan.comm_bytes, "the test wants a plan that sends nothing"
    assert timeline_of(plan, pricer, overlap=True).seconds == timeline_of(plan, pricer).seconds
