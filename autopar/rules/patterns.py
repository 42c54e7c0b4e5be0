"""Patterns: families of strategies that no factor rule gives, as a loop stands in for the operator.

A pattern is a function (node, types of its operands, mesh) -> what it offers, which is nothing where it does not apply.
Its strategies stand beside those of the operator's rule (`autopar.propose.strategies`), and the solver chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from autopar.ir.graph import Node, TensorType
from autopar.ir.mesh import Mesh
from autopar.rules import context, grouped, ring, ring_scatter, summa, zigzag
from autopar.rules.bodies import BODIES
from autopar.rules.looped import Offer

Pattern = Callable[[Node, tuple[TensorType, ...], Mesh], Iterator[Offer]]

PATTERNS: dict[str, Pattern] = {
    ring.NAME: ring.product,
    "ring reduce-scatter": ring_scatter.product,
    "SUMMA": summa.product,
    "grouped kv replicated": grouped.grouped,
    "context parallel: gathered kv": context.gathered,
    "context parallel: ring": context.ring,
    "context parallel: zigzag ring": zigzag.ring,
}


def is_pattern(body: str) -> bool:
    """Whether what stands in for an operator is a pattern, of ours or of a user's package, and no local body."""
    return body != "" and body not in BODIES


def patterns_of(node: Node) -> Mapping[str, Pattern]:
    """The patterns that are tried on a node, those of users' packages last."""
    brought = {name: pattern for rules in node.outside for name, pattern in rules.patterns.items()}
    return {**PATTERNS, **brought} if brought else PATTERNS


def offers(node: Node, types: tuple[TensorType, ...], mesh: Mesh) -> Iterator[tuple[str, Offer]]:
    """What all patterns offer for a node, each with the pattern's name."""
    for name, pattern in patterns_of(node).items():
        for offer in pattern(node, types, mesh):
            yield name, offer


def offered(node: Node, types: tuple[TensorType, ...], mesh: Mesh, name: str, roles: tuple[str, ...]) -> Offer | None:
    """What the pattern of that name offers under these roles; None where it does not."""
    pattern = patterns_of(node).get(name)
    if pattern is None:
        return None
    return next((offer for offer in pattern(node, types, mesh) if offer.roles == roles), None)
