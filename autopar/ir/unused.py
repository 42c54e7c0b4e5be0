"""Nodes that nothing needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopar.ir.graph import Graph, Node, Result
from autopar.ir.work import draws


def used(nodes: Sequence[Node], results: Iterable[Result], *, with_draws: bool) -> tuple[Node, ...]:
    """Those that results need, sources that the caller passes in, and, `with_draws`, what forward draws: the next draw
    is of what the generator is then.
    """
    needed = {result.ref.name for result in results if result.ref is not None}
    kept: list[Node] = []
    for node in reversed(nodes):
        is_given = node.is_source and node.op not in ("constant", "tangent")
        is_drawn = with_draws and node.phase == "forward" and draws(node)
        if node.name in needed or is_given or is_drawn:
            kept.append(node)
            needed.update(ref.name for ref in node.operands)
    return tuple(reversed(kept))


def without_idle_draws(graph: Graph) -> Graph:
    """Without what is drawn and read by nobody: where nobody is to draw as one process does."""
    return replace(graph, nodes=used(graph.nodes, graph.results, with_draws=False))
