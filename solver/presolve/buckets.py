"""Bucket elimination (keeps at least one cheapest solution): solve whole parts that memory does not touch.

A connected part in which nothing holds memory that can bind is a sum of small tables. Eliminate its items one by one:
add up the tables that mention the item, take the minimum over its options, and a new table over its neighbours
remains. Exact; what it needs depends on the order (least table first) and on how tangled the part is, so the order is
planned first and the part left alone if a table would grow too large.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from solver.presolve.core import Core, Dead
from solver.problem import Array, Index

MAX_TABLE = 4_000_000  # entries of one table, 32 MB
MAX_WORK = 1_000_000_000  # entries of all tables of one part, some seconds

Factor = tuple[tuple[int, ...], Array]


def eliminate(core: Core) -> bool:
    """Settle every part without memory whose tables stay small; whether there was one."""
    changed = False
    for part in parts(core):
        if all(core.is_neutral(item) for item in part) and (order := _plan(core, part)) is not None:
            core.fired["buckets"] += 1
            _eliminate(core, order)
            changed = True
    return changed


def parts(core: Core) -> list[list[int]]:
    """Connected parts of the graph of living items."""
    seen: set[int] = set()
    found: list[list[int]] = []
    for root in core.items():
        if root in seen:
            continue
        seen.add(root)
        part = [root]
        for item in part:  # grows while it is walked
            fresh = [other for other in core.neighbours[item] if other not in seen]
            seen.update(fresh)
            part += fresh
        found.append(sorted(part))
    return found


def _plan(core: Core, part: list[int]) -> list[int] | None:
    """An order with small tables, None if the greedy one needs too much."""
    near = {item: set(core.neighbours[item]) for item in part}
    sizes = {item: len(core.costs[item]) for item in part}

    def table(item: int) -> int:
        return sizes[item] * math.prod(sizes[other] for other in near[item])

    heap = [(table(item), item) for item in part]
    heapq.heapify(heap)
    order: list[int] = []
    work = 0
    while heap:
        size, item = heapq.heappop(heap)
        if item not in near or size != table(item):
            continue  # settled, or an outdated entry
        work += size
        if size > MAX_TABLE or work > MAX_WORK or len(near[item]) > 30:
            return None
        order.append(item)
        around = near.pop(item)
        for other in around:
            near[other] |= around
            near[other] -= {item, other}
        for other in around:
            heapq.heappush(heap, (table(other), other))
    return order


def _eliminate(core: Core, order: list[int]) -> None:
    place = {item: k for k, item in enumerate(order)}
    buckets: dict[int, list[Factor]] = {item: [((item,), core.costs[item])] for item in order}
    for item in order:
        for other, cost in core.neighbours[item].items():
            if place[item] < place[other]:
                buckets[item].append(((item, other), cost))
    for item in order:
        factors = buckets.pop(item)
        scope = sorted({other for names, _ in factors for other in names if other != item})
        joint, table = _minimise(item, scope, factors)
        core.settle(item, scope, table)
        if scope:
            buckets[min(scope, key=place.__getitem__)].append((tuple(scope), joint))
        else:
            if not joint < np.inf:
                raise Dead("the allowed pairs admit no assignment")
            core.constant += float(joint)


def _minimise(item: int, scope: list[int], factors: list[Factor]) -> tuple[Array, Index]:
    """Least sum over the options of `item` for each assignment of `scope`, and the option that gives it."""
    axes = [item, *scope]
    total: Array | None = None
    for names, values in sorted(factors, key=lambda factor: factor[1].size):
        names_in_order = sorted(names, key=axes.index)
        moved = values.transpose([names.index(name) for name in names_in_order])
        shape = [1] * len(axes)
        for name, size in zip(names_in_order, moved.shape, strict=True):
            shape[axes.index(name)] = size
        moved = moved.reshape(shape)
        total = moved if total is None else total + moved
    assert total is not None, "every item has its own costs"
    table = total.argmin(0)
    return np.asarray(np.take_along_axis(total, table[None], 0)[0]), np.asarray(table)
