"""What is launched ahead and waited for later: as in the emitted program, and as many products as were asked for."""

import re
from collections import defaultdict
from dataclasses import replace
from functools import cache

import pytest
from torch import bfloat16, float32
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar.emit import emit
from autopar.ir.graph import weights_in
from autopar.ir.work import VIEWS
from autopar.lower.program import Read
from autopar.lower.schedule import Advance, Facts, Turn, schedule
from autopar.plan import Plan
from autopar.plan.value import is_product
from autopar.price.pricer import Pricer
from autopar.search import Request, search
from autopar.simulate.timeline import events_of, timeline_of
from autopar.trace import capture, graph_of
from cost_models.simulator import COMPUTE, Event
from tests.simulate.plans import CASES, called, drawn
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.machines import machine


@cache
def fsdp(name: str, *sizes: int) -> tuple[Plan, Pricer]:
    """Parameters in pieces, gathered for each use, on a machine where that takes about as long as the products."""
    mesh, hardware = mesh_of(*(sizes or (2,))), machine(3e9, flops=1e12, memory=1e12)
    plan = search(family(name).graph, mesh, hardware, Request(policy="fsdp", tied=False))
    return plan, Pricer.on(mesh, hardware, plan.optimizer, plan.bucket_bytes)


# --- the order of the program ----------------------------------------------------------------------------------------


def order_of(events: list[Event]) -> list[tuple[str, int | tuple[str, str]]]:
    """Launches of collectives, each with its name and axis, and waits, each with the number of the launch."""
    found: list[tuple[str, int | tuple[str, str]]] = []
    number_of: dict[int, int] = {}
    for place, event in enumerate(events):
        if event.stream != COMPUTE:
            number_of[place] = len(number_of)
            found.append(("launch", called(event)))
        elif event.name.startswith("wait for"):
            (waited,) = event.after
            found.append(("wait", number_of[waited]))
    return found


def emitted_order(plan: Plan) -> list[tuple[str, int | tuple[str, str]]]:
    program = emit(plan, {axis: axis for axis in plan.mesh.groups})
    assert program.backward is not None
    found: list[tuple[str, int | tuple[str, str]]] = []
    number_of: dict[object, int] = {}
    for part in (program.forward, program.backward):
        for node in part.graph.nodes:
            called_as = re.sub(r"autopar\.(shift|mirror)", r"_c10d_functional.\1", str(node.target))
            target = called_as.removeprefix("_c10d_functional.").split(".")[0].removesuffix("_")
            if "_c10d_functional" not in called_as:
                continue
            if target == "wait_tensor":
                found.append(("wait", number_of[node.args[0]]))
                continue
            kind = target.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")
            number_of[node] = len(number_of)
            found.append(("launch", (kind, str(node.args[-1]))))
    return found


ORDERED = [*CASES[::3], ("gpt2", (2, 2), 2), ("llama", (2, 2), 3)]


@pytest.mark.parametrize("bucket_bytes", [0, 3000, 1 << 20])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 4])
def test_what_is_played_is_launched_and_waited_for_as_in_the_emitted_program(prefetch, bucket_bytes):
    for name, sizes, seed in ORDERED:
        plan, pricer = drawn(name, sizes, seed)
        plan = replace(plan, prefetch=prefetch, bucket_bytes=bucket_bytes)
        pricer = replace(pricer, bucket_bytes=bucket_bytes)
        order = order_of(events_of(plan, pricer, prefetch))
        assert order == emitted_order(plan), (name, sizes, seed)
        assert len([what for what, _ in order if what == "launch"]) == len(
            [what for what, _ in order if what == "wait"]
        )


@pytest.mark.parametrize("name", ["block", "gpt2", "llama"])
def test_so_it_is_for_plans_that_gather_weights_and_for_those_that_sum_gradients_in_rows(name):
    for policy, bucket_bytes in (("fsdp", 0), ("data-parallel", 20_000)):
        mesh, hardware = mesh_of(2), machine(3e9, flops=1e12, memory=1e12)
        plan = search(family(name).graph, mesh, hardware, Request(policy=policy, tied=False))
        for prefetch in (0, 1, 2):
            asked = replace(plan, prefetch=prefetch, bucket_bytes=bucket_bytes)
            pricer = Pricer.on(mesh, hardware, plan.optimizer, bucket_bytes)
            assert order_of(events_of(asked, pricer, prefetch=prefetch)) == emitted_order(asked)


# --- as many products ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("name", ["block", "gpt2", "llama"])
def test_the_sum_of_a_gradient_is_waited_for_as_many_products_later(name, prefetch):
    plan, pricer = fsdp(name)
    events = events_of(plan, pricer, prefetch)
    products = [
        number for number, event in enumerate(events)
        if event.stream == COMPUTE and "value" not in dict(event.about) and event.phase == "backward"
        and (dict(event.about).get("op") == "autopar.einsum" or "attention" in str(dict(event.about).get("op")))
    ]  # fmt: skip
    sums = {
        number for number, event in enumerate(events)
        if event.stream != COMPUTE and str(dict(event.about).get("result", "")).startswith("gradient")
    }  # fmt: skip
    assert sums
    for number, event in enumerate(events):
        if event.name.startswith("wait for") and (waited := event.after[0]) in sums:
            between = sum(waited < place < number for place in products)
            left = sum(waited < place for place in products)
            assert between == min(prefetch, left), event


