"""When each value lives: program points, storages and aliases.

Node number t of the graph runs at instant t; the optimizer steps at instant `len(nodes)`, the last one. A storage is
held from its node's instant until the last instant at which it, or a view of it, is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.graph import Graph
from autopar.work import VIEWS


@dataclass(frozen=True)
class Liveness:
    """`end_of[node]`: first instant at which the node's results (views of them included) are no longer held.

    `grad_at[parameter name]`: instant at which the parameter's gradient is made. `instants`: how many there are.
    """

    at: dict[str, int]
    end_of: dict[str, int]
    grad_at: dict[str, int]
    instants: int


def liveness(graph: Graph) -> Liveness:
    at = {node.name: instant for instant, node in enumerate(graph.nodes)}
    last = len(graph.nodes) + 1
    end_of = {node.name: at[node.name] + 1 for node in graph.nodes}
    grad_at: dict[str, int] = {}
    for result in graph.results:
        if result.ref is None:
            continue
        if result.kind == "gradient":
            grad_at[result.target] = at[result.ref.name]
        else:
            end_of[result.ref.name] = last
    for node in reversed(graph.nodes):
        # A view keeps the storage below it for as long as the view is held; any other reader until it has run.
        until = end_of[node.name] if node.op in VIEWS else at[node.name] + 1
        for ref in node.operands:
            end_of[ref.name] = max(end_of[ref.name], until)
    for node in graph.nodes:
        if node.op in ("parameter", "buffer", "constant"):
            end_of[node.name] = last
    return Liveness(at, end_of, grad_at, last)


def holds_storage(op: str) -> bool:
    """Whether a node's results are storage of their own, and not another look at an operand's."""
    return op not in VIEWS
