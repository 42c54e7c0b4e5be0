"""Indices that pick something of every row: `x[arange(batch), places]`, as classifiers and masks of padding have it.

The first index counts the rows of x along one of its dims, one after the other, so that rows of a part of x are picked
by counting those.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.ir.graph import Graph, Node, Ref, TensorType
from autopar.ir.layout import REPLICATE, Layout, Partial, Shard
from autopar.propose.strategies import Strategy

ROWS = "rows"  # the role of such an index where rows are split
TERMS = "terms"  # the role of a part of the places
PUTS = ("aten.index_put.default", "aten._unsafe_index_put.default")
INDICES_AT = {"aten.index.Tensor": 1, "aten.index_put.default": 1}
LOOKS = ("autopar.share", "aten.view.default", "aten.unsqueeze.default", "aten.clone.default", "aten.expand.default")


def counting(ref: Ref, graph: Graph) -> tuple[Node, int] | None:
    """The `arange(n)` that the value is another look at, and the dim along which it counts; None: it is none."""
    node = graph.by_name[ref.name]
    if node.op == "aten.arange.default" and len(node.args) == 1:
        return node, 0
    if node.op == "aten.arange.start_step" and node.args[0] == 0 and node.args[2:] in ((), (1,)):
        return node, 0
    found = counting(node.operands[0], graph) if node.op in LOOKS else None
    if found is None:
        return None
    count, dim = found
    had, has = graph.type_of(node.operands[0]).shape, graph.type_of(ref).shape
    if node.op == "aten.expand.default":
        return count, dim + len(has) - len(had)
    if had == has:
        return found
    rows = had[dim]
    if math.prod(has) == rows:  # others are of one element
        return count, has.index(rows)
    if dim == 0 and has[0] == rows:
        return count, 0
    return (count, len(has) - 1) if dim == len(had) - 1 and has[-1] == rows else None


def by_rows(node: Node, graph: Graph) -> Strategy | None:
    """The way to run such an index on a part of the rows, along one axis of the mesh; None: it is no such index."""
    at = INDICES_AT.get(node.op)
    if at is None or not isinstance(node.args[at][0], Ref):
        return None
    first, *others = (ref for ref in node.args[at] if isinstance(ref, Ref))
    rows, shape = graph.type_of(node.args[0]).shape[0], graph.type_of(first).shape
    rank = max(len(graph.type_of(ref).shape) for ref in (first, *others))
    if len(shape) != rank or (found := counting(first, graph)) is None or shape[found[1]] != rows:
        return None
    _, dim = found

    def taken(ref: Ref, dims: int) -> Layout:
        has = graph.type_of(ref).shape
        own = dim - dims + len(has)  # of fewer dims the first are of one element
        return (Shard(own),) if own >= 0 and has[own] == rows else (REPLICATE,)

    takes: list[Layout] = [(Shard(0),), (REPLICATE,), *(taken(ref, rank) for ref in others)]
    (type,) = node.outputs
    assert type is not None
    is_put = node.op == "aten.index_put.default"
    if is_put:
        written = rank + len(type.shape) - 1 - len(others)
        takes.append(taken(node.args[2], written))
    if len(takes) != len(node.operands):
        return None
    return Strategy((ROWS,), tuple(takes), ((Shard(0 if is_put else dim),),), "", (), 1, ())


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


def counted_rows(node: Node, rows: int, graph: Graph) -> tuple[Node, ...]:
    """The index with so many rows of its own, behind the nodes that count them. `node`: with its operands as the
    part has them; `graph`: in which it was.
    """
    first = graph.by_name[node.name].args[INDICES_AT[node.op]][0]
    found, type = counting(first, graph), graph.type_of(first)
    assert found is not None
    count, dim = found
    made = [
        replace(
            count, name=f"{node.name}_rows", op="aten.arange.default", args=(rows,), phase=node.phase,
            outputs=(TensorType((rows,), type.dtype),),
        )
    ]  # fmt: skip
    whole = tuple(rows if place == dim else size for place, size in enumerate(type.shape))
    for op, shape in (("view", tuple(rows if place == dim else 1 for place in range(len(whole)))), ("expand", whole)):
        look = Node(
            f"{node.name}_{op}_by_row", f"aten.{op}.default", (Ref(made[-1].name), shape), (),
            (TensorType(shape, type.dtype),), node.phase, module=node.module, source=node.source, outside=node.outside,
        )  # fmt: skip
        made += [look] if look.outputs != made[-1].outputs else []
    _, *others = node.args[1]
    return *made, replace(node, args=(node.args[0], (Ref(made[-1].name), *others), *node.args[2:]))
