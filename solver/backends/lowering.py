"""The linear program of a core, as numpy arrays: the local polytope with equalities.

    minimise    offset + sum_c cost_c x_c
    subject to  sum_i x_u(i) = 1                                   for every item u with several options
                sum_j e_uv(i,j) = x_u(i),  sum_i e_uv(i,j) = x_v(j)    for every edge and option of either end
                sum_c nbytes_c(t) x_c <= room(t)                   for every instant that can bind, added when violated

Columns are the x of all items, then the e of all edges, only for allowed pairs: a forbidden pair has no column. With x
integral e is integral, so only x needs to be. The least cost of every item and edge is in `offset`, the least usage of
every item is taken off the room: what is left is small, which keeps the numerics good.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver.problem import Array, Problem

Index = NDArray[np.intp]


def bincount(positions: Index, weights: Array, size: int) -> Array:
    """Sum of the weights at each position."""
    return np.asarray(np.bincount(positions, weights=weights, minlength=size), dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class MemoryRow:
    """sum(nbytes * x[columns]) <= room: the limit of `resource` at `instant`."""

    resource: str
    instant: int
    columns: Index
    nbytes: Array
    room: float


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """The use of one resource over its instants: entry k is held by `column` at positions first_k <= p < last_k."""

    resource: str
    limit: float
    instants: Index
    room: Array
    column: Index
    first: Index
    last: Index
    nbytes: Array

    def use(self, x: Array) -> Array:
        """Bytes above the certain ones at every instant, for column values `x`."""
        held, size = self.nbytes * x[self.column], len(self.instants)
        change = bincount(self.first, held, size + 1) - bincount(self.last, held, size + 1)
        return np.cumsum(change)[:size]

    def row(self, position: int) -> MemoryRow:
        """The limit at this position, terms of one column summed."""
        there = (self.first <= position) & (position < self.last)
        columns, inverse = np.unique(self.column[there], return_inverse=True)
        nbytes = bincount(inverse, self.nbytes[there], len(columns))
        return MemoryRow(self.resource, int(self.instants[position]), columns, nbytes, float(self.room[position]))


@dataclass(frozen=True, slots=True, eq=False)
class Lowered:
    """The program. Item u owns columns x_first[u] to x_first[u + 1] (none if it has one option).

    rows, columns, values: the equality matrix in coordinates; right: its right-hand side. end_a, end_b: the x columns
    that each e column joins.
    """

    cost: Array
    offset: float
    x_first: Index
    num_x: int
    rows: Index
    columns: Index
    values: Array
    right: Array
    end_a: Index
    end_b: Index
    profiles: tuple[Profile, ...]

    def picks(self, x: Array) -> tuple[int, ...]:
        """The largest option of every item."""
        bounds = self.x_first.tolist()
        return tuple(int(x[a:b].argmax()) if b > a else 0 for a, b in itertools.pairwise(bounds))

    def point(self, picks: tuple[int, ...]) -> Array:
        """Column values of picks; columns of forbidden pairs do not exist, so the picks must avoid them."""
        x = np.zeros(len(self.cost))
        several = np.diff(self.x_first) > 0
        x[(self.x_first[:-1] + np.array(picks))[several]] = 1.0
        x[self.num_x :] = x[self.end_a] * x[self.end_b]
        return x


def lower(core: Problem) -> Lowered:
    """The program of a core (see backends/__init__.py for what a core is)."""
    sizes = np.array([len(cost) if len(cost) > 1 else 0 for cost in core.costs], dtype=np.intp)
    x_first = np.concatenate(([0], np.cumsum(sizes))).astype(np.intp)
    several = np.flatnonzero(sizes)
    offset = sum(float(cost.min()) for cost in core.costs)
    num_x = int(x_first[-1])
    costs = [core.costs[item] - core.costs[item].min() for item in several]
    rows = [np.repeat(np.arange(len(several)), sizes[several])]
    columns, values = [np.arange(num_x)], [np.ones(num_x)]
    right = [np.ones(len(several))]
    next_row, next_column = len(several), num_x
    end_a: list[Index] = []
    end_b: list[Index] = []
    e_column: dict[int, tuple[int, Index, Index]] = {}
    holding = {usage.edge for usage in core.edge_usages}
    for number, edge in enumerate(core.edges):
        i, j = np.nonzero(edge.cost < np.inf)
        n, m = edge.cost.shape
        entries = edge.cost[i, j]
        least = float(entries.min()) if len(entries) else 0.0
        offset += least
        costs.append(entries - least)
        e = np.arange(next_column, next_column + len(i))
        x_a, x_b = int(x_first[edge.src]), int(x_first[edge.dst])
        end_a.append(x_a + i)
        end_b.append(x_b + j)
        rows += [next_row + i, next_row + n + j, np.arange(next_row, next_row + n + m)]
        columns += [e, e, np.arange(x_a, x_a + n), np.arange(x_b, x_b + m)]
        values += [np.ones(2 * len(i)), -np.ones(n + m)]
        right.append(np.zeros(n + m))
        if number in holding:
            e_column[number] = (next_column, i, j)
        next_row, next_column = next_row + n + m, next_column + len(i)
    nothing = np.zeros(0, np.intp)
    return Lowered(
        cost=np.concatenate(costs) if costs else np.zeros(0),
        offset=offset,
        x_first=x_first,
        num_x=num_x,
        rows=np.concatenate(rows).astype(np.intp),
        columns=np.concatenate(columns).astype(np.intp),
        values=np.concatenate(values),
        right=np.concatenate(right),
        end_a=np.concatenate(end_a) if end_a else nothing,
        end_b=np.concatenate(end_b) if end_b else nothing,
        profiles=tuple(_profile(core, name, x_first, e_column) for name in sorted(core.limits)),
    )


def _profile(core: Problem, resource: str, x_first: Index, e_column: dict[int, tuple[int, Index, Index]]) -> Profile:
    usages = [u for u in core.usages if u.resource == resource and u.start < u.end]
    edge_usages = [u for u in core.edge_usages if u.resource == resource and u.start < u.end]
    instants = np.array(sorted({u.start for u in usages} | {u.start for u in edge_usages}), dtype=np.intp)
    certain = np.zeros(len(instants) + 1)
    pieces: list[tuple[Index, Array, int, int]] = []
    for usage in usages:
        first, last = (int(k) for k in np.searchsorted(instants, (usage.start, usage.end)))
        least = usage.nbytes.min()
        certain[first] += least
        certain[last] -= least
        above = usage.nbytes - least
        options = np.flatnonzero(above)
        pieces.append((x_first[usage.item] + options, above[options], first, last))
    for usage in edge_usages:
        first, last = (int(k) for k in np.searchsorted(instants, (usage.start, usage.end)))
        column, i, j = e_column[usage.edge]
        held = usage.nbytes[i, j]
        pairs = np.flatnonzero(held)
        pieces.append((column + pairs, held[pairs], first, last))
    counts = [len(piece[0]) for piece in pieces]
    return Profile(
        resource=resource,
        limit=core.limits[resource],
        instants=instants,
        room=core.limits[resource] - np.cumsum(certain)[: len(instants)],
        column=np.concatenate([np.zeros(0, np.intp), *(piece[0] for piece in pieces)]).astype(np.intp),
        first=np.repeat(np.array([piece[2] for piece in pieces], dtype=np.intp), counts),
        last=np.repeat(np.array([piece[3] for piece in pieces], dtype=np.intp), counts),
        nbytes=np.concatenate([np.zeros(0), *(piece[1] for piece in pieces)]),
    )


def violated(profile: Profile, x: Array, known: set[tuple[str, int]], most: int) -> list[int]:
    """Positions of up to `most` instants over the limit and not yet `known`: the worst local maxima first."""
    over = profile.use(x) - profile.room
    tolerance = 1e-9 * max(profile.limit, 1.0)
    if not len(over) or over.max() <= tolerance:
        return []
    padded = np.concatenate(([-np.inf], over, [-np.inf]))
    peaks = (over > tolerance) & (over >= padded[:-2]) & (over > padded[2:])
    positions = np.flatnonzero(peaks)
    positions = positions[np.argsort(-over[positions], kind="stable")]
    fresh = [int(k) for k in positions if (profile.resource, int(profile.instants[k])) not in known]
    return fresh[:most]
