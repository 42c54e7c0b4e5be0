"""Which operators are in one pipeline stage, and which each stage that needs them runs its own of."""

from __future__ import annotations

from autopar.ir.graph import Graph, Node, Ref, weights_in
from autopar.ir.work import FETCH, draws

SHARE = "autopar.share"


def free_in(graph: Graph) -> frozenset[str]:
    """Operators of which each stage that needs them runs its own: of inputs alone, also in backward, where all layers
    may read the one copy of a table (rotary positions); in forward of parameters alone, and what brings such to
    backward. Of inputs that have a gradient shares alone: through all else it comes back.
    """
    weights, with_gradient = weights_in(graph), {node.name for node in graph.inputs_with_gradient}
    of_inputs = {node.name for node in graph.nodes if node.op in ("input", "buffer", "constant")} - with_gradient
    found, looks = set[str](), set[str]()
    for node in graph.nodes:
        if node.is_source or draws(node):
            continue
        if all(ref.name in of_inputs for ref in node.operands):
            of_inputs.add(node.name)
            found.add(node.name)
        elif node.phase == "forward" and node.op == SHARE and node.operands[0].name in with_gradient:
            looks.add(node.name)
        elif node.name in weights and (node.phase == "forward" or node.op == FETCH or node.target):
            found.add(node.name)
    return frozenset(found | looks)


def share_of(graph: Graph) -> dict[Ref, Ref]:
    """A value that forward makes, or is given -> its share, which several operators of forward read."""
    shares = (node for node in graph.nodes if node.op == SHARE and node.phase == "forward")
    return {node.operands[0]: Ref(node.name) for node in shares}


def looks_in(graph: Graph, free: frozenset[str]) -> frozenset[str]:
    """Shares that backward has of what is in one stage of forward: each stage that has the value looks at it itself."""
    node_of = graph.by_name
    shares = (node for node in graph.nodes if node.op == SHARE and node.phase == "backward" and node.name not in free)
    return frozenset(node.name for node in shares if node_of[node.operands[0].name].phase == "forward")


def is_placed(node: Node, free: frozenset[str]) -> bool:
    """Whether it is in one stage. `free`: those that are not (`free_in`)."""
    return node.name not in free and (not node.is_source or node.op == "tangent")
