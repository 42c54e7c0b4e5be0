"""What is emitted where nothing is trained."""

from __future__ import annotations

from autopar.ir.graph import Graph, Node
from autopar.ir.work import draws


def forward_only(graph: Graph) -> Graph:
    """The graph of inference: what the outputs and the mutated buffers need, without gradients. What forward draws and
    nobody reads is drawn, too: who draws next gets the numbers behind it.
    """
    results = tuple(result for result in graph.results if result.kind != "gradient")
    needed = {result.ref.name for result in results if result.ref is not None}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        is_drawn = node.phase == "forward" and draws(node)
        if is_drawn or node.name in needed or node.op in ("parameter", "buffer", "input"):
            kept.append(node)
            needed.update(ref.name for ref in node.operands)
    return Graph(tuple(reversed(kept)), results)
