"""gathered_once: the graph in which every weight is gathered once, and kept whole until its last reader is through.

A weight that is read more than once is read through a node `autopar.share` right before the first of its readers, in
backward, too. A layout change in front of that node serves them all, and what it makes is held until backward has read
it for the last time: ZeRO-2, which torch calls SHARD_GRAD_OP. In the graph as it is traced each reader gathers for
itself. Weights are parameters and what is cast from them; what looks at one reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

from autopar.graph import Graph, Node, Ref, map_refs
from autopar.work import VIEWS

ONCE = (("once", True),)  # the keyword argument of a share node that was put there for this


def gathered_once(graph: Graph, but: Collection[str] = ()) -> Graph:
    """`but`: names of parameters that are left as they are."""
    first = {ref: names[0] for ref, names in _readers(graph, but).items() if len(names) > 1}
    taken = set(graph.by_name)
    instead: dict[Ref, Ref] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        for ref in dict.fromkeys(node.operands):
            if first.get(ref) == node.name:
                name = f"{ref.name}_once"
                while name in taken:
                    name += "_"
                taken.add(name)
                type = graph.type_of(ref)
                nodes.append(Node(name, "autopar.share", (ref,), ONCE, (type,), node.phase, "", node.module))
                instead[ref] = Ref(name)
        nodes.append(_reading(node, {} if _is_cast(node) else instead))
    return Graph(tuple(nodes), graph.results) if instead else graph


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


def _reading(node: Node, instead: Mapping[Ref, Ref]) -> Node:
    def change(ref: Ref) -> Ref:
        return instead.get(ref, ref)

    kwargs = tuple((key, map_refs(arg, change)) for key, arg in node.kwargs)
    return replace(node, args=map_refs(node.args, change), kwargs=kwargs)
