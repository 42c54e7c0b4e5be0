"""SUMMA in panels: a matrix product of which both operands and the result are split over two axes, and stay so.

    C = A B, AB(T), A(T) B      on p x q ranks, each of which has one block of A, of B, and of C

One of the three does not move. The two others share a factor that it lacks: along that one they are cut in panels, and
panel by panel an operand is gathered along its axis, and the result is reduce-scattered along its own:

    AB    C stays: A is gathered along the columns of ranks, B along the rows, and the products are added up
    ABT   A stays: B is gathered along the rows, and the terms of a panel of C are summed along the columns
    ATB   B stays: A is gathered along the columns, and the terms of a panel of C are summed along the rows

So no rank has more of any of them than its block, and the panels of two turns. The panel of the next turn is under way
beside the product of this one, the sum of the last one, too. The gradients of each form are the two others: of a linear
layer, y = x w(T) is ABT, dx = dy w is AB and dw = dy(T) x is ATB.

van de Geijn and Watts, "SUMMA: Scalable Universal Matrix Multiplication Algorithm" (1997); Xu and You, "An Efficient 2D
Method for Training Super-Large Deep Learning Models" (Optimus, IPDPS 2023), sections 2 and 3. They broadcast each panel
from the ranks that have it. Here a panel is a part of every rank's block: an all-gather moves the same bytes, and needs
no roots. Where the axes have two sizes, the factor is seen as lcm(p, q) blocks, and a panel is a part of each of them:
so the panels of A, from q ranks, and those of B, from p, are of the same rows, in the same order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.graph import Node, TensorType
from autopar.ir.layout import REPLICATE, Layout, Partial, local_type
from autopar.ir.mesh import Mesh
from autopar.rules.attended import copied, cut
from autopar.rules.builder import Value
from autopar.rules.looped import Collective, Do, Looped, Offer, Part
from autopar.rules.notation import Dim, Rule
from autopar.rules.products import (
    adding,
    dim_of,
    divide,
    factors,
    first_of_longest,
    lying,
    multiplying,
    room,
    rule_of_product,
    shard_of,
    step_of,
)
from cost_models.steps import over

PANELS = (2, 8)  # few turns for transfers to run beside products, or many for less memory
RESULT = 2  # the place of the result behind the two operands


def product(node: Node, types: tuple[TensorType, ...], mesh: Mesh) -> Iterator[Offer]:
    """On two axes: the first splits the batch, and so do all others; the second splits what is left."""
    rule, whole = rule_of_product(node, types), node.outputs[0]
    if rule is None or whole is None:
        return
    batch = first_of_longest(rule)
    with_batch = [place for place, dims in enumerate(_dims(rule)) if batch in factors(dims)]
    for first, second in itertools.combinations(range(len(mesh.sizes)), 2):
        if 1 in (mesh.sizes[first], mesh.sizes[second]) or batch not in rule.splittable:
            continue
        for stays, moves in (with_batch, with_batch[::-1]):
            for panels in PANELS:
                blocks = _blocks(node, types, rule, mesh, (first, second), (stays, moves), batch, panels)
                if blocks is not None:
                    yield blocks.offer()


def _dims(rule: Rule) -> tuple[tuple[Dim, ...], ...]:
    return (*map(tuple, rule.inputs), tuple(rule.outputs[0]))


def _blocks(
    node: Node, types: tuple[TensorType, ...], rule: Rule, mesh: Mesh, axes: tuple[int, int], places: tuple[int, int],
    batch: str, panels: int,
) -> _Blocks | None:  # fmt: skip
    """None where a size does not divide."""
    dims, (stays, moves) = _dims(rule), places
    (third,) = {0, 1, RESULT} - {*places}
    of = {place: [f for f in factors(dims[place]) if f != batch and f in rule.splittable] for place in range(3)}
    kept = next((f for f in of[stays] if f in of[third]), None)
    cutting = next((f for f in of[moves] if f in of[third]), None)
    if kept is None or cutting is None:
        return None
    blocks = _Blocks(node, types, rule, mesh, axes, stays, moves, third, batch, kept, cutting, panels)
    if not divide(blocks.whole, blocks.layouts, mesh):
        return None
    return blocks if rule.sizes[cutting] % (blocks.common * panels) == 0 else None


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Places of tensors: the operands are 0 and 1, the result is `RESULT`. On the first axis the one that `stays` and
    the one that `moves` along the second are split by the batch; on the second axis the one that stays and the `third`,
    which moves along the first, are split by `kept`. Both that move are split by `cutting` along which they do.
    """

    node: Node
    types: tuple[TensorType, ...]
    rule: Rule
    mesh: Mesh
    axes: tuple[int, int]
    stays: int
    moves: int
    third: int
    batch: str
    kept: str
    cutting: str
    panels: int

    @property
    def whole(self) -> tuple[TensorType, ...]:
        result = self.node.outputs[0]
        assert result is not None
        return (*self.types, result)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        first, second = self.axes
        here = {  # place -> what it is split by on the two axes
            self.stays: {first: self.batch, second: self.kept},
            self.moves: {first: self.batch, second: self.cutting},
            self.third: {first: self.cutting, second: self.kept},
        }

        def laid(place: int, dims: Sequence[Dim]) -> Layout:
            missing = Partial("sum") if place == RESULT else REPLICATE
            return tuple(
                REPLICATE if size == 1 else shard_of(dims, here[place].get(at, self.batch)) or missing
                for at, size in enumerate(self.mesh.sizes)
            )

        return tuple(laid(place, dims) for place, dims in enumerate(_dims(self.rule)))

    @property
    def form(self) -> str:
        if self.stays == RESULT:
            return "AB"
        return "ABT" if self.batch in factors(self.rule.outputs[0]) else "ATB"

    def offer(self) -> Offer:
        first, second = self.axes
        word = f"SUMMA {self.form}, {self.panels} panels"
        roles = [self.batch if size > 1 else "" for size in self.mesh.sizes]
        roles[first], roles[second] = f"{word}:{self.batch}", f"{word}:{self.kept}"
        *takes, gives = self.layouts
        axis = over([self.mesh.names[at] for at in self.axes])
        loop = self._adding_up() if self.stays == RESULT else self._summing()
        return Offer(tuple(roles), axis, tuple(takes), (gives,), loop)

    # --- types -------------------------------------------------------------------------------------------------------

    def local(self, place: int) -> TensorType:
        return local_type(self.whole[place], self.layouts[place], self.mesh)

    def dim(self, place: int) -> int:
        """Along which it is cut in panels."""
        dim = dim_of(_dims(self.rule)[place], self.cutting)
        assert dim is not None
        return dim

    def panel(self, place: int, ranks: int = 1) -> TensorType:
        """Of so many ranks, that dim in front."""
        type, dim = cut(self.local(place), self.dim(place), self.panels), self.dim(place)
        return TensorType((type.shape[dim] * ranks, *type.shape[:dim], *type.shape[dim + 1 :]), type.dtype)

    def axis(self, place: int) -> int:
        """Along which it moves."""
        return self.axes[1 if place == self.moves else 0]

    def ranks(self, place: int) -> int:
        return self.mesh.sizes[self.axis(place)]

    @property
    def common(self) -> int:
        """Blocks of the factor that is cut, of which each rank of either axis has some."""
        return math.lcm(*(self.mesh.sizes[axis] for axis in self.axes))

    def pieces(self, place: int) -> tuple[int, int, int]:
        """(dim, blocks that a rank has, panels): how a rank's part is cut."""
        return self.dim(place), self.common // self.ranks(place), self.panels

    # --- parts -------------------------------------------------------------------------------------------------------

    def fetch(self, place: int, makes: str, ahead: int = 0) -> Iterator[Part]:
        """The panel of all ranks along its axis, of the turn that is so many ahead."""
        own, ranks, axis = f"panel of {place}", self.ranks(place), self.mesh.names[self.axis(place)]

        def write(b: Any, turn: int, x: Value) -> Value:
            return b.call("autopar.panel", x, *self.pieces(place), turn + ahead)

        piece = self.panel(place)
        yield Do("panel", write, (str(place),), own, piece, copied(2, piece))
        yield Collective("all_gather", axis, ranks, own, makes, self.panel(place, ranks))

    def multiply(self, reads: dict[int, str], makes: str) -> Do:
        """The product of panels, and of the operand that stays as it is. `reads`: place -> panel."""
        times, names = multiplying(self.node), tuple(reads.get(place, str(place)) for place in (0, 1))

        def write(b: Any, turn: int, *values: Value) -> Value:
            return times(b, turn, *(
                b.call("aten.movedim.int", value, 0, self.dim(place)) if place in reads else value
                for place, value in enumerate(values)
            ))  # fmt: skip

        read = tuple(self.panel(at, self.ranks(at)) if at in reads else self.local(at) for at in (0, 1))
        step = step_of(self.node, self.types, read, self.made, self.panels * math.prod(self.mesh.sizes))
        return Do("multiply", write, names, makes, self.made, step, lies=lying(self.node, self.made))

    @property
    def made(self) -> TensorType:
        """What the product of a turn is."""
        result = self.local(RESULT)
        if self.stays == RESULT:
            return result
        dim = self.dim(RESULT)
        size = result.shape[dim] * self.ranks(RESULT) // self.panels
        return TensorType((*result.shape[:dim], size, *result.shape[dim + 1 :]), result.dtype)

    def terms(self, reads: dict[int, str], makes: str) -> Iterator[Part]:
        """Of a panel of the result, for all ranks along its axis."""
        dim = self.dim(RESULT)
        if dim == 0:
            yield self.multiply(reads, makes)
            return

        def write(b: Any, turn: int, made: Value) -> Value:
            return b.call("autopar.in_front", made, dim)

        front = self.panel(RESULT, self.ranks(RESULT))
        yield self.multiply(reads, "made")
        yield Do("in front", write, ("made",), makes, front, copied(2, front))

    def sum(self, reads: str, makes: str) -> Collective:
        axis = self.mesh.names[self.axis(RESULT)]
        return Collective("reduce_scatter", axis, self.ranks(RESULT), reads, makes, self.panel(RESULT))

    def place(self, reads: str, behind: int) -> Do:
        """In the result, the panel of the turn that is so many behind."""
        piece = self.panel(RESULT)

        def write(b: Any, turn: int, result: Value, made: Value) -> Value:
            return b.call("autopar.place_panel", result, made, *self.pieces(RESULT), turn - behind)

        return Do("place", write, ("result", reads), "result", None, copied(2, piece))

    # --- bodies ------------------------------------------------------------------------------------------------------

    def _adding_up(self) -> Looped:
        def fetched(called: str, ahead: int) -> Iterator[Part]:
            for place in (0, 1):
                yield from self.fetch(place, f"{called} {place}", ahead)

        def panels(called: str) -> dict[int, str]:
            return {place: f"{called} {place}" for place in (0, 1)}

        turn = self.multiply(panels("here"), "made"), adding("result", "made", self.made)
        return Looped(
            before=(*fetched("first", 0), *fetched("here", 1), self.multiply(panels("first"), "result")),
            rounds=self.panels - 2,
            round=(*fetched("next", 1), *turn),
            carried=tuple((f"here {place}", f"next {place}") for place in (0, 1)),
            after=turn,
            gives=("result",),
        )

    def _summing(self) -> Looped:
        other = 1 - self.stays
        return Looped(
            before=(
                *self.fetch(other, "first"), *self.fetch(other, "here", 1), *self.terms({other: "first"}, "terms"),
                room(str(self.stays), "result", self.local(RESULT)),
            ),
            rounds=self.panels - 2,
            round=(
                self.sum("terms", "come"), *self.fetch(other, "next", 1), *self.terms({other: "here"}, "next terms"),
                self.place("come", 1),
            ),
            carried=(("here", "next"), ("terms", "next terms")),
            after=(
                self.sum("terms", "come"), *self.terms({other: "here"}, "last terms"), self.place("come", 1),
                self.sum("last terms", "last"), self.place("last", 0),
            ),
            gives=("result",),
        )  # fmt: skip
