"""Plans that somebody has edited and signed anew: none runs, none is taken for what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autopar.emit import emit
from autopar.emit.writer import target_of
from autopar.errors import PlanMismatch
from autopar.ir.graph import Graph, Node, Ref, Result, TensorType, map_refs
from autopar.ir.layout import Partial, Replicate, Shard
from autopar.ir.work import FETCH, STORE
from autopar.plan import Plan
from autopar.plan.store import check, dumps
from autopar.plan.value import Choice
from autopar.price.reshard import Reshard
from autopar.rewrite.apply_choices import plain
from autopar.search import Request, search
from cost_models.steps import Compute, Step
from tests.plan.nets import MESH, net_graph
from tests.support.machines import FAST

Forge = Callable[[Plan], Plan]


@pytest.fixture(scope="module")
def saving_memory() -> Plan:
    """With copies in backward, and ways to the host and back, settled by name: memory has more than one way out."""
    graph = net_graph(batch=64, length=32)
    return search(graph, MESH, FAST, Request(pin={"layers.0": "recompute", "layers.1": "offload-activations"}))


def copies(plan: Plan) -> list[Node]:
    return [node for node in plan.graph.nodes if not node.is_source and node.target]


def moves(plan: Plan, op: str) -> list[Node]:
    return [node for node in plan.graph.nodes if node.op == op]


def test_the_plan_that_is_forged_has_what_can_be(saving_memory: Plan) -> None:
    assert copies(saving_memory) and moves(saving_memory, STORE) and moves(saving_memory, FETCH)
    check(Plan.loads(dumps(saving_memory), "it"), plain(saving_memory.graph), MESH)


def with_node(plan: Plan, node: Node, **changes: Any) -> Plan:
    nodes = tuple(replace(node, **changes) if one is node else one for one in plan.graph.nodes)
    choices = dict(plan.choices)
    if "name" in changes:
        choices[changes["name"]] = choices.pop(node.name)
    return replace(plan, graph=Graph(nodes, plan.graph.results), choices=choices)


def with_choice(plan: Plan, node: Node, **changes: Any) -> Plan:
    return replace(plan, choices={**plan.choices, node.name: replace(plan.choices[node.name], **changes)})


def first(plan: Plan, wanted: Callable[[Node, Choice], bool]) -> Node:
    return next(node for node in plan.graph.nodes if wanted(node, plan.choices[node.name]))


def product(plan: Plan) -> Node:
    return first(plan, lambda node, choice: node.op == "autopar.einsum")


def scaled(plan: Plan) -> Node:
    return first(plan, lambda node, _: any(isinstance(arg, float) for arg in node.args))


def with_results(plan: Plan, change: Callable[[list[Result]], list[Result]]) -> Plan:
    return replace(plan, graph=Graph(plan.graph.nodes, tuple(change([*plan.graph.results]))))


def swapped_gradients(results: list[Result]) -> list[Result]:
    types: dict[str, list[int]] = {}
    for place, result in enumerate(results):
        if result.kind == "gradient" and result.target.endswith("up.weight"):
            types.setdefault("up", []).append(place)
    one, other = types["up"][:2]
    results[one], results[other] = (
        replace(results[one], ref=results[other].ref),
        replace(results[other], ref=results[one].ref),
    )
    return results


def swapped_operands(plan: Plan) -> Plan:
    node = first(plan, lambda node, _: node.op.startswith("aten.gelu_backward"))
    return with_node(plan, node, args=(node.args[1], node.args[0], *node.args[2:]))


def summed_by_nobody(plan: Plan) -> Plan:
    """A value of terms is said to be whole where it is made, and no longer summed."""
    node = first(plan, lambda _, choice: any(isinstance(p, Partial) for layout in choice.gives for p in layout))
    choice = plan.choices[node.name]
    gives = tuple(tuple(Replicate() if isinstance(p, Partial) else p for p in layout) for layout in choice.gives)
    forged = with_choice(plan, node, gives=gives)

    def without(changes: tuple[Reshard, ...]) -> tuple[Reshard, ...]:
        return tuple(change for change in changes if not isinstance(change.before, Partial))

    choices = dict(forged.choices)
    for reader in plan.graph.nodes:
        reads = tuple(
            without(read) if ref.name == node.name else read
            for ref, read in zip(reader.operands, choices[reader.name].reads, strict=True)
        )
        choices[reader.name] = replace(choices[reader.name], reads=reads)
    deliveries = tuple(
        (
            delivery
            and result.ref
            and result.ref.name == node.name
            and replace(delivery, changes=without(delivery.changes))
        )
        or delivery
        for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True)
    )
    return replace(forged, choices=choices, deliveries=deliveries)


def delivered(plan: Plan, kind: str, **changes: Any) -> Plan:
    place = next(i for i, r in enumerate(plan.graph.results) if r.kind == kind and plan.deliveries[i] is not None)
    deliveries = list(plan.deliveries)
    deliveries[place] = replace(deliveries[place], **changes)
    return replace(plan, deliveries=tuple(deliveries))


def unsummed_gradient(plan: Plan) -> Plan:
    deliveries = list(plan.deliveries)
    place = next(i for i, d in enumerate(deliveries) if d and any(isinstance(c.before, Partial) for c in d.changes))
    kept = deliveries[place]
    changes = tuple(change for change in kept.changes if not isinstance(change.before, Partial))
    deliveries[place] = replace(kept, changes=changes)
    return replace(plan, deliveries=tuple(deliveries))


def stray(plan: Plan, op: str, *args: Any, target: str = "", phase: str = "forward") -> Plan:
    """A node more, that nobody reads."""
    type = TensorType((4,), "float32")
    node = Node("stray", op, args, (), (type,), phase, target)
    whole = (Replicate(),) * len(MESH.names)
    operands = len(node.operands)
    choice = Choice(("",) * len(whole), (whole,) * operands, (whole,), "", (), 1, (), ((),) * operands)
    last = max(i for i, one in enumerate(plan.graph.nodes) if one.phase == phase)
    nodes = (*plan.graph.nodes[: last + 1], node, *plan.graph.nodes[last + 1 :])
    return replace(plan, graph=Graph(nodes, plan.graph.results), choices={**plan.choices, "stray": choice})


def renamed(plan: Plan, old: str, new: str) -> Plan:
    """The node has another name, wherever it is read."""

    def name(ref: Ref) -> Ref:
        return replace(ref, name=new) if ref.name == old else ref

    nodes = tuple(
        replace(
            node,
            name=new if node.name == old else node.name,
            args=map_refs(node.args, name),
            kwargs=tuple((key, map_refs(arg, name)) for key, arg in node.kwargs),
        )
        for node in plan.graph.nodes
    )
    results = tuple(replace(result, ref=result.ref and name(result.ref)) for result in plan.graph.results)
    choices = {new if of == old else of: choice for of, choice in plan.choices.items()}
    return replace(plan, graph=Graph(nodes, results), choices=choices)


def source(plan: Plan, op: str = "input") -> str:
    return first(plan, lambda node, _: node.op == op).name


def out_of_order(plan: Plan) -> Plan:
    """A parameter in pieces of pieces, gathered over the outer axis first: every byte arrives, in another place."""
    node = first(plan, lambda n, _: n.op == "parameter" and n.target == "head.weight")
    (type,) = node.outputs
    assert type is not None
    split = (Shard(0), Shard(0))
    half = TensorType((type.shape[0] // MESH.ranks, *type.shape[1:]), type.dtype)
    rows = replace(half, shape=(half.shape[0] * MESH.sizes[0], *half.shape[1:]))
    swapped = (
        Reshard("data", Shard(0), Replicate(), half),
        Reshard("tensor", Shard(0), Replicate(), rows),
    )
    forged = with_choice(plan, node, gives=(split,))
    choices = dict(forged.choices)
    for reader in plan.graph.nodes:
        reads = [*choices[reader.name].reads]
        for place, ref in enumerate(reader.operands):
            if ref.name == node.name:
                reads[place] = swapped
        choices[reader.name] = replace(choices[reader.name], reads=tuple(reads))
    return replace(forged, choices=choices)


def with_steps(plan: Plan, change: Callable[[Step], Step]) -> Plan:
    node = product(plan)
    return with_choice(plan, node, steps=tuple(map(change, plan.choices[node.name].steps)))


def of_copy(**changes: Any) -> Forge:
    return lambda plan: with_node(plan, copies(plan)[0], **changes)


def other_copy_argument(plan: Plan) -> Plan:
    node = next(node for node in copies(plan) if any(isinstance(arg, (int, float)) for arg in node.args))
    args = tuple(arg + 1 if isinstance(arg, (int, float)) else arg for arg in node.args)
    return with_node(plan, node, args=args)


def other_copy_operand(plan: Plan) -> Plan:
    node, other = next(
        (node, other)
        for node in copies(plan)
        for other in plan.graph.nodes
        if node.operands and other.phase == "forward" and other.outputs[:1] == (plan.graph.type_of(node.operands[0]),)
        and other.name not in (node.target, node.operands[0].name) and not other.is_source
    )  # fmt: skip
    return with_node(plan, node, args=(Ref(other.name), *node.args[1:]))


KINDS: dict[str, Forge] = {
    "imports a module": lambda p: with_node(p, product(p), op="import_module.__self__.import_module"),
    "loads a library": lambda p: with_node(p, product(p), op="load_library.default"),
    "is no operator": lambda p: with_node(p, product(p), op="aten.__class__.mro"),
    "is one of our helpers": lambda p: with_node(p, product(p), op="autopar._plan"),
    "is another operator": lambda p: with_node(p, scaled(p), op="aten.div.Tensor"),
    "reads a file beside": lambda p: stray(p, "aten.from_file.default", "/etc/passwd"),
    "imports a module beside": lambda p: stray(p, "import_module.__self__.import_module", "os"),
    "reads a file as a way to the host": lambda p: stray(p, STORE, "/etc/passwd"),
    "reads a file as a copy": lambda p: stray(
        p, "aten.from_file.default", "/etc/passwd", target=copies(p)[0].target, phase="backward"
    ),
    "another number": lambda p: with_node(
        p, scaled(p), args=tuple(arg * 2 if isinstance(arg, float) else arg for arg in scaled(p).args)
    ),
    "another equation": lambda p: with_node(
        p, product(p), args=(product(p).args[0][::-1], *product(p).args[1:])  # type: ignore[index]
    ),
    "operands the other way round": swapped_operands,
    "a copy of nothing": of_copy(target="nothing"),
    "a copy of itself": lambda p: with_node(p, copies(p)[0], target=copies(p)[0].name),
    "a copy of a parameter": lambda p: with_node(
        p, copies(p)[0], target=first(p, lambda n, _: n.op == "parameter").name
    ),
    "a copy of another node": lambda p: with_node(p, copies(p)[0], target=product(p).name),
    "a copy in the forward": lambda p: stray(
        p, copies(p)[0].op, *copies(p)[0].args, target=copies(p)[0].target, phase="forward"
    ),
    "a copy by another operator": of_copy(op="aten.relu.default"),
    "a copy with another number": other_copy_argument,
    "a copy of other operands": other_copy_operand,
    "a copy that is none": of_copy(target=""),
    "a node that says it is a copy": lambda p: with_node(
        p,
        first(p, lambda n, _: n.phase == "backward" and not n.target and n.op.startswith("aten.gelu_backward")),
        target=product(p).name,
    ),
    "a way to the host of another type": lambda p: with_node(
        p, moves(p, STORE)[0], outputs=(TensorType((4, 2), "float32"),)
    ),
    "a way back of another dtype": lambda p: with_node(
        p, moves(p, FETCH)[0], outputs=(replace(moves(p, FETCH)[0].outputs[0], dtype="bfloat16"),)
    ),
    "a way back of two": lambda p: with_node(
        p, moves(p, FETCH)[0], args=(*moves(p, FETCH)[0].args, Ref(product(p).name))
    ),
    "gradients of each other": lambda p: with_results(p, swapped_gradients),
    "a gradient less": lambda p: replace(
        with_results(p, lambda r: [x for x in r if x.target != "head.weight"]),
        deliveries=tuple(
            d for d, r in zip(p.deliveries, p.graph.results, strict=True) if r.target != "head.weight"
        ),
    ),
    "a gradient of another parameter": lambda p: with_results(
        p, lambda r: [replace(x, target="head.bias2") if x.target == "head.bias" else x for x in r]
    ),
    "an output that is a buffer": lambda p: with_results(
        p, lambda r: [replace(x, kind="buffer", target="closed") if x.kind == "output" else x for x in r]
    ),
    "terms that nobody sums": summed_by_nobody,
    "a gradient that nobody sums": unsummed_gradient,
    "terms taken as whole": lambda p: with_choice(
        p, product(p), takes=((Partial("sum"), Replicate()), *p.choices[product(p).name].takes[1:])
    ),
    "roles that no rule has": lambda p: with_choice(p, product(p), roles=("zz", "zz")),
    "roles of another way": lambda p: with_choice(
        p, first(p, lambda n, c: any(c.roles) and n.op not in (STORE, FETCH)), roles=("",) * len(MESH.names)
    ),
    "another local body": lambda p: with_choice(p, product(p), body="share", body_axes=("data",)),
    "a body of another size": lambda p: with_choice(p, product(p), body_size=7),
    "a buffer in pieces": lambda p: with_choice(
        p, first(p, lambda n, _: n.op == "buffer"), gives=((Shard(0), Replicate()),)
    ),
    "a parameter of terms": lambda p: with_choice(
        p, first(p, lambda n, _: n.op == "parameter"), gives=((Partial("sum"), Replicate()),)
    ),
    "a gradient delivered in terms": lambda p: delivered(p, "gradient", layout=(Partial("sum"), Partial("sum"))),
    "an output delivered in terms": lambda p: delivered(p, "output", layout=(Partial("sum"), Replicate()), changes=()),
    "a name that is code": lambda p: renamed(p, source(p), "x=__import__('os').abort()"),
    "a name that is a word of Python's": lambda p: renamed(p, source(p), "lambda"),
    "a name that is the function's own": lambda p: renamed(p, source(p), "self"),
    "pieces put together in another order": out_of_order,
    "fewer flops": lambda p: with_steps(p, lambda s: replace(s, flops=0.0) if isinstance(s, Compute) else s),
    "another dtype that is computed in": lambda p: with_steps(
        p, lambda s: replace(s, dtype="int8") if isinstance(s, Compute) else s
    ),
    "no steps": lambda p: with_choice(p, product(p), steps=()),
    "an output in pieces that shall be whole": lambda p: delivered(
        replace(p, outputs="global"), "output", layout=(Shard(0), Replicate()), changes=()
    ),
    "a peak of nothing": lambda p: replace(p, peak_bytes={}),
    "a time that is none": lambda p: replace(p, step_seconds=float("nan")),
    "a bound above the plan": lambda p: replace(p, bound=2 * p.step_seconds),
    "another mesh": lambda p: replace(p, mesh=replace(p.mesh, sizes=(2, 4))),
    "a residence of nobody": lambda p: replace(p, residence={"nobody": "host"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_forged_plan_is_refused(saving_memory: Plan, kind: str) -> None:
    forged = KINDS[kind](saving_memory)
    assert forged != saving_memory
    with pytest.raises(PlanMismatch) as caught:
        check(Plan.loads(dumps(forged), "forged.json"), plain(saving_memory.graph), MESH)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "op",
    [
        "import_module.__self__.import_module", "import_module", "load_library", "aten", "aten.mm.default.default",
        "aten.__class__.mro", "aten.mm.__call__", "os.system", "autopar._plan", "autopar.torch.load", "autopar.math",
        "autopar.Tensor", "autopar.functional_collectives", "", ".", "..", "aten..", "aten.mm.nope",
    ],
)  # fmt: skip
def test_a_name_that_is_no_operator_is_never_followed(op: str) -> None:
    with pytest.raises(ValueError, match="is no operator of torch or of autopar"):
        target_of(op)


def test_no_name_is_copied_into_the_program(saving_memory: Plan) -> None:
    """The last door: a plan that was never read, with a default argument in the name of an input."""
    plan = renamed(saving_memory, source(saving_memory), "x=__import__('no_module_of_that_name')")
    program = emit(plan, {axis: "0" for axis in MESH.names})
    assert "=__import__" not in program.code.partition("):")[0]
    emit(renamed(saving_memory, source(saving_memory), "torch"), {axis: "0" for axis in MESH.names})
