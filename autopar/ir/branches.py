"""Which gradients there are in a step that takes some of forward's branches (`autopar.trace.branches`), not others."""

from __future__ import annotations

from collections.abc import Set

from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.work import VIEWS

SHARE, WHERE, AND = "autopar.share", "aten.where.self", "aten.bitwise_and.Tensor"


def idle(graph: Graph, given: Set[str], skipped: Set[str]) -> set[str]:
    """Parameters and inputs without a gradient in a step in which those of the `given` outputs arrive: no such output
    was made with them (a head whose output no loss was made of), or in `skipped` branches alone.
    """
    ever = graph.begins_at
    now = begins_at(graph, skipped) if skipped else ever
    return {name for name, begins in ever.items() if begins and now[name].isdisjoint(given)}


def begins_at(graph: Graph, skipped: Set[str]) -> dict[str, frozenset[str]]:
    """As `Graph.begins_at`, of a step that takes none of the `skipped` branches: outputs that count how often each is
    taken.
    """
    closed = {
        _counted(graph, result.ref.name).name for result in graph.results if result.target in skipped and result.ref
    }
    for node in graph.nodes:
        if _is_truth(node) and node.op in (*VIEWS, SHARE, AND) and any(ref.name in closed for ref in node.operands):
            closed.add(node.name)

    def reads(node: Node) -> tuple[Ref, ...]:
        condition, *rest = node.operands if node.op == WHERE and node.phase == "backward" else (None,)
        if condition is None or condition.name not in closed:
            return node.operands
        return tuple(rest[1:])  # what goes on where the condition is true does not

    return graph.begins_by(reads)


def _counted(graph: Graph, name: str) -> Node:
    """The truths that a number of them is of."""
    node = graph.by_name[name]
    while not _is_truth(node) or node.op == SHARE:
        node = graph.by_name[node.operands[0].name]
    return node


def _is_truth(node: Node) -> bool:
    return bool(node.outputs) and node.outputs[0] is not None and node.outputs[0].dtype == "bool"