@pytest.mark.parametrize("name", ["block", "gpt2", "llama"])
def test_gathers_launched_ahead_hide_behind_products_and_hold_memory_for_longer(name):
    plan, pricer = fsdp(name)
    late, early = (timeline_of(plan, pricer, prefetch) for prefetch in (0, 1))
    assert early.seconds < late.seconds < timeline_of(plan, pricer).seconds
    assert early.exposed_s["comm:a"] < late.exposed_s["comm:a"]

    def held(prefetch: int) -> int:
        """Gathered weights, in bytes times the events for which they are held."""
        events, found = events_of(plan, pricer, prefetch), 0
        for number, event in enumerate(events):
            for hold in event.holds:
                if "resharded for" in hold.tenant and hold.until is not None:
                    found += hold.nbytes * (max(hold.until) - number)
        return found

    assert held(1) > held(0)


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_gathers_are_launched_that_many_products_ahead(prefetch):
    """Counted in the events themselves: between a gather and its reader, so many operators on matrix units begin."""
    plan, pricer = fsdp("llama")
    node_of = plan.graph.by_name
    products: list[tuple[int, str]] = []
    gathers: dict[int, str] = {}
    reads: dict[str, int] = {}
    events = events_of(plan, pricer, prefetch)
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


@pytest.mark.parametrize(("prefetch", "ahead"), [(1, [1, 0]), (2, [2, 1]), (5, [5, 2])])
def test_gathers_over_two_axes_are_launched_in_equal_parts_of_the_way(prefetch, ahead):
    """The second is no use launched where the first ends if that is where the weight is read."""
    plan, pricer = fsdp("llama", 2, 2)
    gathers: dict[tuple[str, str], list[int]] = defaultdict(list)  # (value, reader) -> products run by each launch
    reads: dict[tuple[str, str], int] = {}
    products = 0
    for action in schedule(Facts(plan), "forward", prefetch):
        match action:
            case Turn(name):
                for ref, changes in zip(plan.graph.by_name[name].operands, plan.choices[name].reads, strict=True):
                    if len(changes) == 2 and plan.graph.by_name[ref.name].op == "parameter":
                        reads.setdefault((ref.name, name), products)
                products += is_product(plan.choices[name])
            case Advance(Read(reader, position)):
                ref = plan.graph.by_name[reader].operands[position]
                if plan.graph.by_name[ref.name].op == "parameter":
                    gathers[ref.name, reader].append(products)
    late = [by for by, at in reads.items() if at >= prefetch]
    assert len(late) > 10
    for by in late:
        *launched, waited = gathers[by]
        assert [reads[by] - at for at in launched] == ahead and waited == reads[by], by
    one, other = (timeline_of(plan, pricer, count).exposed_s for count in (1, 2))
    assert sum(other.values()) < sum(one.values())


@cache
def mixed() -> tuple[Plan, Pricer]:
    """FSDP with parameters in float32 that are cast to bfloat16 before they are gathered."""
    case, precision = family("gpt2"), MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)
    graph = graph_of(capture(case.model, (), case.inputs, precision=precision), precision)
    mesh, hardware = mesh_of(2), machine(3e9, flops=1e12, memory=1e12)
    plan = search(graph, mesh, hardware, Request(policy="fsdp", tied=False))
    return plan, Pricer.on(mesh, hardware, plan.optimizer, plan.bucket_bytes)


def test_weights_are_fetched_ahead_through_their_casts():
    plan, pricer = mixed()
    weights = weights_in(plan.graph)
    order = schedule(Facts(plan), "forward", 2)
    runs = {action.node: place for place, action in enumerate(order) if isinstance(action, Turn)}
    products = [place for name, place in runs.items() if is_product(plan.choices[name])]
    found = 0
    for place, action in enumerate(order):
        if not isinstance(action, Advance) or not isinstance(action.transfer, Read):
            continue
        reader = plan.graph.by_name[action.transfer.reader]
        ref = reader.operands[action.transfer.position]
        if (
            order.index(action) == place
            and ref.name in weights
            and plan.graph.by_name[ref.name].op.endswith("_to_copy.default")
        ):
            found += 1
            before = sum(product < runs[reader.name] for product in products)
            assert sum(place < product < runs[reader.name] for product in products) == min(2, before), reader.name
            assert runs[ref.name] < place
    assert found > 10
    for prefetch in (0, 1, 2, 4):
        events = events_of(plan, pricer, prefetch)
        assert order_of(events) == emitted_order(replace(plan, prefetch=prefetch))
    times = [timeline_of(plan, pricer, prefetch).seconds for prefetch in (0, 1, 2)]
    assert times == sorted(times, reverse=True) and times[0] > times[2]


def test_the_small_sum_of_a_bias_does_not_stop_compute_behind_a_large_one():
    """A view between a sum and its gradient waits as long as the gradient would."""
    mesh, hardware = mesh_of(2), machine(3e9, flops=1e11, memory=1e12)
    plan = search(family("gpt2").graph, mesh, hardware, Request(policy="data-parallel", tied=False))
    tails = 0
    order = schedule(Facts(plan), "backward", 2)
    runs = {action.node: place for place, action in enumerate(order) if isinstance(action, Turn)}
    products = [place for name, place in runs.items() if is_product(plan.choices[name])]
    gradients = {result.ref.name for result in plan.graph.results if result.kind == "gradient" and result.ref}
    for node in plan.graph.nodes:
        if node.name in gradients and node.op in VIEWS and any(plan.choices[node.name].reads):
            tails += 1
            started = order.index(Advance(Read(node.name, 0)))
            left = sum(started < product for product in products)
            assert sum(started < product < runs[node.name] for product in products) == min(2, left), node.name
    assert tails
