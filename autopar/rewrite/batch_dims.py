"""Which dim of each output is the batch: where each rank passes rows of its own, it gets back what belongs to them.

The rules that split operators over devices say it: of a mesh of one axis, over which inputs are split by rows, an
operator takes what it is given as it is, and gives a value that is split along some dim, or one of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from enum import Enum

from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.layout import REPLICATE, Shard
from autopar.ir.mesh import Mesh
from autopar.propose.strategies import Signature, Strategy, node_strategies, operand_types, signature_of
from autopar.rules.table import rule_of


class Of(Enum):
    """What has no dim that is the batch."""

    NO_ROWS = "made of no rows: alike on every rank"
    ALL_ROWS = "made of rows, and along no dim of it do they lie as they are given"


Lies = int | Of


def batch_dims(graph: Graph, inputs: Set[str], ranks: int) -> dict[str, Lies]:
    """Index of an output -> the dim along which the batch lies. `inputs`: names of those whose dim 0 it is."""
    lies: dict[Ref, Lies] = {}
    node_of, mesh = graph.by_name, Mesh(("rows",), (ranks,))
    known: dict[Signature, tuple[Strategy, ...]] = {}
    for node in graph.nodes:
        if node.phase != "forward":
            continue
        given = [lies[ref] for ref in node.operands]
        places: Sequence[Lies]
        if node.name in inputs:
            places = [0]
        elif any(isinstance(one, int) for one in given):
            types = operand_types(node, node_of)
            key = signature_of(node, types)
            if key not in known:
                known[key] = node_strategies(node, types, rule_of(node, types), mesh)
            places = _through(node, known[key], given)
        else:
            places = [Of.ALL_ROWS if Of.ALL_ROWS in given else Of.NO_ROWS] * len(node.outputs)
        lies |= {Ref(node.name, at): place for at, place in enumerate(places)}
    results = (one for one in graph.results if one.kind == "output" and one.ref is not None)
    return {one.target: lies[one.ref] for one in results if one.ref is not None}


def _through(node: Node, ways: Sequence[Strategy], given: Sequence[Lies]) -> Sequence[Lies]:
    """Where results of an operator lie whose operands lie so: of the ways that take most of them as they are (one of
    two, where each row meets each), that which gives the leading dim.
    """
    found: list[tuple[int, list[Lies]]] = [(0, [Of.ALL_ROWS] * len(node.outputs))]
    for way in ways:
        as_it_is = [isinstance(lie, int) and take == (Shard(lie),) for lie, take in zip(given, way.takes, strict=True)]
        others = (take for take, fits in zip(way.takes, as_it_is, strict=True) if not fits)
        if any(as_it_is) and all(take == (REPLICATE,) for take in others):
            places = (gives[0] for gives in way.gives)
            lies = [one.dim if isinstance(one, Shard) else Of.ALL_ROWS for one in places]
            found.append((sum(as_it_is), lies))
    return min(found, key=lambda one: (-one[0], [math.inf if isinstance(lie, Of) else lie for lie in one[1]]))[1]
