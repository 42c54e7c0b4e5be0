"""The zigzag ring: context parallelism (`autopar.rules.context`) in which every rank does as much.

Contiguous rows are unequal work, as the last ones see all keys. So rank r of R gives the later half of its rows to its
mirror rank R - 1 - r, of queries, keys and values, and takes that of the mirror rank; results go back so. Of the 2 R
halves of blocks it then has 2 r and 2 R - 1 - 2 r, an early one and a late one, which see 2 R between them. Layouts
stay as they are: nothing outside of the operator knows.

Its own two halves, the earlier one first, are a causal square. Of another rank's two, the late queries always see the
early keys. If the other's early half is earlier, the early queries see it too; else the late queries see its late half.
So each turn is two squares of halves without a mask, side by side along the batch, and nothing is computed in vain:
R / 2 squares of blocks on every rank, where the ring has R - 1/2.

Zhu, "zigzag ring" in ring-flash-attention (2024), has sequences in this order from the start, as Llama 3 has (Llama
Team 2024, section 3.3.2); Brandon et al., "Striped Attention" (2023), say what the imbalance costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from autopar.ir.graph import Node, TensorType
from autopar.ir.mesh import Mesh
from autopar.rules.attended import ZIGZAG, copied, cut, kernel
from autopar.rules.builder import Value
from autopar.rules.context import Parts, around, splittable
from autopar.rules.grouped import of_its_head
from autopar.rules.looped import Do, Offer, Part, Shift
from cost_models.steps import Compute

EARLY, LATE = 0, 1  # halves of what a rank works on
OF_QUERIES = ("grad", "q", "out", "lse")


def ring(node: Node, types: tuple[TensorType, ...], mesh: Mesh) -> Iterator[Offer]:
    for of in splittable(node, types, mesh, ZIGZAG):
        if of.roles.count(ZIGZAG) == 1 and of.here["q"].shape[2] % 2 == 0:
            yield Offer(of.roles, of.axis, of.takes, of.gives, of_its_head(of, lambda one: around(_Zigzag(one))))


@dataclass(frozen=True, slots=True)
class _Zigzag(Parts):
    def called(self, name: str) -> str:
        return f"{name} in zigzag"

    def enter(self) -> Iterator[Part]:
        of = self.of
        names = ("k", "v", *(name for name in of.place if name not in ("k", "v")))  # in the order of their need
        for name in names:
            half = cut(of.here[name], 2, 2)
            yield Do("cut", _later_half, (of.place[name],), f"{name} to give", half, copied(2, half))
            yield Shift(f"{name} to give", f"{name} taken", half, "mirror")
        for name in names:
            type, reads = of.here[name], (of.place[name], f"{name} taken")
            order = _with_place("zigzag_in", of.ranks)
            yield Do("order", order, reads, self.called(name), type, copied(4, type, 2), takes=type.nbytes)

    def attend(self, k: str, v: str, made: dict[str, str], ahead: int = 0) -> Iterator[Part]:
        of = self.of
        of_keys = {"k": k, "v": v}
        pairs = {name: _paired(of.here[name]) for name in (*of.place, *of.results)}
        for name in of.place:
            half, reads = (LATE, self.called(name)) if name in OF_QUERIES else (EARLY, of_keys[name])
            write = _with_turn("zigzag_pair", half, ahead, of.ranks)
            yield Do("pair", write, (reads,), f"{name} of pair", pairs[name], copied(2, pairs[name]))
        makes = {name: f"{name} of pair" for name in of.results}
        yield kernel(of, False, {name: f"{name} of pair" for name in of.place}, makes, pairs)
        if of.is_forward:
            yield self._merge(ahead)
            return
        for name, whole in made.items():
            spread = _with_turn("zigzag_spread", EARLY, ahead, of.ranks)
            yield Do("spread", spread, (makes[name],), whole, of.here[name], copied(4, of.here[name], 4))
        write = _with_turn("zigzag_add", LATE, ahead, of.ranks)
        yield Do("add", write, (self.sum, makes["dq"]), self.sum, None, copied(4, self.sum_type, 5))

    def _merge(self, ahead: int) -> Do:
        of, lse = self.of, self.of.here["lse"]
        reads = self.sum, self.called("lse"), "out of pair", "lse of pair"
        step = Compute("reorder", 0.0, 7.5 * self.sum_type.nbytes + 18.0 * lse.nbytes, lse.dtype, 24, "elementwise")
        return Do(
            "merge",
            _with_turn("zigzag_merge", LATE, ahead, of.ranks),
            reads,
            self.sum,
            None,
            step,
            takes=2 * lse.nbytes,
        )

    def leave(self) -> Iterator[Part]:
        of = self.of
        for name in of.results:
            half, away = cut(of.here[name], 2, 2), _with_place("zigzag_away", of.ranks)
            yield Do("cut", away, (self.called(name),), f"{name} to give", half, copied(2, half))
            yield Shift(f"{name} to give", f"{name} taken", half, "mirror")
        for name in of.results:
            type, reads = of.here[name], (self.called(name), f"{name} taken")
            order = _with_place("zigzag_out", of.ranks)
            yield Do("order", order, reads, name, type, copied(3, type, 2), takes=type.nbytes // 2)


def _paired(type: TensorType) -> TensorType:
    """Two halves of the rows, side by side along the batch."""
    batch, heads, rows, *rest = type.shape
    return replace(type, shape=(2 * batch, heads, rows // 2, *rest))


# --- its work, as code ----------------------------------------------------------------------------------------------


def _later_half(b: Any, turn: int, x: Value) -> Value:
    return b.call("autopar.later_half", x, 2)


def _with_place(op: str, ranks: int) -> Any:
    def write(b: Any, turn: int, *values: Value) -> Value:
        return b.call(f"autopar.{op}", *values, b.shard_index(), ranks)

    return write


def _with_turn(op: str, half: int, ahead: int, ranks: int) -> Any:
    def write(b: Any, turn: int, *values: Value) -> Value:
        return b.call(f"autopar.{op}", *values, half, b.shard_index(), turn + ahead, ranks)

    return write
