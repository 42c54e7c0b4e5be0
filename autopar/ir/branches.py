"""Which gradients there are in a step that takes some of forward's branches (`autopar.trace.branches`), not others."""

from __future__ import annotations

from collections.abc import Set

from autopar.ir.graph import Graph, Node
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
    found: dict[str, frozenset[str]] = {}
    for node in graph.nodes:
        reads = [ref.name for ref in node.operands]
        if not closed.isdisjoint(reads) and _is_truth(node) and node.op in (*VIEWS, SHARE, AND):
            closed.add(node.name)
        if node.op == WHERE and node.phase == "backward" and reads[0] in closed:
            del reads[1]  # what goes on to where the condition is true
        own = (node.target,) if node.op == "tangent" else ()
        found[node.name] = frozenset(own).union(*(found[name] for name in reads))
    ends = (one for one in graph.results if one.kind == "gradient" and one.ref is not None)
    return {one.target: found[one.ref.name] for one in ends if one.ref is not None}


def _counted(graph: Graph, name: str) -> Node:
    """The truths that a number of them is of."""
    node = graph.by_name[name]
    while not _is_truth(node) or node.op == SHARE:
        node = graph.by_name[node.operands[0].name]
    return node


def _is_truth(node: Node) -> bool:
    return bool(node.outputs) and node.outputs[0] is not None and node.outputs[0].dtype == "bool"
