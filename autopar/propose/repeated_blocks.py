"""Repeated blocks: nodes that play the same part in each of several equal layers form one class.

A layer is a child with a number for a name (`model.layers.3`) that has modules of its own. Tying the nodes of a
class to
one strategy is a restriction of the problem, never an error: every member has the same strategies, costs and layouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from autopar.ir.graph import Graph, Node
from autopar.propose.strategies import Signature, operand_types, signature_of


def classes_of(graph: Graph, *, tied: bool, without: Collection[str] = ()) -> dict[str, str]:
    """Node name -> name of the first node of its class. Untied, every node is alone. Nodes `without` a class are left
    out.
    """
    nodes = [node for node in graph.nodes if node.name not in without]
    if not tied:
        return {node.name: node.name for node in nodes}
    node_of = graph.by_name
    blocks = blocks_of(graph)
    leader: dict[object, str] = {}
    counts: dict[object, int] = defaultdict(int)
    class_of: dict[str, str] = {}
    for node in nodes:
        pattern, instance = _pattern(_module_of(node), blocks)
        if not instance:
            class_of[node.name] = node.name
            continue
        leaf = node.target.rsplit(".", 1)[-1] if node.is_source else ""
        signature: Signature = signature_of(node, operand_types(node, node_of))
        part = (pattern, leaf, node.phase, signature)
        ordinal = counts[part, instance]
        counts[part, instance] += 1
        class_of[node.name] = leader.setdefault((part, ordinal), node.name)
    return class_of


def _module_of(node: Node) -> str:
    if node.op in ("parameter", "buffer"):
        return node.target.rpartition(".")[0]
    return node.module


def blocks_of(graph: Graph) -> frozenset[str]:
    """Paths of the layers that may repeat."""
    return _blocks([_module_of(node) for node in graph.nodes])


def block_of(path: str, blocks: frozenset[str]) -> str:
    """The outermost layer that a module's path lies in; "" outside all of them."""
    parts = path.split(".")
    layers = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return next((layer for layer in layers if layer in blocks), "")


def _blocks(paths: list[str]) -> frozenset[str]:
    """Numbered modules that have modules below them: the layers that may repeat."""
    found: set[str] = set()
    for path in set(paths):
        parts = path.split(".")
        found.update(".".join(parts[: i + 1]) for i, part in enumerate(parts[:-1]) if part.isdigit())
    return frozenset(found)


def _pattern(path: str, blocks: frozenset[str]) -> tuple[str, str]:
    """(`model.layers.*.mlp`, `3`) for `model.layers.3.mlp`; the second is empty outside any block."""
    parts = path.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit() and ".".join(parts[: i + 1]) in blocks]
    pattern = ".".join("*" if i in numbers else part for i, part in enumerate(parts))
    return pattern, ".".join(parts[i] for i in numbers)
