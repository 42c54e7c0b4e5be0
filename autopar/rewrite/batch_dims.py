"""Which dim of each output is the batch: where each rank passes rows of its own, it gets back what belongs to them.

The rules that split operators over devices say it: of a mesh of one axis, over which inputs are split by rows, an
operator takes what it is given as it is, communicates nothing, and gives a value that is split along some dim, or one
of all rows. What is made of no rows every rank has, and may take in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from enum import Enum

from autopar.ir.graph import Graph, Node, Ref, TensorType
from autopar.ir.layout import REPLICATE, Shard
from autopar.ir.mesh import Mesh
from autopar.propose.strategies import Signature, Strategy, node_strategies, operand_types, signature_of
from autopar.rules.patterns import is_pattern
from autopar.rules.table import rule_of
from cost_models.steps import Comm


class Of(Enum):
    """What has no dim that is the batch."""

    NO_ROWS = "made of no rows: alike on every rank"
    ALL_ROWS = "made of rows, and along no dim of it do they lie as they are given"


# Dims along which the batch may lie: where each row meets each (a similarity matrix), each of two.
Lies = frozenset[int] | Of


def batch_dims(graph: Graph, inputs: Set[str], ranks: int) -> dict[str, int | Of]:
    """Index of an output -> the dim along which the batch lies. `inputs`: names of those whose dim 0 it is."""
    lies: dict[Ref, Lies] = {}
    node_of, mesh = graph.by_name, Mesh(("rows",), (ranks,))
    known: dict[Signature, list[Strategy]] = {}
    for node in graph.nodes:
        if node.phase != "forward":
            continue
        given = [lies[ref] for ref in node.operands]
        places: Sequence[Lies]
        if node.name in inputs:
            places = [frozenset({0})]
        elif any(isinstance(one, frozenset) for one in given):
            types = operand_types(node, node_of)
            key = signature_of(node, types)
            if key not in known:
                known[key] = _alone(node_strategies(node, types, rule_of(node, types), mesh))
            places = _through(node, known[key], given) or _kept(node, types, given)
        else:
            places = [Of.ALL_ROWS if Of.ALL_ROWS in given else Of.NO_ROWS] * len(node.outputs)
        lies |= {Ref(node.name, at): place for at, place in enumerate(places)}
    found = {one.target: lies[one.ref] for one in graph.results if one.kind == "output" and one.ref is not None}
    return {target: lie if isinstance(lie, Of) else min(lie) for target, lie in found.items()}


def _alone(ways: Sequence[Strategy]) -> list[Strategy]:
    """Those in which each rank computes of its own operands alone."""
    return [way for way in ways if not is_pattern(way.body) and not any(isinstance(step, Comm) for step in way.steps)]


def _through(node: Node, ways: Sequence[Strategy], given: Sequence[Lies]) -> list[Lies]:
    """Where results of an operator lie whose operands lie so, of the ways that take most of them as they are; empty
    where none takes any.
    """
    fits: list[tuple[int, Strategy]] = []
    for way in ways:
        pairs = [(lie, take[0]) for lie, take in zip(given, way.takes, strict=True) if isinstance(lie, frozenset)]
        count = sum(isinstance(take, Shard) and take.dim in lie for lie, take in pairs)
        if count and count + sum(take == REPLICATE for _, take in pairs) == len(pairs):
            fits.append((count, way))
    most = max((count for count, _ in fits), default=0)
    found: list[Lies] = []
    for at in range(len(node.outputs) if fits else 0):
        places = (way.gives[at][0] for count, way in fits if count == most)
        dims = frozenset(place.dim for place in places if isinstance(place, Shard))
        found.append(dims or Of.ALL_ROWS)
    return found


def _kept(node: Node, types: Sequence[TensorType], given: Sequence[Lies]) -> list[Lies]:
    """Of an operator that works on rows together, or of which no rule tells: where they lay, as far as its results have
    as many dims, and as many rows there.
    """
    found: list[Lies] = []
    for out in node.outputs:
        dims = frozenset(
            dim
            for type, lie in zip(types, given, strict=True)
            if isinstance(lie, frozenset) and out is not None and len(out.shape) == len(type.shape)
            for dim in lie
            if out.shape[dim] == type.shape[dim]
        )
        found.append(dims or Of.ALL_ROWS)
    return found
