"""The ring product whose sum goes round: a matrix product and a reduce-scatter of it, beside each other.

    b s k, n k -> b s n      x and w split along k, over one axis of g ranks; the result is split along s, or along n

To multiply and reduce-scatter takes room for all terms of the sum, and nothing is sent before the last of them is
there. Instead, each rank makes its term of one piece of the result at a time, and adds it to what the others have
summed up of that piece, which comes round behind it: in turn t it has the piece r - t - 1 (mod g), so that after g
turns, and g - 1 shifts, the sum of each piece is where it belongs.

Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models" (ASPLOS
2023), sections 4 and 5: the reduce-scatter side, in one direction of the ring. In Megatron-LM and in torch it goes by
the name of asynchronous tensor parallelism, matmul-reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.graph import Node, TensorType
from autopar.ir.layout import REPLICATE, Layout, Partial, local_type
from autopar.ir.mesh import Mesh
from autopar.rules.attended import cut
from autopar.rules.looped import Do, Looped, Offer, Part, Shift
from autopar.rules.notation import Rule
from autopar.rules.products import (
    adding,
    axes_of_rings,
    dim_of,
    divide,
    factors,
    laid_out,
    lying,
    multiplying,
    step_of,
    taking,
    turns_among,
)


def product(node: Node, types: tuple[TensorType, ...], mesh: Mesh) -> Iterator[Offer]:
    """A ring along each axis, its result split by rows of either operand; all other axes split the batch."""
    for rule, axis, cutting, beside in axes_of_rings(node, types, mesh):
        if (ring := _ring(node, types, rule, mesh, cutting, axis, beside)) is not None:
            role = f"{ring.summed}>{cutting}:{ring.rows}"
            roles = tuple(role if at == axis else other for at, other in enumerate(beside))
            yield Offer(roles, mesh.names[axis], ring.takes, (ring.gives,), _loop(ring))


@dataclass(frozen=True, slots=True)
class _Ring:
    """The factor `summed` is split along the axis, of both operands; the result by `rows`, of the operand `cutting`."""

    node: Node
    types: tuple[TensorType, ...]
    rule: Rule
    mesh: Mesh
    cutting: int
    axis: int
    summed: str
    rows: str
    beside: tuple[str, ...]  # roles of the other axes; "" of this one

    @property
    def takes(self) -> tuple[Layout, ...]:
        return tuple(laid_out(dims, self._roles(self.summed), REPLICATE) for dims in self.rule.inputs)

    @property
    def gives(self) -> Layout:
        """The other axes sum, too, where the batch is summed: each has its term."""
        return laid_out(self.rule.outputs[0], self._roles(self.rows), Partial("sum"))

    def _roles(self, here: str) -> list[str]:
        return [here if at == self.axis else role for at, role in enumerate(self.beside)]

    @property
    def ranks(self) -> int:
        return self.mesh.sizes[self.axis]

    def divides(self) -> bool:
        result = self.node.outputs[0]
        assert result is not None
        return divide((*self.types, result), (*self.takes, self.gives), self.mesh)


def _ring(
    node: Node, types: tuple[TensorType, ...], rule: Rule, mesh: Mesh, cutting: int, axis: int, beside: tuple[str, ...]
) -> _Ring | None:
    """Of what both operands have the first factor that divides, and the last one of the rows: as rows lie in memory.

    Where axes behind this one split the rows, too, its pieces do not lie side by side.
    """
    mine, other, result = rule.inputs[cutting], rule.inputs[1 - cutting], rule.outputs[0]
    summed = [f for f in factors(mine) if f in factors(other) and f in rule.splittable]
    rows = [f for f in reversed(factors(mine)) if f in factors(result) and f in rule.splittable]
    if not {*filter(None, beside)} <= {*rule.splittable}:
        return None
    for one, row in ((one, row) for one in summed for row in rows if row not in beside[axis + 1 :]):
        ring = _Ring(node, types, rule, mesh, cutting, axis, one, row, beside)
        if ring.divides():
            return ring
    return None


def _loop(ring: _Ring) -> Looped:
    rule, ranks, whole = ring.rule, ring.ranks, ring.node.outputs[0]
    assert whole is not None
    mine, there = (
        local_type(ring.types[place], ring.takes[place], ring.mesh) for place in (ring.cutting, 1 - ring.cutting)
    )
    rows, result = dim_of(rule.inputs[ring.cutting], ring.rows), local_type(whole, ring.gives, ring.mesh)
    assert rows is not None
    piece = cut(mine, rows, ranks)
    read = (piece, there) if ring.cutting == 0 else (there, piece)
    step = step_of(ring.node, ring.types, read, result, turns_among(ring.axis, ring.beside, ring.mesh))
    times = multiplying(ring.node, swapped=ring.cutting == 1)

    def term(makes: str) -> Iterator[Part]:
        """Of the piece for which the sum comes in this turn."""
        yield taking(rows, ranks, str(ring.cutting), "rows", piece, ahead=1)
        yield Do("multiply", times, ("rows", str(1 - ring.cutting)), makes, result, step, lies=lying(ring.node, result))

    def turn(makes: str) -> tuple[Part, ...]:
        return Shift("sum", "come", result), *term(makes), adding(makes, "come", result)

    return Looped(
        before=tuple(term("sum")),
        rounds=ranks - 2,
        round=turn("next"),
        carried=(("sum", "next"),),
        after=turn("result"),
        gives=("result",),
    )
