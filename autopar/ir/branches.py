"""Which gradients there are in a step that takes some of forward's branches (`autopar.trace.branches`), not others."""

from __future__ import annotations

from collections.abc import Sequence, Set

from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.work import VIEWS

SHARE, WHERE, AND = "autopar.share", "aten.where.self", "aten.bitwise_and.Tensor"
MOST_KNOWN = 64  # sets of branches that steps have not taken
PRODUCTS = frozenset(("aten.mul.Tensor", "aten.mm.default", "aten.bmm.default", "autopar.einsum"))
OF_THE_FIRST = frozenset(("aten.div.Tensor", "aten.div.Scalar", "aten.mul.Scalar", "aten._to_copy.default"))
SUMS = frozenset(
    (
        SHARE, "aten.add.Tensor", "aten.sub.Tensor", "aten.neg.default", "aten.sum.default", "aten.sum.dim_IntList",
        "aten.mean.default", "aten.mean.dim", "aten.cat.default", "aten.clone.default",
    )
)  # fmt: skip


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
    key, known = frozenset(skipped), graph.begins_without
    if key not in known:
        if len(known) == MOST_KNOWN:
            known.clear()
        known[key] = _begins_at(graph, key)
    return known[key]


def _begins_at(graph: Graph, skipped: Set[str]) -> dict[str, frozenset[str]]:
    closed = {
        _counted(graph, result.ref.name).name for result in graph.results if result.target in skipped and result.ref
    }
    nothing = set[str]()  # what is zero there as it is made of what is not, in a model that has no such branch
    for node in graph.nodes:
        names = [ref.name for ref in node.operands]
        if _is_truth(node) and node.op in (*VIEWS, SHARE, AND) and any(name in closed for name in names):
            closed.add(node.name)
        elif _is_nothing(graph, node, names, closed, nothing):
            nothing.add(node.name)

    def reads(node: Node) -> tuple[Ref, ...]:
        if node.name in nothing:
            return ()
        condition, *rest = node.operands if node.op == WHERE and node.phase == "backward" else (None,)
        if condition is None or condition.name not in closed:
            return node.operands
        return tuple(rest[1:])  # what goes on where the condition is true does not

    return graph.begins_by(reads)


def _is_nothing(graph: Graph, node: Node, names: Sequence[str], closed: Set[str], nothing: Set[str]) -> bool:
    """Whether a node gives zeros that are guarded by a branch that is not taken, or products with such."""
    if node.op == WHERE:
        condition, *sides = names
        sides = sides[-1:] if condition in closed else sides
        is_guarded = condition in closed or not nothing.isdisjoint(sides)
        return is_guarded and all(name in nothing or _is_zero(graph.by_name[name]) for name in sides)
    if node.op in PRODUCTS:
        return any(name in nothing for name in names)
    if node.op in OF_THE_FIRST or "_backward." in node.op:
        return bool(names) and names[0] in nothing
    if node.op in SUMS or node.op in VIEWS:
        return bool(names) and all(name in nothing for name in names)
    return False


def _is_zero(node: Node) -> bool:
    return node.op in ("aten.scalar_tensor.default", "aten.full.default") and node.args[-1] == 0


def _counted(graph: Graph, name: str) -> Node:
    """The truths that a number of them is of."""
    node = graph.by_name[name]
    while not _is_truth(node) or node.op == SHARE:
        node = graph.by_name[node.operands[0].name]
    return node


def _is_truth(node: Node) -> bool:
    return bool(node.outputs) and node.outputs[0] is not None and node.outputs[0].dtype == "bool"
