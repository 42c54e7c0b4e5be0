"""`as_strided` without memory: torch writes it where it knows how a tensor lies there, a graph of values does not.

What a plan computes lies in memory as each rank has made it, so places counted in memory have no meaning. The strides
of the trace, which are those that torch chose the operator for, say which elements are meant. Where each element is
reached once, that is a permute to the order in memory, a view and a permute back:

    x [n c h w], in memory n h w c  ->  [n h w c]  ->  [n h*w c]  ->  [n c h*w]

Else (windows that overlap) the operator stays, on a copy that lies in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from autopar.ir.graph import Const, Node, Ref, TensorType
from autopar.trace.capture import TraceError

READ, WRITE = "aten.as_strided.default", "aten.as_strided_scatter.default"
# What makes a tensor with strides, its last argument, and what makes one without.
MADE = {
    "aten.new_empty_strided.default": "aten.new_empty.default",
    "aten.empty_strided.default": "aten.empty.memory_format",
}


def without_memory(fx_node: torch.fx.Node, node: Node) -> list[Node]:
    """The nodes that stand for `node`, lowered from `fx_node`: itself, unless it counts places in memory.

    The last one has its name. Raises TraceError where it reaches for elements that its operand has not.
    """
    if node.op in MADE:
        return [replace(node, op=MADE[node.op], args=node.args[:-1])]
    if node.op not in (READ, WRITE):
        return [node]
    base: torch.Tensor = fx_node.args[0].meta["val"]  # type: ignore[union-attr]
    size, stride, offset = _window(fx_node, base)
    order = in_memory(base.shape, base.stride())
    last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    if order is None or offset < 0 or (0 not in size and last >= base.numel()):
        raise TraceError(
            f"{node.source or node.module}: as_strided with sizes {tuple(size)} and strides {tuple(stride)} reaches "
            f"beyond its operand, which has sizes {tuple(base.shape)} and strides {base.stride()}; write it "
            "with slices or indices"
        )
    window = in_memory(size, stride)
    chain = _Chain(node)
    if window is not None and torch.Size(size).numel() == base.numel():
        if node.op == READ:
            return chain.views(node.operands[0], base.shape, order, size, window)
        return chain.views(node.operands[1], size, window, base.shape, order)  # all of the base is overwritten
    flat = tuple(base.shape[dim] for dim in order)
    dense = chain.add("aten.permute.default", node.operands[0], order, flat)
    dense = chain.add("aten.clone.default", dense, None, flat)
    args = (dense, *node.operands[1:], tuple(size), tuple(stride), offset)
    if node.op == READ:
        return [*chain.nodes, replace(node, args=args)]
    written = replace(node, name=f"{node.name}_flat", args=args, outputs=(TensorType(flat, chain.dtype),))
    chain.nodes.append(written)
    back = tuple(order.index(dim) for dim in range(len(order)))
    chain.add("aten.permute.default", Ref(written.name), back, tuple(base.shape), last=True)
    return chain.nodes


def _window(fx_node: torch.fx.Node, base: torch.Tensor) -> tuple[Sequence[int], Sequence[int], int]:
    """Sizes, strides and offset, counted from the first element of the base, of what is read or written."""
    place = 1 if str(fx_node.target) == READ else 2
    given = {place + index: value for index, value in enumerate(fx_node.args[place:])}
    size, stride = (given.get(place, fx_node.kwargs.get("size")), given.get(place + 1, fx_node.kwargs.get("stride")))
    offset = given.get(place + 2, fx_node.kwargs.get("storage_offset"))
    return size, stride, 0 if offset is None else offset - base.storage_offset()  # type: ignore[return-value, operator]


def in_memory(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """The dims as they lie in memory, nearest elements last; dims of size one, which lie nowhere, first. None where
    elements overlap or leave gaps.
    """
    real = sorted((dim for dim, count in enumerate(size) if count != 1), key=lambda dim: -stride[dim])
    expected = 1
    for dim in reversed(real):
        if stride[dim] != expected and 0 not in size:
            return None
        expected *= size[dim]
    return (*(dim for dim, count in enumerate(size) if count == 1), *real)


class _Chain:
    """Nodes that follow one another in the place of one node."""

    def __init__(self, node: Node) -> None:
        (type,) = node.outputs
        assert type is not None
        self.node, self.dtype, self.nodes = node, type.dtype, list[Node]()

    def add(self, op: str, ref: Ref, arg: tuple[int, ...] | None, shape: tuple[int, ...], *, last: bool = False) -> Ref:
        name = self.node.name if last else f"{self.node.name}_step{len(self.nodes)}"
        args = (ref,) if arg is None else (ref, arg)
        kwargs = (("memory_format", Const("memory_format", "contiguous_format")),) if arg is None else ()
        outputs = (TensorType(shape, self.dtype),)
        self.nodes.append(replace(self.node, name=name, op=op, args=args, kwargs=kwargs, outputs=outputs))
        return Ref(name)

    def views(
        self, ref: Ref, have: Sequence[int], order: tuple[int, ...], want: Sequence[int], into: tuple[int, ...]
    ) -> list[Node]:
        """`ref`, of shape `have` with dims lying in `order`, as a value of shape `want` with dims lying as `into`."""
        lying = self.add("aten.permute.default", ref, order, tuple(have[dim] for dim in order))
        between = tuple(want[dim] for dim in into)
        lying = self.add("aten.view.default", lying, between, between)
        back = tuple(into.index(dim) for dim in range(len(into)))
        self.add("aten.permute.default", lying, back, tuple(want), last=True)
        return self.nodes
