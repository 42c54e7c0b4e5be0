"""When transfers are launched: weights are gathered some operators ahead of their use, gradients waited for some later.

Counted in operators that use the matrix units (products, attention, convolutions), as those are what hides a transfer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.graph import Node
from autopar.strategy import operand_types
from autopar.work import flops_of
from cost_models.steps import MATRIX_KINDS


@dataclass(frozen=True)
class Schedule:
    """`launched_before[name]`: nodes whose parameters are fetched just before that node runs, in their order of use."""

    launched_before: Mapping[str, tuple[Node, ...]]
    matrix_operators: frozenset[str]


def uses_matrix_units(node: Node, node_of: Mapping[str, Node]) -> bool:
    return not node.is_source and flops_of(node, operand_types(node, node_of))[1] in MATRIX_KINDS


def launches(nodes: Sequence[Node], node_of: Mapping[str, Node], prefetch: int | None) -> Schedule:
    """The schedule of one phase. `prefetch`: how many matrix operators ahead; None: everything where it is used."""
    matrix: list[str] = []
    before: dict[str, list[Node]] = defaultdict(list)
    first = next((node.name for node in nodes if not node.is_source), "")
    for node in nodes:
        reads_weights = any(node_of[ref.name].op == "parameter" for ref in node.operands)
        if prefetch is not None and reads_weights:
            ahead = matrix[-prefetch] if prefetch and len(matrix) >= prefetch else first if prefetch else node.name
            before[ahead].append(node)
        if uses_matrix_units(node, node_of):
            matrix.append(node.name)
    return Schedule({name: tuple(readers) for name, readers in before.items()}, frozenset(matrix))
