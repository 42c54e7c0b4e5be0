"""The search by simulated time: never worse than what it was chosen among, always within memory, and the same twice."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from autopar.assemble.problem import assemble
from autopar.decide.decide import refereed
from autopar.ir.graph import Node
from autopar.ir.mesh import Mesh
from autopar.ir.work import STORE
from autopar.plan import Plan
from autopar.plan.store import dumps
from autopar.price.pricer import Pricer
from autopar.rewrite import is_gathered_once
from autopar.rules.patterns import PATTERNS
from autopar.search import Question, Request, answer, ask
from autopar.search.__main__ import main
from autopar.search.baselines import compare, table
from autopar.search.overlap_loop import ONCE, best_prefetch, choose, floor_s
from autopar.search.policies import policies_for
from autopar.simulate.timeline import timeline_of
from cost_models.hardware import Hardware, HostLink
from cost_models.steps import Comm
from tests.support.check import difference, mesh_of
from tests.support.families import family
from tests.support.machines import machine
from tests.support.plans import PlanSampler

H100 = Hardware.load("h100-sxm")
# Products are slow enough to hide gathers behind, and links too slow to wait for them.
HIDES = replace(machine(1e9, flops=1e10, memory=1e12), name="hides", overlaps=True)
EVEN = replace(machine(3e9, flops=1e11, memory=1e12), name="even", overlaps=True)
CASES = [
    ("mlp", (2,), HIDES), ("block", (2,), HIDES), ("gpt2", (2,), HIDES), ("gpt2", (2,), EVEN), ("block", (2, 2), EVEN),
    ("block", (2,), H100),
]  # fmt: skip
some = pytest.mark.parametrize(
    ("name", "sizes", "hardware"), CASES, ids=lambda value: getattr(value, "name", str(value))
)


@cache
def question(name: str, sizes: tuple[int, ...], hardware: Hardware) -> Question:
    return ask(family(name).graph, mesh_of(*sizes), hardware)


@cache
def plans(name: str, sizes: tuple[int, ...], hardware: Hardware) -> tuple[Plan, Plan]:
    """By the sum, and by simulation."""
    asked = question(name, sizes, hardware)
    return answer(asked), answer(asked, Request(simulation=True))


def played_s(plan: Plan, pricer: Pricer) -> float:
    if plan.prefetch is None:
        return plan.step_seconds
    return timeline_of(plan, replace(pricer, bucket_bytes=plan.bucket_bytes), prefetch=plan.prefetch).seconds


@some
def test_the_plan_is_as_quick_as_the_quickest_of_the_least_sum_and_the_baselines(name, sizes, hardware):
    least_sum, plan = plans(name, sizes, hardware)
    pricer = question(name, sizes, hardware).pricer
    assert plan.simulated_seconds is not None
    assert plan.simulated_seconds <= best_prefetch(least_sum, pricer, None).seconds * (1 + 1e-9)
    for policy in policies_for(plan.mesh):
        baseline = answer(question(name, sizes, hardware), Request(policy=policy))
        assert plan.simulated_seconds <= best_prefetch(baseline, pricer, None).seconds * (1 + 1e-9), policy


def test_somewhere_it_is_quicker_than_all_of_them():
    gains = []
    for case in CASES:
        least_sum, plan = plans(*case)
        asked = question(*case)
        rivals = [least_sum, *(answer(asked, Request(policy=policy)) for policy in policies_for(plan.mesh))]
        gains.append(min(best_prefetch(rival, asked.pricer, None).seconds for rival in rivals) / plan.predicted_seconds)
    assert max(gains) > 1.02, gains


def test_gathers_that_hide_cost_no_time_so_parameters_may_stay_in_pieces():
    """Where nothing is short but the link, FSDP's traffic is the larger; hidden, that does not matter."""
    gains = {case: plans(*case)[1].step_seconds / plans(*case)[0].step_seconds for case in CASES}
    assert max(gains.values()) > 1, "no plan was chosen against the sum"


