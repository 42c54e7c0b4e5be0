"""What a program gives back, and whose memory it is."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Graph, Node, Phase
from autopar.lower.listing import Listing
from autopar.lower.program import GIVEN, Buffer, Kind

RESULT_KIND = {"gradient": Kind.GRADIENT, "output": Kind.OUTPUT, "buffer": Kind.NEW_BUFFER}
OWNER_OF_RESULT = {"gradient": "gradient of ", "output": "output ", "buffer": "new "}


def joined(
    graph: Graph, results: Mapping[int, int], listing: Listing, phase: Phase, resident: list[Buffer]
) -> list[Buffer]:
    """Buffers of results of a round that go where the phase ends: gradients that the stage before gets behind backward,
    parts of outputs behind the forward, beside which there is room for the whole among the `resident`.
    """
    ended: list[Buffer] = []
    for place, value in results.items() if graph.rounds.count > 1 else ():
        result, buffers = graph.results[place], listing.values[value]
        if result.kind == "gradient" and phase == "backward" and not graph.adds_up(result):
            ended += buffers
        elif (times := graph.rounds.times(place)) and phase == "forward":
            ended += buffers
            whole = times * sum(buffer.nbytes for buffer in buffers)
            resident.append(Buffer(whole, Kind.OUTPUT, f"output {result.target} of all micro-batches"))
    given = [buffer for buffer in ended if buffer.kind not in GIVEN]
    listing.keep(given)
    return given


def owner_of(node: Node) -> str:
    """Whose memory a node's results are, as a reader is told."""
    return f"{node.op} {node.target}" if node.is_source else told(node)


def told(node: Node) -> str:
    if node.is_source:
        return node.target
    return f"{node.name} ({node.module})" if node.module else node.name
