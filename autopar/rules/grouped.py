"""Grouped queries over more ranks than there are kv heads: query heads are split, kv heads are copied in groups.

With H query heads that share K kv heads, R ranks, K < R <= H and R a multiple of K: rank r has query heads r H/R and
those behind it, which all share kv head r K // R. Keys and values come whole; each rank takes its head. Gradients of
keys and values are terms of a sum over the ranks: each has its head's, and zeros for the others. Beside an axis along
which a ring goes, what goes round is that head's.

Shazeer, "Fast Transformer Decoding" (2019) has one kv head for all; Ainslie et al., "GQA" (EMNLP 2023), section 2.2,
names the copies as the price of tensor parallelism beyond K. Megatron-LM copies in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from autopar.ir.graph import Node, TensorType
from autopar.ir.mesh import Mesh
from autopar.rules.attended import GROUPED, OF_KEYS, Attended, attended, copied, cut, is_causal, kernel
from autopar.rules.builder import Value
from autopar.rules.looped import Do, Looped, Offer


def grouped(node: Node, types: tuple[TensorType, ...], mesh: Mesh) -> Iterator[Offer]:
    for of in attended(node, types, mesh, GROUPED):
        yield Offer(of.roles, of.axis, of.takes, of.gives, of_its_head(of, _body))


def _body(of: Attended) -> Looped:
    return Looped((kernel(of, is_causal(of.node), {}, {}, {}),), 0, (), (), (), of.results)


def of_its_head(of: Attended, body: Callable[[Attended], Looped]) -> Looped:
    """`body` of the kv head that a rank needs, of those that it is given; of all of them where none is copied."""
    axis, kv = of.axis_that(GROUPED), of.here["k"].shape[1]
    if not axis or kv == 1:
        return body(of)
    ranks = of.mesh.size(axis)
    mine = {name: cut(of.here[name], 1, kv) for name in OF_KEYS if name in of.here}
    called = {name: f"{name} of head" for name in ("k", "v")}
    taking = tuple(
        Do("take heads", _taking(axis, kv, ranks), (of.place[name],), one, mine[name], copied(2, mine[name]))
        for name, one in called.items()
    )
    loop = body(replace(of, here={**of.here, **mine}, place={**of.place, **called}))
    grads = {name: f"{name} of all" for name in of.results if name in OF_KEYS}
    placing = tuple(
        Do("place heads", _placing(axis, kv, ranks), (name,), one, of.here[name], copied(1, of.here[name], 2))
        for name, one in grads.items()
    )
    return replace(
        loop,
        before=(*taking, *loop.before),
        after=(*loop.after, *placing),
        gives=tuple(grads.get(one, one) for one in loop.gives),
    )


def _taking(axis: str, kv: int, ranks: int) -> Any:
    def write(b: Any, turn: int, x: Value) -> Value:
        return b.call("autopar.take_group", x, 1, kv, ranks, b.index_on(axis))

    return write


def _placing(axis: str, kv: int, ranks: int) -> Any:
    def write(b: Any, turn: int, made: Value) -> Value:
        return b.call("autopar.place_group", made, 1, kv, ranks, b.index_on(axis))

    return write
