"""Indices that pick something of every row: `x[arange(batch), places]`, as classifiers and masks of padding have it.

The first index counts the rows of x, one after the other, so that rows of a part of x are picked by counting those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.graph import Graph, Node, Ref, TensorType
from autopar.ir.layout import REPLICATE, Layout, Partial, Shard
from autopar.propose.strategies import Strategy

ROWS = "rows"  # the role of such an index where rows are split
TERMS = "terms"  # the role of a part of the places
PUTS = ("aten.index_put.default", "aten._unsafe_index_put.default")
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


def by_terms(node: Node, graph: Graph) -> list[Strategy]:
    """Ways to add up the parts of what is added to zeros at some places, the gradient of `x[places]`: each part of the
    places adds its own, and the parts' sums are a sum.
    """
    if node.op not in PUTS or len(node.args) < 4 or not node.args[3]:
        return []
    zeros, listed, values = graph.by_name[node.args[0].name], node.args[1], node.args[2]
    if zeros.op != "aten.zeros.default" or not all(isinstance(one, Ref) for one in listed):
        return []
    shapes = {graph.type_of(ref).shape for ref in listed}
    if len(shapes) != 1 or any(graph.type_of(ref).dtype in ("bool", "uint8") for ref in listed):
        return []
    (shape,) = shapes
    if graph.type_of(values).shape[: len(shape)] != shape:
        return []
    cut: list[Layout] = [(Shard(dim),) for dim in range(len(shape))]
    return [
        Strategy((TERMS,), ((REPLICATE,), *(at for _ in listed), at), ((Partial("sum"),),), "", (), 1, ()) for at in cut
    ]


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
