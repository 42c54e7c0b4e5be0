"""What a node takes while it runs, beside what it reads and makes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from autopar.ir.graph import Node
from autopar.ir.layout import local_type
from autopar.ir.work import temporary_bytes
from autopar.lower.program import Buffer, Kind
from autopar.lower.results import owner_of
from autopar.propose.strategies import operand_types
from autopar.rules.bodies import BODIES
from autopar.rules.sizes import bytes_in_body

if TYPE_CHECKING:
    from autopar.plan.value import Decision, PlanValue


def takes_of(node: Node, plan: Decision | PlanValue) -> int:
    """Bytes of the operator itself."""
    types, mesh = operand_types(node, plan.graph.by_name), plan.mesh
    if not temporary_bytes(node, types):  # few have some in any layout
        return 0
    takes = plan.choices[node.name].takes
    return temporary_bytes(node, [local_type(*one, mesh) for one in zip(types, takes, strict=True)])


def in_body_of(
    node: Node, plan: Decision | PlanValue, number: Callable[[Any], float] = float
) -> Callable[[Collection[int]], Buffer] | None:
    """(places of operands that nobody needs behind it -> what it takes), where a local body does the operator."""
    choice = plan.choices[node.name]
    if choice.body not in BODIES:
        return None
    types = operand_types(node, plan.graph.by_name)

    def taken(last: Collection[int]) -> Buffer:
        nbytes = bytes_in_body(choice.body, node, types, choice.takes, choice.gives, plan.mesh, number, last)
        return Buffer(nbytes, Kind.WORKSPACE, owner_of(node))

    return taken
