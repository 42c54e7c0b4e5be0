"""When transfers are launched: weights are gathered some operators ahead of their use, gradients waited for some later,
and small gradients summed together.

Ahead and later are counted in operators that use the matrix units (products, attention, convolutions), as those are
what hides a transfer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.graph import Node
from autopar.plan import Delivery, Plan
from autopar.price import Pricer
from autopar.reshard import travels_together
from autopar.strategy import operand_types
from autopar.work import flops_of
from cost_models.steps import MATRIX_KINDS, Comm


@dataclass(frozen=True)
class Schedule:
    """`launched_before[name]`: nodes whose parameters are fetched just before that node runs, in their order of use."""

    launched_before: Mapping[str, tuple[Node, ...]]
    matrix_operators: frozenset[str]


BucketKey = tuple[tuple[str, ...], str]  # the axes that sum, and the dtype


def bucket_key(plan: Plan, delivery: Delivery) -> BucketKey | None:
    """Which gradients this one may be summed together with; None: it is summed by itself."""
    changes = delivery.changes
    if not travels_together(changes, plan.mesh, plan.bucket_bytes):
        return None
    return tuple(change.axis for change in changes), changes[0].local.dtype


def bucket_bytes(pricer: Pricer, gradients: int, memory: float | None) -> int:
    """The size up to which gradients gather before they are summed: where waiting is a tenth of the time on every axis.

    Twice that size sums at less than 1.1 times the rate. No more than all `gradients` bytes, and no more than a
    hundredth of the `memory`, since the row is a copy; 0 where that leaves next to nothing.
    """
    size = 1 << 16
    largest = gradients if memory is None else min(gradients, int(memory / 100))
    for axis, ranks in zip(pricer.mesh.names, pricer.mesh.sizes, strict=True):

        def rate(nbytes: int, axis: str = axis, ranks: int = ranks) -> float:
            return nbytes / pricer.seconds((Comm("all_reduce", axis, ranks, nbytes),))

        while ranks > 1 and size < largest and rate(2 * size) > 1.1 * rate(size):
            size *= 2
    return min(size, largest) if largest > 1 << 16 else 0


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
