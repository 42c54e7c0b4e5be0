"""The ring product: a matrix product of which one operand comes round in pieces, beside the work on the one before.

    b s k, n k -> b s n      x split along s, w along n, both over one axis of g ranks; the result is split along n

To gather x and multiply takes room for all of x, and no product runs before the last piece is there. Instead, each rank
multiplies the piece that it has while it passes it on to the next one, g times. The rows come out where they belong:
rank r has in turn t the piece r - t (mod g). Where the two operands share what is split (b s n, b s k -> n k), each
piece meets its part of the other operand, and the products are added up.

Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models" (ASPLOS
2023), sections 4 and 5: the all-gather side, in one direction of the ring.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Node, TensorType
from autopar.ir.layout import REPLICATE, Layout, Partial, Placement, local_type
from autopar.ir.mesh import Mesh
from autopar.rules.attended import cut
from autopar.rules.looped import Do, Looped, Offer, Part, Shift
from autopar.rules.notation import Dim, Rule
from autopar.rules.products import (
    adding,
    axes_of_rings,
    dim_of,
    divide,
    factors,
    laid_out,
    lying,
    multiplying,
    placing,
    room,
    step_of,
    taking,
    turns_among,
)

NAME = "ring"


@dataclass(frozen=True, slots=True)
class _Ring:
    """Operand `moving` goes round along `axis`, split by the factor `rows`; the other one is split by `columns`."""

    node: Node
    types: tuple[TensorType, ...]
    rule: Rule
    mesh: Mesh
    moving: int
    axis: int
    rows: str
    columns: str
    roles: tuple[str, ...]  # of the other axes; "" of this one


def product(node: Node, types: tuple[TensorType, ...], mesh: Mesh) -> Iterator[Offer]:
    """A ring along each axis, for each of the operands that may go round; all other axes split the batch."""
    for rule, axis, moving, roles in axes_of_rings(node, types, mesh):
        if (ring := _ring(node, types, rule, mesh, moving, axis, roles)) is not None:
            yield _offer(ring)


def _ring(
    node: Node, types: tuple[TensorType, ...], rule: Rule, mesh: Mesh, moving: int, axis: int, roles: tuple[str, ...]
) -> _Ring | None:
    """By the last factor but one that divides: the last dim is what a product sums over, or makes columns of."""
    mine, other, result = rule.inputs[moving], rule.inputs[1 - moving], rule.outputs[0]
    columns = next((f for f in factors(other) if f in factors(result) and f not in factors(mine)), None)
    if columns is None:
        return None
    for rows in reversed(factors(mine[:-1])):
        ring = _Ring(node, types, rule, mesh, moving, axis, rows, columns, roles)
        inside = any(role == rows for role in roles[axis + 1 :])  # then its pieces would not lie side by side
        if not inside and {rows, columns, *filter(None, roles)} <= {*rule.splittable} and _divides(ring):
            return ring
    return None


def _layouts(ring: _Ring) -> tuple[tuple[Layout, ...], Layout]:
    """(of the operands, of the result)."""
    split = (ring.rows, ring.columns) if ring.moving == 0 else (ring.columns, ring.rows)

    def laid(dims: Sequence[Dim], here: str, missing: Placement) -> Layout:
        return laid_out(dims, [here if at == ring.axis else role for at, role in enumerate(ring.roles)], missing)

    takes = tuple(laid(dims, here, REPLICATE) for dims, here in zip(ring.rule.inputs, split, strict=True))
    return takes, laid(ring.rule.outputs[0], ring.columns, Partial("sum"))


def _divides(ring: _Ring) -> bool:
    takes, gives = _layouts(ring)
    result, ranks = ring.node.outputs[0], ring.mesh.sizes[ring.axis]
    assert result is not None
    if not divide((*ring.types, result), (*takes, gives), ring.mesh):
        return False
    beside = math.prod(size for role, size in zip(ring.roles, ring.mesh.sizes, strict=True) if role == ring.rows)
    return ring.rule.sizes[ring.rows] % (ranks * beside) == 0


def _offer(ring: _Ring) -> Offer:
    takes, gives = _layouts(ring)
    role = f"{ring.moving}:{ring.rows}>{ring.columns}"
    roles = tuple(role if at == ring.axis else other for at, other in enumerate(ring.roles))
    return Offer(roles, ring.mesh.names[ring.axis], takes, (gives,), _loop(ring, takes, gives))


def _loop(ring: _Ring, takes: Sequence[Layout], gives: Layout) -> Looped:
    ranks, moving, rule = ring.mesh.sizes[ring.axis], ring.moving, ring.rule
    local = [local_type(type, layout, ring.mesh) for type, layout in zip(ring.types, takes, strict=True)]
    whole = ring.node.outputs[0]
    assert whole is not None
    result = local_type(whole, gives, ring.mesh)
    shared, written = dim_of(rule.inputs[1 - moving], ring.rows), dim_of(rule.outputs[0], ring.rows)
    here, there = str(moving), str(1 - moving)
    piece, met = local[moving], local[1 - moving] if shared is None else cut(local[1 - moving], shared, ranks)
    made = result if written is None else cut(result, written, ranks)
    pair = (piece, met) if moving == 0 else (met, piece)
    multiply = step_of(ring.node, ring.types, pair, made, turns_among(ring.axis, ring.roles, ring.mesh))

    times, lies = multiplying(ring.node, swapped=moving == 1), lying(ring.node, made)

    def on(mine: str, first: bool) -> Iterator[Part]:
        """What is done with one piece."""
        other = there
        if shared is not None:
            yield taking(shared, ranks, there, "met", met)
            other = "met"
        if written is not None:
            yield Do("multiply", times, (mine, other), "made", made, multiply, lies=lies)
            yield placing(written, ranks, "result", "made", made)
        elif first:
            yield Do("multiply", times, (mine, other), "result", made, multiply, lies=lies)
        else:
            yield Do("multiply", times, (mine, other), "made", made, multiply, lies=lies)
            yield adding("result", "made", made)

    rooms = () if written is None else (room(here, "result", result),)
    return Looped(
        before=(Shift(here, "piece", piece), *rooms, *on(here, first=True)),
        rounds=ranks - 2,
        round=(Shift("piece", "next", piece), *on("piece", first=False)),
        carried=(("piece", "next"),),
        after=tuple(on("piece", first=False)),
        gives=("result",),
    )
