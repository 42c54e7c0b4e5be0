"""Does a plan fit a model, its inputs and a mesh?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.errors import PlanMismatch
from autopar.ir import precision
from autopar.ir.batch_norm import statistics_of
from autopar.ir.graph import HELD, Arg, Graph, Node, Ref, Result, TensorType, map_refs
from autopar.ir.layout import Layout, Partial, Replicate
from autopar.ir.mesh import Mesh
from autopar.ir.work import FETCH, STORE
from autopar.plan.value import AGAIN, NO_CALL, Choice, PlanValue, shortened
from autopar.propose.strategies import Strategy, moved, operand_types, signature_of, source_strategies, strategy_of
from autopar.rewrite.apply_choices import false_claim_of, plain
from autopar.rules.outside import check_same
from autopar.rules.patterns import is_pattern
from cost_models.steps import Compute, Step

OF_RANK_0 = "the plan of rank 0"
RANKS = (
    "all ranks must build the same model, give it inputs of the same shapes and let forward use the same values where "
    "it reads tensors that are no parameters, buffers or inputs (make those from one seed, or register them as buffers)"
)
_EITHER_WAY = ("aten.add.Tensor", "aten.mul.Tensor")  # of two tensors: the same numbers whichever stands first


def check(plan: PlanValue, graph: Graph, mesh: Mesh, *, outputs: str | None = None, origin: str = "the plan") -> None:
    """Raise PlanMismatch, naming the first difference, unless `plan` was made for this graph and mesh.

    `graph`: what the model traces to now. Names of operators do not count, as the program is emitted from the plan's
    own graph; operators, arguments, shapes and the names of inputs, parameters and buffers do. Nor does what the plan
    runs again, offloads or fetches. `outputs`: as in `search`, if it matters. `origin`: whose plan it is; that of
    rank 0 is refused on ranks whose model is another.
    """
    again = RANKS if origin == OF_RANK_0 else AGAIN

    def fail(told: str, instead: str = "") -> None:
        raise PlanMismatch(f"{origin} was made for {shortened(told)}; {'' if again is RANKS else instead}{again}")

    if (claim := false_claim_of(plan.graph)) is not None:
        told = shortened(f"node %{claim[0].name} ({claim[0].op}) {claim[1]}")
        raise PlanMismatch(f"{origin} was edited: {told}; {AGAIN}")
    ours = plain(plan.graph)
    check_same(plan.rules, graph.outside, plan.graph, origin, AGAIN)

    if mesh != plan.mesh:
        fail(f"mesh {plan.mesh}, this mesh is {mesh}", "use a mesh with those names and sizes, or ")
    if outputs is not None and outputs != plan.outputs:
        fail(f"outputs={plan.outputs!r}, this call asks for outputs={outputs!r}", "ask for the former, or ")
    if (norms := _batch_norms(ours, graph)) is not None:
        fail(f"batch_norm={norms[0]!r}, this call asks for batch_norm={norms[1]!r}", "ask for the former, or ")
    if (casts := _casts(ours, graph)) is not None:
        fail(f"{casts[0]}, here {casts[1]}", 'give the precision it was made with ("bf16" or "fp32"), or ')
    if (was := ours.rounds.count) != (now := graph.rounds.count):
        fail(f"micro_batches={was}, this call asks for micro_batches={now}", "ask for the former, or ")
    for op, subject, wanted in _SOURCES:
        if (told := _sources(ours, graph, op)) is not None:
            fail(f"{shortened(told[0], 200)}, this {subject} {shortened(told[1], 190)}", wanted)
    if (ends := _results(ours, graph)) is not None:
        fail(f"{shortened(ends[0], 350)}, this model {ends[1]}")
    if (nodes := _operators(ours, graph)) is not None:
        fail(f"another model: {nodes}")
    if _cut(ours) != _cut(graph):
        fail(f"micro_batches={now} cut in one way, this call asks for another way to cut")
    check_rules(plan, origin)


def unlike(one: Graph, other: Graph) -> str | None:
    """What differs first in two graphs of models, in words; None where they are the same, operator by operator.

    Nor here does it count what a plan runs again, offloads or fetches, or how operators are called.
    """
    one, other = plain(one), plain(other)
    if (norms := _batch_norms(one, other)) is not None:
        return f"the first has batch_norm={norms[0]!r}, the second batch_norm={norms[1]!r}"
    if (casts := _casts(one, other)) is not None:
        return f"the first has {casts[0]}, the second {casts[1]}"
    for op, *_ in _SOURCES:
        if (told := _sources(one, other, op)) is not None:
            return f"the first has {shortened(told[0], 200)}, the second {shortened(told[1], 190)}"
    if (ends := _results(one, other)) is not None:
        return f"the first is of {shortened(ends[0], 350)}, the second {ends[1]}"
    return _first_difference(one, other)


def is_of(plan: PlanValue, graph: Graph) -> bool:
    """Whether a plan that runs already is one for this graph."""
    try:
        check(plan, graph, plan.mesh)
    except PlanMismatch:
        return False
    return True


def lies_as(plan: PlanValue, layouts: Mapping[str, Layout]) -> bool:
    """Whether the plan has these parameters, as far as it has them, in the layouts that they have."""
    return all(plan.parameters.get(name, layout) == layout for name, layout in layouts.items())


def check_rules(plan: PlanValue, origin: str = "the plan") -> None:
    """Raise PlanMismatch, naming the first operator, unless each is split as its rule has it: all that can be known of
    a plan where the model is not.
    """
    if (told := _no_strategy(plan)) is not None:
        raise PlanMismatch(f"{origin} was edited, or made by another autopar: {shortened(told)}; {AGAIN}")


def _no_strategy(plan: PlanValue) -> str | None:
    """The first operator that is split, or result that is delivered, as no rule has it; None where all are."""
    node_of, mesh = plan.graph.by_name, plan.mesh
    known: dict[object, Strategy | None] = {}
    for node in plan.graph.nodes:
        choice, types = plan.choices[node.name], operand_types(node, node_of)
        key = (
            signature_of(node, types),
            choice.roles,
            choice.gives,
            choice.stored,
            is_pattern(choice.body) and choice.body,
        )
        if key not in known:
            try:
                known[key] = _legal(node, types, choice, mesh)
            except NO_CALL as error:  # a rule reads the arguments by their places
                return f"%{node.name} ({node.op}) cannot be called like that ({type(error).__name__} in its rule)"
        right = known[key]
        ways = (choice.takes, choice.gives, choice.body, choice.body_axes, choice.body_size)
        if right is None or ways != (right.takes, right.gives, right.body, right.body_axes, right.body_size):
            return f"%{node.name} ({node.op}) is not computed as its rule says"
        if tuple(map(_untimed, choice.steps)) != right.steps:
            return f"%{node.name} ({node.op}) has other steps than its layouts make"
    held = {node.target: plan.choices[node.name].lies for node in plan.graph.nodes if node.op in HELD}
    for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True):
        if delivery is None:
            continue
        told = f"the {result.kind} {result.target} is delivered as nobody expects it"
        layout = delivery.lies(mesh)
        if result.kind == "gradient" and layout != held.get(result.target):
            return told
        if any(isinstance(placement, Partial) for placement in layout):
            return told
        is_whole = all(isinstance(placement, Replicate) for placement in layout)
        if not is_whole and (result.kind == "buffer" or (result.kind == "output" and plan.outputs == "global")):
            return told
    return None


def _untimed(step: Step) -> Step:
    """The step without the time that somebody measured, which is a claim as any other prediction. Loops have none."""
    return step if not isinstance(step, Compute) or step.seconds is None else replace(step, seconds=None)


def _legal(node: Node, types: tuple[TensorType, ...], choice: Choice, mesh: Mesh) -> Strategy | None:
    """The strategy that a choice has to be, by its roles, or of a source by its layout; None where there is none."""
    if node.is_source:
        given, apart = (choice.roles, choice.gives, choice.stored), bool(choice.stored)
        known = source_strategies(node, mesh, stored_apart=apart)
        return next((one for one in known if (one.roles, one.gives, one.stored) == given), None)
    if node.op in (STORE, FETCH):
        return moved(node, choice.gives[0], mesh)
    return strategy_of(node, types, choice.roles, mesh, choice.body)


def _batch_norms(ours: Graph, theirs: Graph) -> tuple[str, str] | None:
    """The statistics that batch norms take, where one graph has local ones and the other has the same norms without."""
    was, now = statistics_of(ours), statistics_of(theirs)
    return (was[0], now[0]) if was and now and was[0] != now[0] else None


# source, who brings it, what else could be done
_SOURCES = (
    ("input", "call", "pass what it was made for, or "),
    ("parameter", "model", "build the model it was made for, or "),
    ("buffer", "model", "build the model it was made for, or "),
    ("constant", "model", ""),
    ("tangent", "model", ""),
)


def _casts(ours: Graph, theirs: Graph) -> tuple[str, str] | None:
    """What the same parameters computed in, and compute in now, in words; None where that is the same."""
    was, now = precision.told(ours), precision.told(theirs)
    if was == now or _types(ours, "parameter") != _types(theirs, "parameter"):
        return None
    return was or "parameters that are not cast", now or "parameters that are not cast"


def _sources(ours: Graph, theirs: Graph, op: str) -> tuple[str, str] | None:
    """(what the plan has, what is there now) of the first source of this kind that differs."""
    was, now = _types(ours, op), _types(theirs, op)
    for name in was:
        if name not in now:
            new = [other for other in now if other not in was]
            return f"{op} {name} {was[name]}", f"has none of that name{f', but {op} {new[0]}' if new else ''}"
        if was[name] != now[name]:
            return f"{op} {name} {was[name]}", f"{'passes' if op == 'input' else 'has'} {now[name]}"
    for name in now:
        if name not in was:
            return f"{len(was)} {op}s without {name}", f"{'passes' if op == 'input' else 'has'} {name} {now[name]}"
    return None


def _cut(graph: Graph) -> tuple[object, ...]:
    """How a step is cut into micro-batches."""
    rounds, node_of = graph.rounds, graph.by_name
    stored = {node_of[name].target for name in rounds.stored}
    cut = sorted((node_of[name].target, dim) for name, dim in rounds.cut.items())
    return cut, rounds.joined, stored, rounds.reduces_once


def _types(graph: Graph, op: str) -> dict[str, TensorType | None]:
    if op == "parameter":
        return {node.target: graph.stored_type(node) for node in graph.nodes if node.op == op}
    return {node.target: _of_the_step(node, graph) for node in graph.nodes if node.op == op}


def _of_the_step(node: Node, graph: Graph) -> TensorType | None:
    """Type of a source as the user has it, who passes the parts of all micro-batches."""
    (type,) = node.outputs
    if type is None or node.name not in graph.rounds.cut:
        return type
    return replace(type, shape=graph.rounds.whole_shape(type.shape, graph.rounds.cut[node.name]))


def _results(ours: Graph, theirs: Graph) -> tuple[str, str] | None:
    """What the graph gives back: outputs, gradients of parameters, changed buffers."""

    def told(graph: Graph) -> dict[str, bool]:
        return {_end(result): result.ref is not None for result in graph.results}

    was, now = told(ours), told(theirs)
    for name in was:
        if was[name] and not now.get(name, False):
            return f"a model with {name}", "has none"
    for name in now:
        if now[name] and not was.get(name, False):
            return f"a model without {name}", "has it"
    return None


def _end(result: Result) -> str:
    match result.kind:
        case "output":
            return f"output {result.target}"
        case "gradient":
            return f"a gradient for {'argument' if result.target.startswith('[') else 'parameter'} {result.target}"
        case "buffer":
            return f"an update of buffer {result.target}"


def _operators(ours: Graph, theirs: Graph) -> str | None:
    """The first operator that differs, with the lines it came from; None where the programs are the same but for the
    order of operators that do not need each other: a model that goes over a set of names makes them in another order in
    each process.
    """
    if (told := _first_difference(ours, theirs)) is None or _same_in_another_order(ours, theirs):
        return None
    return told


def _first_difference(ours: Graph, theirs: Graph) -> str | None:
    was, now = list(_told(ours)), list(_told(theirs))
    for (node, mine), (other, yours) in zip(was, now, strict=False):
        if mine != yours:
            return f"{_where(node)} was {_call(node)}, now {_where(other)} is {_call(other)}"
    if len(was) != len(now):
        more, nodes = ("plan", was) if len(was) > len(now) else ("model", now)
        extra = nodes[min(len(was), len(now))][0]
        counts = f"it had {len(was)} operators, now there are {len(now)}"
        return f"{counts}; only the {more} has {_where(extra)}, {_call(extra)}"
    ends = [[(r.kind, r.target, r.ref and at[r.ref.name], r.ref and r.ref.index) for r in g.results] for g, at in (
        (ours, _places(ours)), (theirs, _places(theirs))
    )]  # fmt: skip
    for mine, yours in zip(*ends, strict=False):
        if mine != yours:
            return f"{mine[0]} {mine[1]} was another value than {yours[0]} {yours[1]} is now"
    return None


def _places(graph: Graph) -> dict[str, int | str]:
    """Operators by their number, sources by what they are: their order and names are of no account."""
    places: dict[str, int | str] = {}
    for node in graph.nodes:
        places[node.name] = f"{node.op} {node.target}" if node.is_source else len(places)
    count = 0
    for node in graph.nodes:
        if not node.is_source:
            places[node.name] = count
            count += 1
    return places


def _told(graph: Graph) -> Iterable[tuple[Node, object]]:
    places = _places(graph)

    def place(arg: Arg) -> str:
        def number(ref: Ref) -> tuple[int | str, int]:
            return places[ref.name], ref.index

        return repr(map_refs(arg, number))

    for node in graph.nodes:
        if not node.is_source:
            yield node, (node.op, place(node.args), place(node.kwargs), node.outputs, node.phase, node.target)


def _same_in_another_order(ours: Graph, theirs: Graph) -> bool:
    """Whether the graphs compute the same values, each as often, and give back the same ones."""
    number: dict[object, int] = {}

    def told(graph: Graph) -> tuple[Counter[int], Sequence[object]]:
        at: dict[str, int] = {}

        def value(ref: Ref) -> tuple[int, int]:
            return at[ref.name], ref.index

        for node in graph.nodes:
            if node.is_source:
                made: object = (node.op, node.target, node.outputs)  # an input may be there cut and whole
            else:
                args = map_refs(node.args, value)
                if node.op in _EITHER_WAY and len(node.operands) == len(node.args) == 2:
                    args = sorted(args)
                made = repr((node.op, args, map_refs(node.kwargs, value), node.outputs, node.phase, node.target))
            at[node.name] = number.setdefault(made, len(number))
        ends = [(r.kind, r.target, r.ref and value(r.ref)) for r in graph.results]
        return Counter(at.values()), ends

    return told(ours) == told(theirs)


def _where(node: Node) -> str:
    module, source = shortened(node.module or "the model", 100), shortened(node.source, 150)
    return f"{module} ({source})" if source else f"{module} %{shortened(node.name, 100)}"


def _call(node: Node) -> str:
    made = ", ".join(str(type) for type in node.outputs if type is not None)
    plain = [repr(arg) for arg in node.args if not isinstance(arg, Ref)]
    given = ", ".join([*(f"%{ref.name}" for ref in node.operands), *plain])[:80]
    return f"{shortened(node.op, 80)}({given}) -> {shortened(made, 150)}"
