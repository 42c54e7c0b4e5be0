"""Graphs in which every weight is gathered once: nodes `autopar.share` say how long what was gathered is kept whole.

gathered_once   before its first reader, to its last one in backward: ZeRO-2, which torch calls SHARD_GRAD_OP
kept_whole      at the start of the step, to the end of backward, and so are gradients before they are reduced: ZeRO-1,
                whose gather stands at the start of the step here, in the place of the end of the one before

A weight is read through such a node, in backward, too. A layout change in front of it serves all readers, and what it
makes is held until the last of them is through. In the graph as it is traced each reader gathers for itself. Weights
are parameters and what is cast from them; what looks at one reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

from autopar.ir.graph import Graph, Node, Phase, Ref, map_node
from autopar.ir.work import VIEWS

ONCE = (("once", True),)  # the keyword argument of a share node that was put there for this


def gathered_once(graph: Graph, but: Collection[str] = ()) -> Graph:
    """`but`: names of parameters that are left as they are."""
    first = {ref: names[0] for ref, names in _readers(graph, but).items() if len(names) > 1}
    added = _Added(graph)
    nodes: list[Node] = []
    for node in graph.nodes:
        for ref in dict.fromkeys(node.operands):
            if first.get(ref) == node.name:
                nodes.append(added.share(ref, "once", node.phase, node.module))
        nodes.append(added.reading(node))
    return Graph(tuple(nodes), graph.results, graph.rounds) if added.instead else graph


def kept_whole(graph: Graph, but: Collection[str] = ()) -> Graph:
    """`but`: names of parameters that are left as they are, gradients included."""
    weights, added, node_of = _readers(graph, but), _Added(graph), graph.by_name
    begin = next((place for place, node in enumerate(graph.nodes) if not node.is_source), 0)
    nodes: list[Node] = []
    for place, node in enumerate(graph.nodes):
        if place == begin:
            nodes += [added.share(ref, "once", "forward") for ref in weights if node_of[ref.name].is_source]
        nodes.append(added.reading(node))
        if (made := Ref(node.name)) in weights and not node.is_source:  # a cast
            nodes.append(added.share(made, "once", node.phase, node.module))
    late = _Added(Graph(tuple(nodes), graph.results, graph.rounds))
    gradients = {r.target: r.ref for r in graph.results if r.kind == "gradient" and r.target not in but}
    nodes += [late.share(ref, "whole", "backward") for ref in dict.fromkeys(gradients.values()) if ref is not None]
    results = [
        replace(result, ref=late.instead[result.ref])
        if result.kind == "gradient" and result.ref is not None and result.target in gradients
        else result
        for result in graph.results
    ]
    if gradients:  # behind them weights are needed no more: share nodes that nobody reads
        nodes += [late.share(ref, "until", "backward") for ref in added.instead.values()]
    return Graph(tuple(nodes), tuple(results), graph.rounds)


def is_gathered_once(node: Node) -> bool:
    return node.op == "autopar.share" and node.kwargs == ONCE


def _is_cast(node: Node) -> bool:
    return node.op == "aten._to_copy.default"


def _readers(graph: Graph, but: Collection[str]) -> Mapping[Ref, list[str]]:
    """Weight -> who reads it; a cast reads it where it is stored, which makes another weight."""
    weights: set[str] = set()
    looks: set[str] = set()  # at weights
    found: dict[Ref, list[str]] = defaultdict(list)
    for node in graph.nodes:
        is_made_of_them = bool(node.operands) and all(ref.name in weights or ref.name in looks for ref in node.operands)
        if (node.op == "parameter" and node.target not in but) or (is_made_of_them and _is_cast(node)):
            weights.add(node.name)
            continue
        if is_made_of_them and node.op in VIEWS:
            looks.add(node.name)
        for ref in dict.fromkeys(node.operands):
            if ref.name in weights:
                found[ref].append(node.name)
    return found


class _Added:
    """Share nodes that are put into a graph. `instead`: what is shared -> what is read in its place."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.taken = graph, set(graph.by_name)
        self.instead: dict[Ref, Ref] = {}

    def share(self, ref: Ref, suffix: str, phase: Phase, module: str = "") -> Node:
        name = f"{ref.name}_{suffix}"
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        self.instead[ref] = Ref(name)
        return Node(name, "autopar.share", (ref,), ONCE, (self.graph.type_of(ref),), phase, "", module)

    def reading(self, node: Node) -> Node:
        """The node, reading what is shared; a cast reads a weight where it is stored."""

        def change(ref: Ref) -> Ref:
            return ref if _is_cast(node) else self.instead.get(ref, ref)

        return map_node(node, change)
