"""Do the parts of a plan fit each other? What emit relies on, of any plan that was read."""

from __future__ import annotations

import keyword
from collections.abc import Sequence

from autopar.ir.graph import HELD, Graph, Node, Ref, Result, TensorType
from autopar.ir.layout import REPLICATE, Layout, Shard, encode, local_shape
from autopar.ir.mesh import Mesh
from autopar.ir.rounds import wide
from autopar.ir.work import FETCH, STORE
from autopar.plan.value import NO_CALL, RESIDENCES, Choice, Delivery, PlanValue
from autopar.price.reshard import Reshard, neighbours
from autopar.rules.bodies import BODIES
from autopar.rules.patterns import is_pattern, offered, patterns_of
from cost_models.steps import Comm, Loop, Step, over, unrolled

MOST_STEPS = 100_000  # of one node, with the rounds of its loops; a ring of a thousand ranks has a few thousand


class _Flaw(Exception):
    """(place, cause)"""


def flaw_of(plan: PlanValue) -> tuple[str, str] | None:
    """(place, cause) of the first contradiction in a plan, such as ("nodes[3] (%mm)", "has layout 'S0', which ...").

    What emit relies on: names that can stand in a program, one layout per operand and result, each of which the mesh
    can hold, and layout changes that lead from what is given to what is taken, each of them one that exists.
    """
    try:
        _check_parts(plan)
    except _Flaw as flaw:
        place, cause = flaw.args
        return place, cause
    return None


def _check_parts(plan: PlanValue) -> None:
    given: dict[Ref, tuple[TensorType | None, Layout]] = {}
    _check_nodes(plan.graph)
    _check_host(plan)
    for number, node in enumerate(plan.graph.nodes):
        place = f"nodes[{number}] (%{node.name})"
        choice = plan.choices[node.name]
        operands = node.operands
        counts = (len(choice.takes), len(choice.reads), len(choice.gives), len(choice.roles))
        if counts != (len(operands), len(operands), len(node.outputs), len(plan.mesh.names)):
            raise _Flaw(place, "has a choice made for another number of operands, results or mesh axes")
        _check_body(node, choice, plan.mesh, place)
        _check_stored(plan, node, choice, place)
        for ref, takes, read in zip(operands, choice.takes, choice.reads, strict=True):
            _check_way(plan.mesh, *given[ref], read, takes, place)
        if is_pattern(choice.body):
            _check_offered(node, choice, tuple(type for ref in operands if (type := given[ref][0])), plan.mesh, place)
        for index, (type, layout) in enumerate(zip(node.outputs, choice.gives, strict=True)):
            _local(plan.mesh, type, layout, place)
            given[Ref(node.name, index)] = type, layout
    for number, (result, delivery) in enumerate(zip(plan.graph.results, plan.deliveries, strict=True)):
        place = f"results[{number}] ({result.kind} {result.target})"
        if (result.ref is None) != (delivery is None):
            raise _Flaw(place, "has a value or a delivery, but not both")
        if result.ref is not None and delivery is not None:
            _check_way(plan.mesh, *given[result.ref], delivery.changes, delivery.layout, place)
            _check_once(plan, result, delivery, place)


def _check_once(plan: PlanValue, result: Result, delivery: Delivery, place: str) -> None:
    """Behind all micro-batches gradients of parameters are summed, in the dtype in which they are added up."""
    if not delivery.once or result.ref is None:
        return
    trained = {node.target for node in plan.graph.trained}
    if not plan.graph.rounds.reduces_once or result.kind != "gradient" or result.target not in trained:
        raise _Flaw(place, "is summed behind all micro-batches, and is no gradient that may be")
    if any(change.kind not in ("all_reduce", "reduce_scatter") for change in delivery.once):
        raise _Flaw(place, "has another layout change than a sum behind all micro-batches")
    type = plan.graph.type_of(result.ref)
    added_up = TensorType(type.shape, wide(type.dtype))
    _check_way(plan.mesh, added_up, delivery.layout, delivery.once, delivery.lies(plan.mesh), place)


