"""Whole plans: the closed forms, and the plan at other sizes, against the model traced there with the same choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest

from autopar.decide.decide import refereed
from autopar.ir.graph import Graph, Ref, TensorType
from autopar.ir.layout import REPLICATE, Layout, Shard, local_type
from autopar.ir.mesh import Mesh
from autopar.plan import Choice, Delivery, Plan
from autopar.plan.value import Decision
from autopar.price.pricer import Pricer
from autopar.price.reshard import Reshard
from autopar.propose.strategies import propose
from autopar.scale import DoesNotSplit, Growth, Totals, growth_of, plan_at, totals, usual_sources
from autopar.scale.elsewhere import units
from autopar.scale.forms import STATES, totals_of
from autopar.search import search
from autopar.trace import capture, graph_of
from cost_models.formulas import at, terms
from cost_models.hardware import Hardware
from examples import gpt2, mlp
from tests.scale.retrace import growth, retraced
from tests.support.families import family
from tests.support.machines import FAST, SLOW, WIRES
from tests.support.plans import PlanSampler, plan_of

MESH = Mesh(("data", "tensor"), (2, 2))
SEEDS = (0, 1)
PLACES = [("mlp", "batch", 2), ("block", "batch", 2), ("block", "sequence", 2), ("cnn", "batch", 2),
          ("gpt2", "batch", 5), ("gpt2", "sequence", 2)]  # fmt: skip
MORE = [(name, "batch", 2) for name in ("llama", "opt", "bert", "t5", "vit")] + [
    (name, "sequence", 2) for name in ("llama", "opt", "bert", "t5")
]


def same_choices(plan: Plan, graph: Graph, mesh: Mesh, hardware: Hardware) -> Plan:
    """The plan's layouts and layout changes on another trace of the model, or on another mesh: proposed and priced
    there from nothing.
    """
    strategies, _ = propose(graph, mesh)
    type_of: dict[Ref, TensorType] = {}
    gives: dict[Ref, Layout] = {}
    choices: dict[str, Choice] = {}

    def changes(ref: Ref, ours: tuple[Reshard, ...]) -> tuple[Reshard, ...]:
        at, found = gives[ref], []
        for change in ours:
            found.append(Reshard(change.axis, change.before, change.after, local_type(type_of[ref], at, mesh)))
            at = change.applied(at, mesh)
        return tuple(found)

    for node, ours in zip(graph.nodes, plan.graph.nodes, strict=True):
        choice = plan.choices[ours.name]
        one = next(one for one in strategies[node.name] if (one.takes, one.gives) == (choice.takes, choice.gives))
        reads = tuple(changes(ref, read) for ref, read in zip(node.operands, choice.reads, strict=True))
        choices[node.name] = Choice(
            one.roles, one.takes, one.gives, one.body, one.body_axes, one.body_size, one.steps, reads
        )
        for index, (type, layout) in enumerate(zip(node.outputs, one.gives, strict=True)):
            if type is not None:
                type_of[Ref(node.name, index)], gives[Ref(node.name, index)] = type, layout
    deliveries = tuple(
        None
        if delivery is None or result.ref is None
        else Delivery(changes(result.ref, delivery.changes), delivery.layout)
        for result, delivery in zip(graph.results, plan.deliveries, strict=True)
    )
    pricer = Pricer.on(mesh, hardware, plan.optimizer, plan.bucket_bytes)
    return refereed(graph, choices, deliveries, pricer, objective=None, bound=0.0, memory=None, outputs="sharded")


def numbers(plan: Plan, hardware: Hardware) -> Totals:
    there = Decision(plan.graph, plan.mesh, plan.choices, plan.deliveries)
    return totals_of(there, Pricer.on(plan.mesh, hardware, plan.optimizer, plan.bucket_bytes), {})


def copies_saved(plan: Plan) -> int:
    """Bytes that are not moved because a split dim has one row left: what layout changes would copy with more rows."""
    node_of, saved = plan.graph.by_name, 0
    made = {"all_gather": lambda local, ranks: 2 * local * ranks, "all_to_all": lambda local, ranks: 4 * local,
            "reduce_scatter": lambda local, ranks: 2 * local}  # fmt: skip

    def count(ref: Ref, changes: tuple[Reshard, ...]) -> int:
        whole, total = node_of[ref.name].outputs[ref.index], 0
        assert whole is not None
        for change in changes:
            rows = [2 if here == 1 < of else here for here, of in zip(change.local.shape, whole.shape, strict=True)]
            ranks = plan.mesh.size(change.axis)
            general = replace(change, local=replace(change.local, shape=tuple(rows))).steps(ranks)
            if len(general) > len(change.steps(ranks)):
                total += made[change.kind](change.local.nbytes, ranks)
        return total

    for node in plan.graph.nodes:
        choice, seen = plan.choices[node.name], set[object]()
        for ref, layout, read in zip(node.operands, choice.takes, choice.reads, strict=True):
            saved += 0 if (ref, layout) in seen else count(ref, read)
            seen.add((ref, layout))
    for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True):
        saved += count(result.ref, delivery.changes) if result.ref is not None and delivery is not None else 0
    return saved


def check(form: Totals, values: Mapping[str, int], plan: Plan, hardware: Hardware = FAST) -> None:
    """`form` at these values is `plan`, to the byte and to the flop."""
    found = numbers(plan, hardware)
    assert at(form.work.flops, values) == Fraction(found.work.flops)
    assert {key: at(payload, values) for key, payload in form.work.payload.items()} == found.work.payload
    assert form.peak(values) == plan.peak_bytes["hbm"]
    assert at(form.work.moved, values) == Fraction(found.work.moved) + copies_saved(plan)
    for key, received in plan.comm_bytes.items():
        count = sum((comm.collective, comm.axis) == key for comm in plan.comms())
        assert 0 <= at(form.work.received[key], values) - received < 2 * max(count, 1)  # each phase is cut to bytes


@cache
def sampler(name: str) -> PlanSampler:
    return PlanSampler(family(name).graph, MESH, loops=False)


@cache
def closed(name: str, seed: int) -> tuple[Plan, Totals]:
    plan = sampler(name).draw(seed)
    return plan, totals(plan, growth(name), sampler(name).pricer)


@pytest.mark.parametrize("name", ["mlp", "block", "cnn", "gpt2"])
def test_at_the_plans_own_sizes_it_is_the_plan(name):
    for seed in SEEDS:
        plan, form = closed(name, seed)
        check(form, form.here, plan)
        again = plan_at(plan, growth(name), growth(name).base, sampler(name).pricer)
        assert again.graph.digest == plan.graph.digest
        assert (again.choices, again.deliveries) == (plan.choices, plan.deliveries)
        assert (again.step_seconds, again.peak_bytes) == (plan.step_seconds, plan.peak_bytes)


def larger(name: str, which: str, times: int) -> None:
    found, there = growth(name), retraced(name, which, times)
    values = {**found.base, which: times * found.base[which]}
    for seed in SEEDS:
        plan, form = closed(name, seed)
        traced = same_choices(plan, there, MESH, FAST)
        check(form, {**form.here, **values}, traced)
        kept = plan_at(plan, found, values, sampler(name).pricer)
        assert [choice.steps for choice in kept.choices.values()] == [c.steps for c in traced.choices.values()]
        assert [c.reads for c in kept.choices.values()] == [c.reads for c in traced.choices.values()]
        assert [c.body_size for c in kept.choices.values()] == [c.body_size for c in traced.choices.values()]
        assert kept.step_seconds == pytest.approx(traced.step_seconds, rel=1e-12)
        assert kept.peak_bytes == traced.peak_bytes


@pytest.mark.parametrize("name, which, times", PLACES)
def test_larger_it_is_the_plan_of_a_new_trace(name, which, times):
    larger(name, which, times)


@pytest.mark.slow
@pytest.mark.parametrize("name, which, times", MORE)
def test_larger_it_is_the_plan_of_a_new_trace_in_every_family(name, which, times):
    larger(name, which, times)


def test_units_are_what_divides():
    for seed in SEEDS:
        plan, _ = closed("block", seed)
        found = growth("block")
        for name, unit in units(plan, found).items():
            for count in range(1, 7):
                values = {**found.base, name: count}
                try:
                    plan_at(plan, found, values, sampler("block").pricer)
                except DoesNotSplit:
                    assert count % unit, (name, unit, count)
                else:
                    assert count % unit == 0, (name, unit, count)


# --- plans that a search found ----------------------------------------------------------------------------------------


def traced_gpt2(batch: int, sequence: int) -> Graph:
    model, args, inputs = gpt2.build(layers=2, width=64, heads=4, vocabulary=96, batch=batch, sequence=sequence)
    return graph_of(capture(model, args, inputs))


def traced_mlp(batch: int) -> Graph:
    model, (x, y) = mlp.build(layers=2, width=64, hidden=256, batch=batch)
    return graph_of(capture(model, (), {"x": x, "y": y}))


def followed(graph: Graph) -> Growth:
    return growth_of(graph, usual_sources(graph))


@pytest.mark.parametrize("hardware", [FAST, WIRES], ids=lambda one: one.name)
def test_the_plan_of_an_example_at_four_times_its_batch(hardware):
    plan = search(traced_mlp(32), MESH, hardware)
    form = totals(plan, followed(plan.graph), Pricer.on(MESH, hardware, "adamw"))
    assert form.here == {"batch": 32, "data": 2, "tensor": 2}
    check(form, {**form.here, "batch": 128}, same_choices(plan, traced_mlp(128), MESH, hardware), hardware)


def test_the_plan_of_gpt2_at_another_batch():
    plan = search(traced_gpt2(8, 16), MESH, WIRES)
    form = totals(plan, followed(plan.graph), Pricer.on(MESH, WIRES, "adamw"))
    check(form, {**form.here, "batch": 40}, same_choices(plan, traced_gpt2(40, 16), MESH, WIRES), WIRES)


def test_attention_is_quadratic_in_the_sequence_and_parameters_are_not():
    _, form = closed("gpt2", 0)
    here, length = form.here, form.here["sequence"]
    small, middle, large = (at(form.work.flops, {**here, "sequence": length * n}) for n in (1, 2, 4))
    assert middle > 2 * small and large - 2 * middle > 2 * (middle - 2 * small)
    assert {dict(powers).get("sequence", 0) for powers in terms(form.work.flops)} == {0, 1, 2}
    assert not any(
        "sequence" in dict(powers) or "batch" in dict(powers) for powers in terms(form.highest(here)[STATES])
    )


@pytest.mark.parametrize("ranks", [(4, 2), (2, 4), (8, 4)], ids=str)
def test_on_more_ranks_it_is_the_plan_of_the_larger_mesh(ranks):
    mesh = Mesh(MESH.names, ranks)
    plan = search(traced_mlp(64), MESH, SLOW)
    found = followed(plan.graph)
    form = totals(plan, found, Pricer.on(MESH, SLOW, "adamw"))
    traced = same_choices(plan, plan.graph, mesh, SLOW)
    check(form, {"batch": 64, "data": ranks[0], "tensor": ranks[1]}, traced, SLOW)
    kept = plan_at(plan, found, found.base, Pricer.on(mesh, SLOW, "adamw"))
    assert (kept.choices, kept.deliveries, kept.peak_bytes) == (traced.choices, traced.deliveries, traced.peak_bytes)


def test_what_does_not_divide_is_named():
    plan = search(traced_mlp(64), MESH, FAST)
    with pytest.raises(DoesNotSplit, match=r"(splits|lays out) .*"):
        plan_at(plan, followed(plan.graph), {"batch": 6}, Pricer.on(MESH, FAST, "adamw"))


def test_another_way_is_found_where_a_layout_change_no_longer_divides():
    """A detour through halves of 6 rows: four ranks have no fourths of them, but the ends are whole."""
    drawn = PlanSampler(family("mlp").graph, Mesh(("data",), (2,)), loops=False)
    whole = plan_of(drawn.graph, drawn.assembled, [0] * len(drawn.assembled.options), drawn.pricer)
    type, half = TensorType((12, 6, 48), "float32"), TensorType((12, 3, 48), "float32")
    detour = (Reshard("data", REPLICATE, Shard(1), type), Reshard("data", Shard(1), REPLICATE, half))
    gelu = whole.choices["gelu"]
    assert gelu.takes == gelu.gives == ((REPLICATE,),) and gelu.reads == ((),)
    plan = replace(whole, choices={**whole.choices, "gelu": replace(gelu, reads=(detour,))})
    found = growth("mlp")
    assert plan_at(plan, found, found.base, drawn.pricer).choices["gelu"].reads == (detour,)
    four = Pricer.on(Mesh(("data",), (4,)), FAST, "adamw")
    assert plan_at(plan, found, found.base, four).choices["gelu"].reads == ((),)


def test_an_axis_may_have_the_name_of_a_size():
    mesh = Mesh(("batch", "sequence"), (2, 2))
    plan = search(traced_mlp(64), mesh, SLOW)
    form = totals(plan, followed(plan.graph), Pricer.on(mesh, SLOW, "adamw"))
    assert form.here == {"batch": 64, "batch_ranks": 2, "sequence": 2}
    check(form, form.here, plan, SLOW)
