"""What a stage of a pipeline wants of backward: that it reads what crosses a cut as it is, and runs in an order of its
own.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from autopar.ir.graph import Graph, Node, Ref, reading
from autopar.ir.work import FETCH, STORE


def kept(graph: Graph, values: Set[Ref]) -> Graph:
    """A graph that runs, in which backward reads these forward values as they were made, and does not run them again or
    fetch them, whatever was decided for them. What nobody reads any more is left out.
    """
    node_of, instead = graph.by_name, dict[Ref, Ref]()
    for node in graph.nodes:
        if node.phase != "backward" or node.is_source:
            continue
        if node.target:
            again = (Ref(node.target, at) for at in range(len(node.outputs)))
            instead |= {Ref(node.name, ref.index): ref for ref in again if ref in values}
        elif node.op == FETCH:
            stored = node_of[node.operands[0].name]
            if stored.op == STORE and stored.operands[0] in values:
                instead[Ref(node.name)] = stored.operands[0]
    if not instead:
        return graph

    nodes: list[Node] = []
    read = {result.ref.name for result in graph.results if result.ref is not None}
    for node in reversed(graph.nodes):
        is_way_back = node.op in (STORE, FETCH) or (node.phase == "backward" and bool(node.target))
        if is_way_back and not node.is_source and node.name not in read:  # nobody needs it any more
            continue
        nodes.append(reading(node, instead))
        read |= {ref.name for ref in nodes[-1].operands}
    return replace(graph, nodes=tuple(reversed(nodes)))


def with_first(graph: Graph, wanted: Set[str]) -> Graph:
    """The graph whose backward has what nodes of these names need in front of the rest."""
    needed = {*wanted}
    backward = [node for node in graph.nodes if node.phase == "backward"]
    for node in reversed(backward):
        if node.name in needed:
            needed |= {ref.name for ref in node.operands}
    first = [node for node in backward if node.name in needed or node.is_source]
    rest = [node for node in backward if node.name not in needed and not node.is_source]
    others = [node for node in graph.nodes if node.phase != "backward"]
    return replace(graph, nodes=(*others, *first, *rest))
