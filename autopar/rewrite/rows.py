"""Indices that pick something of every row: `x[arange(batch), places]`, as classifiers and masks of padding have it.

The first index counts the rows of x, one after the other, so that rows of a part of x are picked by counting those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.graph import Graph, Node, Ref, TensorType
from autopar.ir.layout import REPLICATE, Layout, Shard
from autopar.propose.strategies import Strategy

ROWS = "rows"  # the role of such an index where rows are split
INDICES_AT = {"aten.index.Tensor": 1, "aten.index_put.default": 1}
LOOKS = ("autopar.share", "aten.view.default", "aten.unsqueeze.default", "aten.clone.default")


def counting(ref: Ref, node_of: Mapping[str, Node]) -> Node | None:
    """The `arange(n)` that the value is another look at; None: it is none."""
    node = node_of[ref.name]
    while node.op in LOOKS:
        node = node_of[node.operands[0].name]
    if node.op == "aten.arange.default" and len(node.args) == 1:
        return node
    return node if node.op == "aten.arange.start_step" and node.args[0] == 0 and node.args[2:] in ((), (1,)) else None


def by_rows(node: Node, graph: Graph) -> Strategy | None:
    """The way to run such an index on a part of the rows, along one axis of the mesh; None: it is no such index."""
    at = INDICES_AT.get(node.op)
    if at is None or not isinstance(node.args[at][0], Ref):
        return None
    first, *others = (ref for ref in node.args[at] if isinstance(ref, Ref))
    rows, shape = graph.type_of(node.args[0]).shape[0], graph.type_of(first).shape
    rank = max(len(graph.type_of(ref).shape) for ref in (first, *others))
    lies_first = len(shape) == rank and shape[0] == rows and all(size == 1 for size in shape[1:])
    if counting(first, graph.by_name) is None or not lies_first:
        return None

    def taken(ref: Ref, dims: int) -> Layout:
        has = graph.type_of(ref).shape
        return (Shard(0),) if len(has) == dims and has[0] == rows else (REPLICATE,)

    takes: list[Layout] = [(Shard(0),), (REPLICATE,), *(taken(ref, rank) for ref in others)]
    (type,) = node.outputs
    assert type is not None
    if node.op == "aten.index_put.default":
        written = rank + len(type.shape) - 1 - len(others)
        takes.append(taken(node.args[2], written))
    if len(takes) != len(node.operands):
        return None
    return Strategy((ROWS,), tuple(takes), ((Shard(0),),), "", (), 1, ())


def counted_rows(node: Node, rows: int, graph: Graph) -> tuple[Node, Node, Node]:
    """The index with so many rows of its own, behind the two nodes that count them. `node`: with its operands as the
    part has them; `graph`: in which it was.
    """
    first = graph.by_name[node.name].args[INDICES_AT[node.op]][0]
    found, type = counting(first, graph.by_name), graph.type_of(first)
    assert found is not None
    count = replace(
        found, name=f"{node.name}_rows", op="aten.arange.default", args=(rows,), phase=node.phase,
        outputs=(TensorType((rows,), type.dtype),),
    )  # fmt: skip
    shape = (rows, *type.shape[1:])
    look = Node(
        f"{node.name}_by_row", "aten.view.default", (Ref(count.name), shape), (), (TensorType(shape, type.dtype),),
        node.phase, module=node.module, source=node.source, outside=node.outside,
    )  # fmt: skip
    _, *others = node.args[1]
    return count, look, replace(node, args=(node.args[0], (Ref(look.name), *others), *node.args[2:]))