def _check_stored(plan: PlanValue, node: Node, choice: Choice, place: str) -> None:
    """Only parameters may be stored otherwise than they are read, in pieces that are gathered before micro-batches."""
    if not choice.stored:
        return
    if node.op != "parameter" or not plan.graph.rounds.reduces_once or plan.residence.get(node.target):
        raise _Flaw(place, "is stored otherwise than it is read, and is no parameter that may be")
    _local(plan.mesh, node.outputs[0], choice.stored, place)
    (read,) = choice.gives
    more = [axis for axis, (before, after) in enumerate(zip(choice.stored, read, strict=True)) if before != after]
    if not more or any(not isinstance(choice.stored[axis], Shard) or read[axis] != REPLICATE for axis in more):
        raise _Flaw(place, f"is stored in {encode(choice.stored)!r}, which is not what is read in more pieces")
    _check_way(plan.mesh, node.outputs[0], choice.stored, plan.gathers(node), read, place)


def _check_nodes(graph: Graph) -> None:
    """Names become those of variables; sources are one tensor each."""
    for number, node in enumerate(graph.nodes):
        place = f"nodes[{number}] (%{node.name})"
        if not node.name.isidentifier() or keyword.iskeyword(node.name) or node.name == "self":
            raise _Flaw(place, "has a name that no variable can have")
        if node.is_source and (len(node.outputs) != 1 or node.outputs[0] is None or node.args or node.kwargs):
            raise _Flaw(place, f"is a {node.op}, and not one tensor that is there from the start")
        if node.op in (STORE, FETCH) and (len(node.outputs) != 1 or node.outputs[0] is None):
            raise _Flaw(place, f"is {node.op} of {len(node.outputs)} results, and not of one tensor")
    _check_results(graph)


def _check_results(graph: Graph) -> None:
    """Each stands once; gradients are those of parameters or inputs, and all else is made in forward."""
    held = {node.target: node.outputs[0] for node in graph.nodes if node.op in HELD}
    seen: set[tuple[str, str]] = set()
    for number, result in enumerate(graph.results):
        place, of = f"results[{number}] ({result.kind} {result.target})", None
        if (result.kind, result.target) in seen:
            raise _Flaw(place, "stands there twice")
        seen.add((result.kind, result.target))
        if result.kind == "gradient" and (of := held.get(result.target)) is None:
            raise _Flaw(place, "is of a parameter or an input that the graph does not have")
        if result.ref is None:
            continue
        node = graph.by_name[result.ref.name]
        type = node.outputs[result.ref.index]
        if type is None:
            raise _Flaw(place, "is a result that does not exist")
        if of is not None and type.shape != of.shape:
            raise _Flaw(place, f"is {type}, and what it is of is {of}")
        if result.kind != "gradient" and node.phase == "backward" and not node.is_source:
            raise _Flaw(place, "is made in backward")


def _check_host(plan: PlanValue) -> None:
    """What lies on the host is read by fetches alone, as it lies there."""
    parameters = {node.target: node.name for node in plan.graph.nodes if node.op == "parameter"}
    for name, where in plan.residence.items():
        if name not in parameters:
            raise _Flaw(f"residence.{name}", "is of a parameter that the graph does not have")
        if where not in RESIDENCES[1:]:
            raise _Flaw(f"residence.{name}", f"is {where!r}, not {' or '.join(RESIDENCES[1:])}")
    on_host = {parameters[name] for name, where in plan.residence.items() if where == "host"}
    on_host |= {node.name for node in plan.graph.nodes if node.op == STORE}
    for number, node in enumerate(plan.graph.nodes):
        place = f"nodes[{number}] (%{node.name})"
        if node.op == FETCH and not (len(node.operands) == 1 and node.operands[0].name in on_host):
            raise _Flaw(place, "fetches what does not lie on the host")
        if node.op == FETCH and any(plan.choices[node.name].reads):
            raise _Flaw(place, "changes the layout of what lies on the host")
        if node.op != FETCH and (wrong := [ref.name for ref in node.operands if ref.name in on_host]):
            raise _Flaw(place, f"reads %{wrong[0]}, which lies on the host, without a fetch")


