"""cast_once: a round of a step that reads parameters in the dtype in which it computes, cast in front of all rounds.

As it is traced, each round casts every parameter for itself (`autopar.trace.precision`), and each micro-batch in flight
in a pipeline would hold its own copies until its backward. They are alike in all rounds, so here a parameter that is
read through one cast alone *is* what that cast makes, and `Rounds.stored` says in which dtype it is stored. Its
gradient is as before.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from autopar.errors import NotCut
from autopar.ir.graph import Graph, Node, Ref, map_node
from autopar.ir.precision import CAST
from autopar.rewrite.micro_batches import in_rounds
from autopar.rewrite.one_loss import WITHOUT_PIPE, why_not_cut


def in_rounds_of_stages(graph: Graph, count: int) -> Graph:
    """`in_rounds`, for a step in pipeline stages: what can be done once a step is. Raises NotCut."""
    if (why := why_not_cut(graph, count, WITHOUT_PIPE)) is not None:
        raise NotCut(why)
    graph = cast_once(in_rounds(graph, count))
    return graph if count == 1 else replace(graph, rounds=replace(graph.rounds, reduces_once=True))


def cast_once(graph: Graph) -> Graph:
    """The same round; the graph itself where a step has one round, or casts no parameter."""
    if graph.rounds.count == 1:
        return graph
    casts = _casts(graph)
    if not casts:
        return graph
    instead = {Ref(cast.name): Ref(parameter) for parameter, made in casts.items() for cast in made}

    def read(ref: Ref) -> Ref:
        return instead.get(ref, ref)

    nodes: list[Node] = []
    for node in graph.nodes:
        if Ref(node.name) in instead:
            continue
        if node.name in casts:
            nodes.append(replace(node, outputs=casts[node.name][0].outputs))
            continue
        nodes.append(map_node(node, read))
    stored = {name: graph.type_of(Ref(name)).dtype for name in casts}
    return Graph(tuple(nodes), graph.results, replace(graph.rounds, stored=stored))


def _casts(graph: Graph) -> dict[str, list[Node]]:
    """Parameter -> the casts that are all that reads it, where they are alike and no result is one."""
    readers: dict[str, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        for name in dict.fromkeys(ref.name for ref in node.operands):
            readers[name].append(node)
    results = {result.ref.name for result in graph.results if result.ref is not None}
    found: dict[str, list[Node]] = {}
    for node in graph.nodes:
        read = readers[node.name] if node.op == "parameter" and node.name not in results else []
        if (
            read
            and all(one.op == CAST and one.name not in results for one in read)
            and len({one.outputs for one in read}) == 1
            and read[0].outputs != node.outputs
        ):
            found[node.name] = read
    return found
