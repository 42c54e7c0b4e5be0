"""decide: the solver's picks become a `Plan`, which the referee prices again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autopar.assemble.problem import Assembled, output_name
from autopar.decide.picks import settled
from autopar.decide.referee import refereed
from autopar.ir.graph import HELD, Graph, Result
from autopar.ir.layout import REPLICATE
from autopar.plan import Choice, Delivery, Plan
from autopar.price.pricer import Pricer
from autopar.propose.strategies import Strategy, operand_types


def choose(
    graph: Graph, pick: Callable[[str], Strategy], pricer: Pricer
) -> tuple[dict[str, Choice], tuple[Delivery | None, ...]]:
    """Spell every choice out: strategies, and the layout changes between them."""
    node_of = graph.by_name
    strategy_of = {node.name: pick(node.name) for node in graph.nodes}
    held = {node.target: strategy_of[node.name] for node in graph.nodes if node.op in HELD}
    choices: dict[str, Choice] = {}
    for node in graph.nodes:
        strategy = strategy_of[node.name]
        reads = tuple(
            pricer.resharder.path(type, strategy_of[ref.name].gives[ref.index], takes)
            for ref, type, takes in zip(node.operands, operand_types(node, node_of), strategy.takes, strict=True)
        )
        choices[node.name] = Choice(
            strategy.roles,
            strategy.takes,
            strategy.gives,
            strategy.body,
            strategy.body_axes,
            strategy.body_size,
            strategy.steps,
            reads,
            strategy.stored,
        )

    trained = {node.target for node in graph.trained}

    def deliver(result: Result) -> Delivery | None:
        if result.ref is None:
            return None
        type, gives = graph.type_of(result.ref), strategy_of[result.ref.name].gives[result.ref.index]
        match result.kind:
            case "gradient":
                layout, lies = held[result.target].gives[0], held[result.target].lies
                if lies != layout:
                    return Delivery((), gives, pricer.scattered_once(type, gives, layout, lies))
                if result.target in trained and (once := pricer.summed_once(type, gives, layout)):
                    return Delivery((), gives, once)
                return Delivery(pricer.delivery(type, gives, layout), layout)
            case "output":
                layout = pick(output_name(result.target)).gives[0]
            case "buffer":
                layout = (REPLICATE,) * len(pricer.mesh.sizes)
        return Delivery(pricer.resharder.path(type, gives, layout), layout)

    return choices, tuple(deliver(result) for result in graph.results)


def decide(
    graph: Graph,
    assembled: Assembled,
    picks: Sequence[int],
    pricer: Pricer,
    *,
    objective: float,
    bound: float,
    memory: float | None,
    outputs: str,
    notes: Sequence[str],
    search: Mapping[str, float | int | str],
) -> Plan:
    """The plan of the solver's picks, refereed. Raises RefereeError where objective and price, or memory and limit,
    disagree.
    """
    found = settled(graph, assembled, picks, pricer.mesh)
    choices, deliveries = choose(found.graph, found.pick, pricer)
    return refereed(
        found.graph, choices, deliveries, pricer,
        objective=objective, bound=bound, memory=memory, outputs=outputs, notes=notes, search=search,
        residence=found.residence,
    )  # fmt: skip