def _check_body(node: Node, choice: Choice, mesh: Mesh, place: str) -> None:
    if choice.body and choice.body not in {*BODIES, *patterns_of(node)}:
        raise _Flaw(place, f"runs the local body {choice.body!r}, which this autopar does not have")
    if (count := _unrolled_count(choice.steps)) > MOST_STEPS:
        raise _Flaw(place, f"has loops of {count} steps, more than the {MOST_STEPS:,} that a node may have")
    comms = [step for step in unrolled(choice.steps) if isinstance(step, Comm)]
    works_over = [over(choice.body_axes)] if choice.body_axes else []
    if unknown := sorted({*works_over, *(comm.axis for comm in comms)} - {*mesh.groups}):
        raise _Flaw(place, f"works over axis {unknown[0]!r}, which the mesh {mesh} does not have")
    for comm in comms:
        if comm.ranks != mesh.size(comm.axis):
            raise _Flaw(place, f"has a {comm.collective} of {comm.ranks} ranks over {comm.axis!r} on mesh {mesh}")


def _unrolled_count(steps: Sequence[Step]) -> int:
    return sum(step.rounds * _unrolled_count(step.body) if isinstance(step, Loop) else 1 for step in steps)


def _check_offered(node: Node, choice: Choice, types: tuple[TensorType, ...], mesh: Mesh, place: str) -> None:
    """What is lowered of a pattern is what it offers."""
    try:
        offer = offered(node, types, mesh, choice.body, choice.roles)
    except NO_CALL:
        offer = None
    laid = (choice.takes, choice.gives, choice.body_axes)
    if offer is None or laid != (offer.takes, offer.gives, (offer.axis,)):
        raise _Flaw(place, f"runs the pattern {choice.body!r} as it does not offer it")


def _local(mesh: Mesh, type: TensorType | None, layout: Layout, place: str) -> tuple[int, ...]:
    if len(layout) != len(mesh.names):
        raise _Flaw(place, f"has layout {encode(layout)!r} on a mesh of {len(mesh.names)} axes")
    shape = () if type is None else local_shape(type.shape, layout, mesh)
    if shape is None:
        raise _Flaw(place, f"has layout {encode(layout)!r}, which does not divide {type} on mesh {mesh}")
    return shape


def _check_way(
    mesh: Mesh, type: TensorType | None, at: Layout, changes: Sequence[Reshard], end: Layout, place: str
) -> None:
    if type is None:
        raise _Flaw(place, "reads a result that does not exist")
    for change in changes:
        local = TensorType(_local(mesh, type, at, place), type.dtype)
        is_known = change.axis in mesh.groups
        if not is_known or {at[i] for i in mesh.places(change.axis)} != {change.before} or local != change.local:
            told = f"{change.axis}: {encode((change.before,))} -> {encode((change.after,))} of {change.local}"
            raise _Flaw(place, f"has the layout change ({told}) where the value is {type} in {encode(at)!r}")
        after = change.applied(at, mesh)
        if after not in neighbours(at, len(type.shape), mesh):
            told = f"{change.axis}: {encode((change.before,))} -> {encode((change.after,))}"
            raise _Flaw(
                place, f"has the layout change ({told}) of a value in {encode(at)!r}, which no collective makes"
            )
        at = after
    _local(mesh, type, at, place)
    if at != end:
        raise _Flaw(place, f"takes a value in {encode(end)!r}, but its layout changes lead to {encode(at)!r}")