@some
def test_what_the_plan_says_of_itself_is_true(name, sizes, hardware):
    least_sum, plan = plans(name, sizes, hardware)
    pricer = replace(question(name, sizes, hardware).pricer, bucket_bytes=plan.bucket_bytes)
    again = refereed(
        plan.graph, plan.choices, plan.deliveries, pricer,
        objective=plan.step_seconds, bound=plan.bound, memory=None, outputs="sharded",
    )  # fmt: skip
    assert again.step_seconds == plan.step_seconds and again.seconds_by == plan.seconds_by
    assert played_s(plan, pricer) == plan.simulated_seconds
    assert plan.simulated_seconds <= plan.step_seconds
    assert plan.simulated_seconds >= floor_s(plan) * (1 - 1e-12)
    if plan.bound != least_sum.bound:  # of a wider space, too, which is searched where plans are simulated
        once = next(one for one in plan.candidates if one.name == ONCE)
        assert plan.bound < least_sum.bound and plan.bound <= once.step_seconds
    assert plan.bound <= plan.step_seconds
    if plan.search["candidate"] != "optimum without overlap":
        assert any("above the best plan" in note for note in plan.notes)
    row = next(one for one in plan.candidates if one.name == plan.search["candidate"])
    assert (row.simulated_seconds, row.prefetch) == (plan.simulated_seconds, plan.prefetch)
    assert row.simulated_seconds == min(
        one.simulated_seconds for one in plan.candidates if one.simulated_seconds is not None
    )


@pytest.mark.parametrize("name", ["block", "gpt2"])
@pytest.mark.parametrize("share", [1.0, 0.97, 0.94, 0.9])
def test_the_plan_fits_with_what_is_in_flight(name, share):
    asked = question(name, (2,), HIDES)
    roomy = plans(name, (2,), HIDES)[1].peak_bytes["hbm"]
    plan = answer(asked, Request(memory=share * roomy, simulation=True))
    assert plan.peak_bytes["hbm"] <= share * roomy
    pricer = replace(asked.pricer, bucket_bytes=plan.bucket_bytes)
    if plan.prefetch is not None:
        timeline = timeline_of(plan, pricer, prefetch=plan.prefetch)
        assert timeline.memory["hbm"].peak_bytes <= plan.peak_bytes["hbm"]


def test_gathering_ahead_is_left_out_where_it_does_not_fit():
    plan = answer(question("gpt2", (2,), HIDES), Request(policy="fsdp"))
    pricer = question("gpt2", (2,), HIDES).pricer
    needs = best_prefetch(plan, pricer, None)
    assert needs.plan.prefetch and needs.peak_bytes > plan.peak_bytes["hbm"]
    tight = best_prefetch(plan, pricer, needs.peak_bytes - 1)
    assert tight.peak_bytes < needs.peak_bytes and tight.seconds >= needs.seconds
    none = best_prefetch(plan, pricer, plan.peak_bytes["hbm"])
    assert none.peak_bytes == plan.peak_bytes["hbm"]


def test_the_same_question_gives_the_same_plan():
    first, second = (
        answer(ask(family("gpt2").graph, mesh_of(2), HIDES), Request(simulation=True)) for _ in range(2)
    )  # fmt: skip
    assert dumps(first) == dumps(second)


def test_where_communication_takes_the_processors_nothing_is_fetched_ahead():
    asked = ask(family("block").graph, mesh_of(2), replace(HIDES, overlaps=False))
    plan, least_sum = answer(asked, Request(simulation=True)), answer(asked)
    assert plan.prefetch is None and all(one.prefetch is None for one in plan.candidates)
    assert plan.predicted_seconds == plan.step_seconds <= least_sum.step_seconds
    assert {one.name for one in plan.candidates} == {
        "optimum without overlap",
        *policies_for(mesh_of(2), once=True),
        ONCE,
    }
    assert plan.simulated_seconds <= least_sum.simulated_seconds
    assert not Hardware.load("cpu-gloo").overlaps and H100.overlaps


def test_a_row_of_gradients_that_is_not_full_waits_as_long_as_a_full_one():
    """All gradients of a data-parallel plan travel in one row, of which they fill a third."""
    asked = ask(family("block").graph, mesh_of(2), replace(HIDES, overlaps=False))
    found = answer(asked, Request(policy="data-parallel"))
    sizes = [
        delivery.changes[0].local.nbytes
        for result, delivery in zip(found.graph.results, found.deliveries, strict=True)
        if result.kind == "gradient" and delivery is not None and delivery.changes
    ]
    pricer = replace(asked.pricer, bucket_bytes=3 * sum(sizes))
    plan = refereed(
        found.graph, found.choices, found.deliveries, pricer, objective=None, bound=0.0, memory=None, outputs="sharded"
    )
    row_s, full_s = (
        pricer.seconds((Comm("all_reduce", *found.mesh.names, 2, nbytes),)) for nbytes in (sum(sizes), 3 * sum(sizes))
    )
    assert row_s > full_s / 3 and plan.simulated_seconds is not None
    assert plan.simulated_seconds - plan.step_seconds == pytest.approx(row_s - full_s / 3, rel=1e-6)
    assert plan.predicted_seconds == plan.simulated_seconds


