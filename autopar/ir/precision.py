"""What the parameters of a graph compute in, and what their gradients are summed in: read off its casts."""

from __future__ import annotations

from autopar.ir.graph import Graph, Ref
from autopar.ir.work import FETCH

CAST, TO_REDUCE_DTYPE = "aten._to_copy.default", "autopar.to_reduce_dtype"


def told(graph: Graph) -> str:
    """The precision in words; "" where every parameter computes in the dtype in which it is stored."""
    node_of = graph.by_name
    casts: dict[str, None] = {}
    for name, dtype in graph.rounds.stored.items():
        casts[f"{dtype} parameters compute in {graph.type_of(Ref(name)).dtype}"] = None
    for node in graph.nodes:
        if node.op != CAST or node.phase != "forward" or (made := node.outputs[0]) is None:
            continue
        source = node_of[node.operands[0].name]
        source = node_of[source.operands[0].name] if source.op == FETCH else source
        if source.op == "parameter" and made.dtype != graph.type_of(node.operands[0]).dtype:
            casts[f"{graph.type_of(node.operands[0]).dtype} parameters compute in {made.dtype}"] = None
    if not casts:
        return ""
    sums = [node.outputs[0].dtype for node in graph.nodes if node.op == TO_REDUCE_DTYPE and node.outputs[0] is not None]
    summed = f"; gradients are summed in {' and '.join(dict.fromkeys(sums))}" if sums else ""
    return " and ".join(casts) + summed
