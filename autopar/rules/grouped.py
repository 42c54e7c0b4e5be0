"""Grouped queries over more ranks than there are kv heads: query heads are split, kv heads are copied in groups.

With H query heads that share K kv heads, R ranks, K < R <= H and R a multiple of K: rank r has query heads r H/R and
those behind it, which all share kv head r K // R. Keys and values come whole; each rank takes its head. Gradients of
keys and values are terms of a sum over the ranks: each has its head's, and zeros for the others.

Shazeer, "Fast Transformer Decoding" (2019) has one kv head for all; Ainslie et al., "GQA" (EMNLP 2023), section 2.2,
names the copies as the price of tensor parallelism beyond K. Megatron-LM copies in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autopar.ir.attention import operands_at
from autopar.ir.graph import Node, TensorType
from autopar.ir.mesh import Mesh
from autopar.rules.attended import GROUPED, HEADS, Attended, attended, copied, cut, is_causal, kernel
from autopar.rules.builder import Value
from autopar.rules.looped import Do, Looped, Offer


def grouped(node: Node, types: tuple[TensorType, ...], mesh: Mesh) -> Iterator[Offer]:
    """Axes that split kv heads stand outside of those that split the query heads of each: so heads lie."""
    for of in attended(node, types, mesh, GROUPED):
        kv, here = operands_at(node, types)[1].shape[1], of.here["k"].shape[1]
        if kv == 1 or of.ranks % here or of.ranks == here > 1:
            continue  # one head needs no copies, and what divides them splits them: the rule of attention has both
        if HEADS not in of.roles[of.roles.index(GROUPED) :]:
            yield Offer(of.roles, of.axis, of.takes, of.gives, _body(of, here))


def _body(of: Attended, kv: int) -> Looped:
    causal = is_causal(of.node)
    if kv == 1:
        parts = (kernel(of, causal, {}, {}, {}),)
        return Looped(parts, 0, (), (), (), of.results)
    mine = {name: cut(of.here[name], 1, kv) for name in ("k", "v", "dk", "dv") if name in of.here}
    taking = tuple(
        Do("take heads", _taking(kv, of.ranks), (of.place[name],), name, mine[name], copied(2, mine[name]))
        for name in ("k", "v")
    )
    own = {name: f"{name} of heads" for name in mine if name not in of.place}
    attending = kernel(of, causal, {"k": "k", "v": "v"}, own, mine)
    placing = tuple(
        Do("place heads", _placing(kv, of.ranks), (one,), name, of.here[name], copied(1, of.here[name], 2))
        for name, one in own.items()
    )
    return Looped((*taking, attending, *placing), 0, (), (), (), of.results)


def _taking(kv: int, ranks: int) -> Any:
    def write(b: Any, turn: int, x: Value) -> Value:
        return b.call("autopar.take_group", x, 1, kv, ranks, b.shard_index())

    return write


def _placing(kv: int, ranks: int) -> Any:
    def write(b: Any, turn: int, made: Value) -> Value:
        return b.call("autopar.place_group", made, 1, kv, ranks, b.shard_index())

    return write
