"""Why nothing is split over an axis: sizes that do not divide by its ranks, and what they would have to be.

A plan may be proven the best of its space and still have every rank do all the work, since a dim is split only into
equal parts. That is worth a sentence: padding a batch by one row may make it eight times as fast.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod

from autopar.ir.layout import Shard
from autopar.plan.value import PlanValue

FEW = 2  # sizes of each kind, and dims of each size, that are named

Dims = dict[tuple[int, int], list[str]]  # (size, the next one that would divide) -> where it stands


def unsplit(plan: PlanValue, axis: str) -> str:
    """The sentence; "" where something is split over the axis, or the first dim of an input could be."""
    place = plan.mesh.names.index(axis)
    ranks = plan.mesh.sizes[place]
    layouts = [layout for choice in plan.choices.values() for layout in (*choice.gives, *choice.takes)]
    if ranks == 1 or any(isinstance(layout[place], Shard) for layout in layouts):
        return ""
    rows = list(_sizes(plan, "input", ranks))
    leading = [(size, divides) for _, dim, size, divides in rows if dim == 0 and size > 1]
    if not leading or any(size == divides for size, divides in leading):
        return ""
    told = [
        f"of the {op}s {_told(found)}"
        for op in ("input", "parameter")
        if (found := _that_do_not(list(_sizes(plan, op, ranks))))
    ]
    size, divides = leading[0]
    return (
        f"nothing is split over its {ranks} ranks, which all do the same work: batches do not divide by them, and a "
        "split of something else costs more than it saves, or does not divide. "
        f"It would help to pad the {size} of {_dim(0, rows[0][0])} to {divides}. Not divisible are {'; '.join(told)}"
    )


def _sizes(plan: PlanValue, op: str, ranks: int) -> Iterator[tuple[str, int, int, int]]:
    """(name, dim, its size, the least size from there on that divides by the ranks and by what splits it already)."""
    for node in plan.graph.nodes:
        type = node.outputs[0] if node.op == op else None
        (layout, *_) = plan.choices[node.name].gives
        for dim, size in enumerate(() if type is None else type.shape):
            by = ranks * prod(n for n, one in zip(plan.mesh.sizes, layout, strict=True) if one == Shard(dim))
            yield re.sub(r"\['?(\w+)'?\]", r"\1", node.target), dim, size, -(-size // by) * by


def _that_do_not(rows: Sequence[tuple[str, int, int, int]]) -> Dims:
    found: Dims = defaultdict(list)
    for name, dim, size, divides in rows:
        if 1 < size < divides:
            found[size, divides].append(_dim(dim, name))
    return found


def _dim(dim: int, name: str) -> str:
    return f"dim {dim} of {name}"


def _told(found: Dims) -> str:
    """`7 (dim 0 of x, dim 0 of y; 8 would)`."""
    parts = [
        f"{size} ({', '.join(dims[:FEW])}{f' and {len(dims) - FEW} more' if len(dims) > FEW else ''}; {divides} would)"
        for (size, divides), dims in found.items()
    ]
    return ", ".join(parts[:FEW]) + (f" and {len(parts) - FEW} more" if len(parts) > FEW else "")
