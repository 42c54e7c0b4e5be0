"""mm, bmm and addmm become `autopar.einsum` over the dims their operands had before views merged them.

    view(x, [b*s, k]) @ t(w)  ->  view(b*s, n) of einsum("b s k, n k -> b s n")

Without this, sequence and head dims are invisible behind a merged dim and sequence parallelism cannot be found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.ir.graph import Node, Ref, TensorType
from autopar.trace.builder import Builder, common_dims, merged_dims

LETTERS = "bskhndmpqruvwxyzacefgijlot"
TRANSPARENT = ("aten.view.default", "aten.permute.default", "aten.clone.default")


@dataclass(frozen=True)
class _Operand:
    """A matrix seen through views: for each of its dims the dims of `base` that make it up, major first."""

    base: Ref
    groups: tuple[tuple[int, ...], ...]


def _through_views(b: Builder, node: Node, ref: Ref, merges: bool) -> list[_Operand]:
    """`ref` itself, then ever deeper below permutes (and, if asked, merging views): the last is the deepest.

    A view that merges other dims than there are is one that splits some, which is as deep as it goes, and one that
    merges those.
    """
    ndim = len(b.type(ref).shape)
    seen = [_Operand(ref, tuple((dim,) for dim in range(ndim)))]
    while True:
        last = seen[-1]
        maker = b.definition(last.base)
        if maker.op not in TRANSPARENT:
            return seen
        below = maker.operands[0]
        if maker.op == "aten.permute.default":
            groups = tuple(tuple(maker.args[1][dim] for dim in group) for group in last.groups)
        elif maker.op == "aten.clone.default":
            groups = last.groups
        else:
            shape = b.type(last.base).shape
            merged = merged_dims(b.type(below).shape, shape) if merges else None
            if merges and merged is None and (common := common_dims(b.type(below).shape, shape)) not in (None, shape):
                assert common is not None
                merged, below = merged_dims(common, shape), b.view(node, below, common)
            if merged is None:
                return seen
            groups = tuple(tuple(base for dim in group for base in merged[dim]) for group in last.groups)
        seen.append(_Operand(below, groups))


def matrix_product(b: Builder, node: Node, left: Ref, right: Ref, batch: bool) -> Ref:
    """left @ right (with a leading batch dim if `batch`) as an einsum, then a view to the shape of the product."""
    out = node.outputs[0]
    assert out is not None
    for merges in (True, False):
        for a in _candidates(b, node, left, merges, contracted=2 if batch else 1):
            for c in _candidates(b, node, right, merges, contracted=1 if batch else 0):
                made = _einsum(b, node, a, c, batch)
                if made is not None:
                    return b.view(node, made, out.shape)
    raise AssertionError(f"%{node.name}: operands of a matrix product do not fit")


def _candidates(b: Builder, node: Node, ref: Ref, merges: bool, contracted: int) -> list[_Operand]:
    """Ways to see a matrix, deepest first; each also with the contracted dim left merged, if a view merged it.

    Attention's result [b, s, h, d] meets a projection's weight [h * d, n]: heads stay merged, the rest need not.
    """
    found: list[_Operand] = []
    for operand in reversed(_through_views(b, node, ref, merges)):
        found.append(operand)
        group = operand.groups[contracted]
        if len(group) > 1 and group == tuple(range(group[0], group[-1] + 1)):
            first, last = group[0], group[-1]
            shape = b.type(operand.base).shape
            merged = (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])
            place = {dim: dim if dim <= first else max(first, dim - (last - first)) for dim in range(len(shape))}
            groups = tuple(tuple(dict.fromkeys(place[dim] for dim in dims)) for dims in operand.groups)
            found.append(_Operand(b.view(node, operand.base, merged), groups))
    return found


def _sizes(b: Builder, operand: _Operand, dim: int) -> tuple[int, ...]:
    shape = b.type(operand.base).shape
    return tuple(shape[d] for d in operand.groups[dim] if shape[d] != 1)


def _einsum(b: Builder, node: Node, a: _Operand, c: _Operand, batch: bool) -> Ref | None:
    """None where the two views cut the contracted (or batch) dim differently."""
    first = 1 if batch else 0
    if _sizes(b, a, first + 1) != _sizes(b, c, first) or (batch and _sizes(b, a, 0) != _sizes(b, c, 0)):
        return None
    letters = iter(LETTERS)
    names: dict[tuple[int, int], str] = {}
    shape_a, shape_c = b.type(a.base).shape, b.type(c.base).shape

    def fresh(which: int, operand: _Operand, dim: int) -> list[str]:
        shape = shape_a if which == 0 else shape_c
        return [names.setdefault((which, d), "1" if shape[d] == 1 else next(letters)) for d in operand.groups[dim]]

    def follow(dim_a: int, dim_c: int) -> None:
        known = [names[0, d] for d in a.groups[dim_a] if shape_a[d] != 1]
        for d in c.groups[dim_c]:
            names[1, d] = "1" if shape_c[d] == 1 else known.pop(0)

    result: list[tuple[str, int]] = []
    if batch:
        result += zip(fresh(0, a, 0), (shape_a[d] for d in a.groups[0]), strict=True)
        follow(0, 0)
    result += zip(fresh(0, a, first), (shape_a[d] for d in a.groups[first]), strict=True)
    fresh(0, a, first + 1)
    follow(first + 1, first)
    result += zip(fresh(1, c, first + 1), (shape_c[d] for d in c.groups[first + 1]), strict=True)
    term_a = " ".join(names[0, d] for d in range(len(shape_a)))
    term_c = " ".join(names[1, d] for d in range(len(shape_c)))
    equation = f"{term_a}, {term_c} -> {' '.join(letter for letter, _ in result)}"
    type = TensorType(tuple(size for _, size in result), b.type(a.base).dtype)
    return b.call(node, "autopar.einsum", (equation, a.base, c.base), type, name="einsum")
