"""What a loss makes of labels alone, by nodes of its own, so that it can be had of all labels beside a loss of some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.graph import Arg, Const, Graph, Node, Ref, TensorType, map_node

LOSSES, ADDED_UP = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default"), 2


def counted(graph: Graph) -> Graph:
    """The same graph, in which the weights of all labels, by which a loss is divided, are added up by nodes of their
    own: of the labels alone, and not a second result of the loss.
    """
    used = {ref for node in graph.nodes for ref in node.operands if ref.index == 1}
    used |= {result.ref for result in graph.results if result.ref is not None and result.ref.index == 1}
    nodes: list[Node] = []
    instead: dict[Ref, Ref] = {}

    def read(ref: Ref) -> Ref:
        return instead.get(ref, ref)

    for node in graph.nodes:
        nodes.append(map_node(node, read))
        if node.op in LOSSES and node.args[3] == ADDED_UP and Ref(node.name, 1) in used:
            nodes += (made := _total_weight(node, graph))
            instead[Ref(node.name, 1)] = Ref(made[-1].name)
    results = tuple(replace(r, ref=None if r.ref is None else read(r.ref)) for r in graph.results)
    return replace(graph, nodes=tuple(nodes), results=results) if instead else graph


def _total_weight(loss: Node, graph: Graph) -> list[Node]:
    """The second result of the loss: how many labels count, or the sum of their weights."""
    _, target, weight, _, ignored = loss.args
    (shape, dtype), node_of = (graph.type_of(target).shape, graph.type_of(Ref(loss.name, 1)).dtype), graph.by_name
    made: list[Node] = []

    def add(op: str, args: tuple[Arg, ...], shape: tuple[int, ...], dtype: str, to: str = "") -> Ref:
        name = _free(f"{loss.name}_count{len(made)}", node_of)
        kwargs = (("dtype", Const("dtype", to)),) if to else ()
        made.append(replace(loss, name=name, op=op, args=args, kwargs=kwargs, outputs=(TensorType(shape, dtype),)))
        return Ref(name)

    if weight is None:
        counts = add("aten.ne.Scalar", (target, ignored), shape, "bool")
        counts = add("aten._to_copy.default", (counts,), shape, dtype, dtype)
    else:
        out = add("aten.eq.Scalar", (target, ignored), shape, "bool")
        known = add("aten.masked_fill.Scalar", (target, out, 0), shape, graph.type_of(target).dtype)
        column = add("aten.unsqueeze.default", (weight, 1), (*graph.type_of(weight).shape, 1), dtype)
        counts = add("aten.embedding.default", (column, known), (*shape, 1), dtype)
        out = add("aten.unsqueeze.default", (out, len(shape)), (*shape, 1), "bool")
        counts = add("aten.masked_fill.Scalar", (counts, out, 0), (*shape, 1), dtype)
    add("aten.sum.default", (counts,), (), dtype)
    return made


def _free(name: str, taken: Mapping[str, Node]) -> str:
    while name in taken:
        name += "_"
    return name
