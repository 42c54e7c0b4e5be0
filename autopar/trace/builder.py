"""Builds a graph node by node, with the small algebra that keeps it canonical: views of views, permutes of permutes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.graph import Arg, Const, Graph, Node, Ref, Result, TensorType
from autopar.ir.unused import used
from autopar.ir.work import RANDOM


class Builder:
    """The graph under construction. Every method that makes a value returns its Ref."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._node_of: dict[str, Node] = {}
        self._known: dict[tuple[str, str, str], str] = {}
        self._numbered: dict[str, int] = {}  # name -> the number of the last node that had to be numbered

    def type(self, ref: Ref) -> TensorType:
        found = self._node_of[ref.name].outputs[ref.index]
        assert found is not None, ref
        return found

    def definition(self, ref: Ref) -> Node:
        return self._node_of[ref.name]

    def keep(self, node: Node) -> str:
        """Add `node`, or find an equal one of the same phase (common subexpressions; never random operators)."""
        key = (node.op, node.phase, repr((node.args, node.kwargs)))  # 1, 1.0 and True are equal, but not the same
        if not node.is_source and not node.op.startswith(RANDOM):
            if key in self._known:
                return self._known[key]
            self._known[key] = node.name
        if node.name in self._node_of:
            number = self._numbered.get(node.name, 1)  # no name is given back: smaller numbers are still taken
            while f"{node.name}_{number}" in self._node_of:
                number += 1
            self._numbered[node.name] = number
            node = replace(node, name=f"{node.name}_{number}")
            self._known[key] = node.name
        self.nodes.append(node)
        self._node_of[node.name] = node
        return node.name

    def call(
        self, like: Node, op: str, args: tuple[Arg, ...], *outputs: TensorType | None, name: str = "", **kwargs: Arg
    ) -> Ref:
        """Apply `op`; phase and origin are those of `like`."""
        name = name or op.split(".")[1]
        return Ref(
            self.keep(replace(like, name=name, op=op, args=args, kwargs=tuple(sorted(kwargs.items())), outputs=outputs))
        )

    def view(self, like: Node, ref: Ref, shape: Sequence[int]) -> Ref:
        """`ref` in another shape; a view of a view is one view, a view to the same shape is none."""
        shape = tuple(shape)
        while (base := self.definition(ref)).op == "aten.view.default":
            ref = base.operands[0]
        if self.type(ref).shape == shape:
            return ref
        return self.call(like, "aten.view.default", (ref, shape), TensorType(shape, self.type(ref).dtype))

    def permute(self, like: Node, ref: Ref, order: Sequence[int]) -> Ref:
        """`ref` with its dims in another order; permutes compose, the identity disappears."""
        order = tuple(order)
        while (base := self.definition(ref)).op == "aten.permute.default":
            inner = base.args[1]
            order = tuple(inner[dim] for dim in order)
            ref = base.operands[0]
        type = self.type(ref)
        if order == tuple(range(len(order))):
            return ref
        return self.call(
            like, "aten.permute.default", (ref, order), TensorType(tuple(type.shape[d] for d in order), type.dtype)
        )

    def pointwise(self, like: Node, op: str, *args: Arg, dtype: str | None = None, name: str = "") -> Ref:
        """A pointwise operator with broadcasting; numbers may stand among the operands."""
        types = [self.type(arg) for arg in args if isinstance(arg, Ref)]
        shape: list[int] = []
        for position in range(-max(len(t.shape) for t in types), 0):
            sizes = [t.shape[position] for t in types if len(t.shape) >= -position]
            shape.append(next((size for size in sizes if size != 1), 1))
        return self.call(like, op, args, TensorType(tuple(shape), dtype or types[0].dtype), name=name)

    def sum(self, like: Node, ref: Ref, dims: Sequence[int], keepdim: bool = False) -> Ref:
        type = self.type(ref)
        dims = tuple(sorted(dim % len(type.shape) for dim in dims))
        if keepdim:
            shape = tuple(1 if dim in dims else size for dim, size in enumerate(type.shape))
        else:
            shape = tuple(size for dim, size in enumerate(type.shape) if dim not in dims)
        return self.call(like, "aten.sum.dim_IntList", (ref, dims, keepdim), TensorType(shape, type.dtype))

    def sum_through_view(self, like: Node, ref: Ref, dims: Sequence[int], keepdim: bool) -> Ref:
        """Sum over dims that a view has merged: sum over the dims it merged, so that each stays one dim."""
        view = self.definition(ref)
        type = self.type(ref)
        if view.op == "aten.view.default" and (groups := merged_dims(self.type(view.operands[0]).shape, type.shape)):
            base_dims = [base for dim in dims for base in groups[dim % len(type.shape)]]
            summed = self.sum(like, view.operands[0], base_dims)
            kept = tuple(dim % len(type.shape) for dim in dims)
            shape = tuple(
                1 if dim in kept else size for dim, size in enumerate(type.shape) if keepdim or dim not in kept
            )
            return self.view(like, summed, shape)
        return self.sum(like, ref, dims, keepdim)

    def finish(self, results: Sequence[Result]) -> Graph:
        """The graph without what nothing needs."""
        return Graph(used(self.nodes, results, with_draws=True), tuple(results))


def merged_dims(base: tuple[int, ...], merged: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
    """For a view that only merges neighbouring dims: the base dims of each dim; else None."""
    groups: list[tuple[int, ...]] = []
    at = 0
    for size in merged:
        group: list[int] = []
        total = 1
        while at < len(base) and (total < size or not group):
            total *= base[at]
            group.append(at)
            at += 1
        if total != size:
            return None
        groups.append(tuple(group))
    while at < len(base) and base[at] == 1 and groups:
        groups[-1] += (at,)
        at += 1
    return tuple(groups) if at == len(base) and math.prod(base) == math.prod(merged) and base else None


def common_dims(base: tuple[int, ...], view: tuple[int, ...]) -> tuple[int, ...] | None:
    """The fewest dims that both shapes of as many elements are merges of: (12, 32) and (96, 4) of (12, 8, 4); None if
    there are none.
    """
    if math.prod(base) != math.prod(view) or not math.prod(base):
        return None
    ends = sorted({math.prod(shape[: at + 1]) for shape in (base, view) for at in range(len(shape))})
    if any(end % before for before, end in itertools.pairwise(ends)):
        return None
    return tuple(end // before for before, end in itertools.pairwise([1, *ends]) if end != before)


CONTIGUOUS = Const("memory_format", "contiguous_format")
