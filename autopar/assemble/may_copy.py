"""Which operands products may have to copy, whatever plan is found (`autopar.rules.lie`).

How an operand lies depends on all layouts before it, which a search does not know yet: a layout change makes a value
contiguous, and whoever comes behind finds it so. So each value has all the ways to lie that it may have, contiguous
among them, and a product may copy what it would copy in one of them. What a plan copies, `autopar.lower` finds out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autopar.ir.graph import Graph, Ref
from autopar.ir.strides import Placed, Shape, Strides, contiguous
from autopar.rewrite import Again
from autopar.rules.lie import EINSUM, copied, lie

Ways = tuple[Strides, ...]
MOST = 8  # ways of one value that are followed up


def may_copy(graph: Graph, again: Mapping[str, Again]) -> dict[str, tuple[int, ...]]:
    """Product -> the places of the operands that it may copy. A value that comes back (`again`) lies as its origin."""
    ways: dict[Ref, Ways] = {}
    found: dict[str, tuple[int, ...]] = {}
    for node in graph.nodes:
        if (back := again.get(node.name)) is not None:
            for index in range(len(node.outputs)):
                if (ref := Ref(back.origin, index)) in ways:
                    ways[Ref(node.name, index)] = ways[ref]
            if back.origin in found:
                found[node.name] = found[back.origin]
            continue
        shapes = [None if type is None else type.shape for type in node.outputs]
        made: list[dict[Strides, None]] = [{} if shape is None else {contiguous(shape): None} for shape in shapes]
        places: set[int] = set()
        for operands in _together([(graph.type_of(ref).shape, ways[ref]) for ref in node.operands]):
            if node.op == EINSUM:
                places.update(copied(node, operands))
            for one, strides, shape in zip(made, lie(node, operands, shapes), shapes, strict=True):
                if shape is not None and len(one) < MOST:
                    one[strides] = None
        ways |= {Ref(node.name, index): tuple(one) for index, one in enumerate(made) if one}
        if places:
            found[node.name] = tuple(sorted(places))
    return found


def _together(operands: Sequence[tuple[Shape, Ways]]) -> Iterator[list[Placed]]:
    """Each way of each operand, beside the first way of the others and beside the last one."""
    for beside in (0, -1):
        yield [(shape, ways[beside]) for shape, ways in operands]
    for place, (shape, ways) in enumerate(operands):
        if len(ways) > 1:
            for beside in (0, -1):
                for one in ways:
                    others: list[Placed] = [(of, given[beside]) for of, given in operands]
                    others[place] = shape, one
                    yield others
