"""How long a sequence the model itself can take: a table with a row for each position has so many rows, and no more.

Parameters keep their sizes as a plan grows. A position is known by where it comes from: it is counted, by `arange` or
by a running sum, and no input of the model says it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph, Node
from autopar.ir.work import VIEWS
from autopar.scale.growth import Growth
from autopar.scale.sizes import Part, Size

SAME = (*VIEWS, "aten._to_copy.default", "aten.mul.Tensor", "autopar.share")  # of what they count, they change nothing
ADDED = {"aten.add.Tensor": 1, "aten.sub.Tensor": -1}
FIRST = {"aten.arange.default": 0, "aten.arange.start": None, "aten.cumsum.default": 1}  # None: its first argument


@dataclass(frozen=True)
class Most:
    """The largest value of a size that the model can take, and the table that has no more rows."""

    value: int
    table: str


def most_positions(growth: Growth) -> dict[str, Most]:
    """Name of a size -> what it can be at most; left out where nothing in the graph says so."""
    found: dict[str, Most] = {}
    node_of = growth.graph.by_name
    for node in growth.graph.nodes:
        if node.op != "aten.embedding.default":
            continue
        table, positions = (node_of[ref.name] for ref in node.operands)
        name = _counted(growth.dims[node.operands[1]])
        last = _before_first(growth.graph, positions)
        if table.op != "parameter" or table.outputs[0] is None or not name or last is None:
            continue
        most = Most(table.outputs[0].shape[0] - last, table.target)
        if name not in found or most.value < found[name].value:
            found[name] = most
    return found


def beyond(most: Mapping[str, Most], values: Mapping[str, int]) -> str:
    """Why a model cannot take these sizes; "" where it can."""
    for name, one in most.items():
        if values.get(name, 0) > one.value:
            return f"the model has {one.value:,} positions ({one.table}), not {values[name]:,}"
    return ""


def _counted(size: tuple[Size, ...]) -> str:
    """The name of the size along which positions are counted: the last dim's, if that is it and nothing else."""
    match size[-1:]:
        case ((Part(name, 0),),):
            return name
        case _:
            return ""


def _before_first(graph: Graph, node: Node) -> int | None:
    """How much larger the last position is than one less than the length; None if positions are not counted here."""
    added = 0
    while True:
        if node.op in FIRST:
            start = FIRST[node.op]
            start = node.args[0] if start is None else start
            return added + start if isinstance(start, int) else None
        if node.op in ADDED and isinstance(number := node.args[1], int | float):
            added += ADDED[node.op] * int(number)
        elif node.op not in SAME:
            return None
        if not node.operands:
            return None
        node = graph.by_name[node.operands[0].name]
