"""What a program gives back, and whose memory it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autopar.assemble.liveness import holds_storage
from autopar.ir.graph import Graph, Node, Phase, Ref
from autopar.lower.listing import Listing
from autopar.lower.program import GIVEN, Buffer, Kind
from autopar.plan.plan import Plan
from autopar.plan.value import Decision
from autopar.price.reshard import Reshard

RESULT_KIND = {"gradient": Kind.GRADIENT, "output": Kind.OUTPUT, "buffer": Kind.NEW_BUFFER}
OWNER_OF_RESULT = {"gradient": "gradient of ", "output": "output ", "buffer": "new "}


def given_as_made(plan: Decision | Plan, moves: Callable[[Sequence[Reshard]], bool]) -> dict[Ref, tuple[Kind, str]]:
    """What is a result as it is made: for what, and whose. `moves`: whether layout changes make a new tensor."""
    found: dict[Ref, tuple[Kind, str]] = {}
    node_of = plan.graph.by_name
    for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True):
        if (ref := result.ref) is None or delivery is None or moves(delivery.changes):
            continue
        while not holds_storage((node := node_of[ref.name]).op) and not moves(plan.choices[node.name].reads[0]):
            ref = node.operands[0]
        found.setdefault(ref, (RESULT_KIND[result.kind], OWNER_OF_RESULT[result.kind] + result.target))
    return found


def joined(
    graph: Graph, results: Mapping[int, int], listing: Listing, phase: Phase, resident: list[Buffer]
) -> list[Buffer]:
    """Buffers of results of a round that go where the phase ends: gradients that the stage before gets behind backward,
    or the caller of the step; parts of outputs behind the forward. Beside what is put together there is room for the
    whole among the `resident`.
    """
    ended: list[Buffer] = []
    for place, value in results.items() if graph.rounds.count > 1 else ():
        result, buffers = graph.results[place], listing.values[value]
        if result.kind == "gradient" and phase == "backward" and not graph.adds_up(result):
            ended += buffers
            if (whole := graph.put_together(place)) is not None and result.ref is not None:
                pieces, type = sum(buffer.nbytes for buffer in buffers), graph.type_of(result.ref)
                owner = f"{OWNER_OF_RESULT['gradient']}{result.target} of all micro-batches"
                resident.append(Buffer(pieces * whole.nbytes // max(1, type.nbytes), Kind.GRADIENT, owner))
        elif (times := graph.rounds.times(place)) and phase == "forward":
            ended += buffers
            whole = times * sum(buffer.nbytes for buffer in buffers)
            resident.append(Buffer(whole, Kind.OUTPUT, f"output {result.target} of all micro-batches"))
    given = [buffer for buffer in ended if buffer.kind not in GIVEN]
    listing.keep(given)
    return given


def of_the_step_before(graph: Graph, results: Mapping[int, int], listing: Listing) -> list[Buffer]:
    """Outputs that a training loop still holds when it calls the next step."""
    place_of = {
        buffer: place
        for place in graph.held_outputs
        for buffer in listing.values[results[place]]
        if buffer.kind not in GIVEN or graph.rounds.times(place)  # those of all micro-batches are put together
    }
    return [
        Buffer(
            max(1, graph.rounds.times(place)) * buffer.nbytes,
            Kind.BEFORE,
            f"{OWNER_OF_RESULT['output']}{graph.results[place].target} of the step before",
        )
        for buffer, place in place_of.items()
    ]


def owner_of(node: Node) -> str:
    """Whose memory a node's results are, as a reader is told."""
    return f"{node.op} {node.target}" if node.is_source else told(node)


def told(node: Node) -> str:
    if node.is_source:
        return node.target
    return f"{node.name} ({node.module})" if node.module else node.name