def test_one_rank_sends_nothing_and_is_not_simulated():
    plan = answer(ask(family("mlp").graph, Mesh(("a",), (1,)), HIDES), Request(simulation=True))
    assert plan.simulated_seconds is None


def test_one_rank_that_copies_to_its_host_and_back_is_simulated():
    """As with collectives: what is copied ahead hides behind compute."""
    asked = ask(family("llama").graph, Mesh(("a",), (1,)), replace(EVEN, host_link=HostLink(3e9, 3e9)))
    memory = 0.7 * answer(asked).peak_bytes["hbm"]
    request = Request(memory=memory, allow=("offload-activations", "offload-parameters"))
    in_sum, plan = answer(asked, request), answer(asked, replace(request, simulation=True))
    assert in_sum.residence or any(node.op == STORE for node in in_sum.graph.nodes)
    assert plan.simulated_seconds is not None and plan.prefetch
    assert plan.predicted_seconds == plan.simulated_seconds < in_sum.step_seconds
    assert timeline_of(plan, asked.pricer, prefetch=plan.prefetch).memory["hbm"].peak_bytes <= memory


@some
def test_no_plan_computes_for_less_than_the_bound_of_simulated_time(name, sizes, hardware):
    """Not the plans of any kind: those of the search, random ones, those that recompute."""
    asked = question(name, sizes, hardware)
    plan = plans(name, sizes, hardware)[1]
    assert 0 < plan.simulated_bound <= plan.simulated_seconds
    sampler = PlanSampler(family(name).graph, mesh_of(*sizes), hardware)
    drawn = [sampler.draw(seed) for seed in range(5)]
    for policy in ("zero2", "checkpoint-every-block", "zero3-offload"):
        drawn.append(answer(asked, Request(policy=policy)))
    for one in drawn:
        assert one.seconds_by["compute"] >= plan.simulated_bound * (1 - 1e-9)
        assert timeline_of(one, asked.pricer, prefetch=2).seconds >= plan.simulated_bound * (1 - 1e-9)


@some
def test_the_file_gives_back_the_plan(name, sizes, hardware):
    plan = plans(name, sizes, hardware)[1]
    assert Plan.loads(dumps(plan), "test") == plan


@some
def test_the_text_says_why(name, sizes, hardware):
    plan = plans(name, sizes, hardware)[1]
    text = plan.explain()
    assert f"step time {plan.predicted_seconds * 1e3:.3f} ms" in text
    assert "why this plan" in text and "(this plan)" in text
    for one in plan.candidates:
        assert f"  {one.name}" in text
    assert len(text.splitlines()) <= 48 and "..." not in "".join(re.findall("(?m)^note.*", text))


def test_beside_the_baselines_the_plan_stays_the_best():
    asked = question("gpt2", (2,), HIDES)
    plan = plans("gpt2", (2,), HIDES)[1]
    rows = compare(asked, plan, Request(memory=None, outputs="sharded", time_limit_s=60.0))
    assert all(row.plan is None or row.plan.simulated_seconds is not None for row in rows)
    assert f"{plan.predicted_seconds * 1e3:.3f}" in table(plan, rows)


@pytest.mark.parametrize(("name", "sizes"), [("mlp", (2,)), ("gpt2", (2,)), ("block", (2, 2))])
def test_the_plan_computes_what_the_model_computes(name, sizes):
    case = family(name)
    plan = answer(ask(case.wide_graph, mesh_of(*sizes), HIDES), Request(simulation=True))
    assert plan.prefetch is not None
    off, where = difference(plan, case)
    assert off <= 1e-9, where


# --- prices that are scaled ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "sizes"), [("block", (2,)), ("gpt2", (2, 2))])
def test_at_full_price_nothing_changes_and_at_a_discount_only_communication_of_parameters_does(name, sizes):
    sampler = PlanSampler(family(name).graph, mesh_of(*sizes), H100)
    keys = [(kind, axis) for kind in ("weights", "gradients") for axis in sampler.pricer.mesh.names]
    problem = sampler.assembled.problem
    # sends within a loop are priced beside its work, whatever the shares
    loops = [np.array([one.body in PATTERNS for one in options]) for options in sampler.assembled.options]
    for share in (1.0, 0.1):
        found = assemble(
            sampler.graph, sampler.strategies, sampler.pricer, memory=None, shares=dict.fromkeys(keys, share)
        ).problem
        assert (
            all((a == b)[~loop].all() for a, b, loop in zip(found.costs, problem.costs, loops, strict=True))
            and found.limits == problem.limits
        )
        changed = 0
        for before, after in zip(problem.edges, found.edges, strict=True):
            assert (before.src, before.dst) == (after.src, after.dst)
            finite = before.cost < float("inf")
            assert (finite == (after.cost < float("inf"))).all()
            assert (after.cost[finite] <= before.cost[finite] + 1e-12).all()
            assert (after.cost[finite] >= share * before.cost[finite] - 1e-12).all()
            changed += bool((abs(after.cost[finite] - before.cost[finite]) > 1e-12).any())
        assert (changed > 0) == (share < 1)


def test_what_is_fetched_ahead_is_left_free_in_the_next_plan():
    asked = question("gpt2", (2,), HIDES)
    plan = answer(asked, Request(policy="fsdp"))
    limit = plan.peak_bytes["hbm"]
    played = best_prefetch(plan, asked.pricer, limit)
    assert played.wished is not None and played.wished.seconds < played.seconds
    assert played.lacks == played.wished.memory["hbm"].peak_bytes - limit > 0
    frees = []

    def again(shares, free):
        frees.append(free)
        return None

    assert choose(plan, asked.pricer, limit, {}, again, lambda: "not asked").predicted_seconds == played.seconds
    assert frees == [played.lacks]


def test_pricing_again_ends_where_a_plan_comes_back():
    asked = question("gpt2", (2,), HIDES)
    least_sum, _ = plans("gpt2", (2,), HIDES)
    calls = []

    def again(shares, free):
        calls.append(shares)
        assert free == 0.0 and all(0 < share <= 1 for share in shares.values())
        return least_sum

    plan = choose(least_sum, asked.pricer, None, {}, again, lambda: "not asked")
    assert len(calls) <= 1 and plan.search["candidate"] == "optimum without overlap"


def test_the_command_simulates_unless_told_not_to(tmp_path, capsys):
    model = Path(__file__).parent.parent.parent / "examples" / "mlp.py"
    given = [f"{model}:build", "--mesh", "data=2", "--hardware", "h100-sxm", "--quiet", "--json"]
    found = []
    for more in ([], ["--no-simulation"]):
        assert main([*given, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    simulated, plain = found
    assert plain["simulated_seconds"] is None and not plain["candidates"] and plain["prefetch"] is None
    assert simulated["simulated_seconds"] <= plain["step_seconds"] <= simulated["step_seconds"] * (1 + 1e-6)
    assert {"optimum without overlap", "data-parallel", "fsdp", "tensor-parallel"} <= {
        one["name"] for one in simulated["candidates"]
    }


def test_the_text_says_simulated_where_the_object_has_a_simulated_time(capsys):
    model = Path(__file__).parent.parent.parent / "examples" / "mlp.py"
    given = [f"{model}:build", "--mesh", "data=2", "--hardware", "h100-sxm", "--quiet", "--baselines"]
    for more in ([], ["--no-simulation"]):
        assert main([*given, *more]) == 0
        text = capsys.readouterr().out
        assert main([*given, *more, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert ("predicted (simulated)" in text) == (told["simulated_seconds"] is not None)
        assert ("predicted (summed)" in text) == (told["simulated_seconds"] is None)
        assert all((row.get("simulated_seconds") is None) == bool(more) for row in told["baselines"] if row["fits"])


def test_some_weights_are_gathered_once_where_links_are_slow_and_memory_is_short():
    """For the others each reader gathers, as in fsdp; neither all of one kind nor all of the other is as quick."""
    slow = replace(machine(1e9, flops=1e11, memory=1e12), name="slow", overlaps=False)
    asked = ask(family("gpt2").graph, mesh_of(2), slow)
    limit = 0.9 * answer(asked, Request(simulation=True)).peak_bytes["hbm"]
    plan = answer(asked, Request(memory=limit, allow=(), simulation=True))
    assert plan.search["candidate"] == ONCE and plan.peak_bytes["hbm"] <= limit
    assert all(
        row.simulated_seconds is None or row.simulated_seconds >= plan.predicted_seconds for row in plan.candidates
    )
    kinds = {is_whole_once(plan, node) for node in plan.graph.nodes if is_gathered_once(node)}
    assert kinds == {True, False}


def is_whole_once(plan: Plan, node: Node) -> bool:
    return plan.choices[node.name].gives != plan.choices[node.operands[0].name].gives
