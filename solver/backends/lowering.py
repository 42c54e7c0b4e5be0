"""The linear program of a core, as numpy arrays: the local polytope with equalities.

    minimise    offset + sum_c cost_c x_c
    subject to  sum_i x_u(i) = 1                                   for every item u with several options
                sum_J e_uv(I,J) = sum_{i in I} x_u(i),  sum_I e_uv(I,J) = sum_{j in J} x_v(j)
                                                                   for every edge and class of options of either end
                sum_c nbytes_c(t) x_c <= room(t)                   for every instant that can bind, added when violated

Options of one end are of one class (I) on an edge if they are forbidden with the same options of the other end, hold
the same bytes with each, and cost the same but for a constant, which goes into the cost of x: pairs within a class need
not be told apart, and the program has the same optimum and the same bound with fewer columns. Columns are the x of all
items, then the e of all edges, only for allowed pairs: a forbidden pair has no column. With x integral e is integral,
so only x needs to be. The least cost of every item and edge is in `offset`, the least usage of every item is taken off
the room: what is left is small, which keeps the numerics good.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from solver.backends.classes import Classes, Index, classes, each
from solver.problem import Array, Problem


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

    rows, columns, values: the equality matrix in coordinates; right: its right-hand side. members, class_of: x columns
    and the class, of some edge, that each is in there. end_a, end_b: the classes that each e column joins.
    """

    cost: Array
    offset: float
    x_first: Index
    num_x: int
    rows: Index
    columns: Index
    values: Array
    right: Array
    members: Index
    class_of: Index
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
        taken = bincount(self.class_of, x[self.members], int(self.class_of.max(initial=-1)) + 1)
        x[self.num_x :] = taken[self.end_a] * taken[self.end_b]
        return x


def lower(core: Problem, merged: bool = True) -> Lowered:
    """The program of a core (see backends/__init__.py for what a core is). Not `merged`: each option is a class."""
    sizes = np.array([len(cost) if len(cost) > 1 else 0 for cost in core.costs], dtype=np.intp)
    x_first = np.concatenate(([0], np.cumsum(sizes))).astype(np.intp)
    several = np.flatnonzero(sizes)
    num_x = int(x_first[-1])
    pairs = _Pairs(x_first, len(several), num_x, [cost.copy() for cost in core.costs])
    held: dict[int, list[Array]] = {}
    for usage in core.edge_usages:
        held.setdefault(usage.edge, []).append(usage.nbytes)
    known: dict[tuple[int, ...], Classes] = {}
    for number, edge in enumerate(core.edges):
        matrices = (edge.cost, *held.get(number, ()))
        key = tuple(map(id, matrices))
        if key not in known:
            known[key] = classes(edge.cost, matrices[1:]) if merged else each(edge.cost)
        pairs.add(number, edge.src, edge.dst, known[key], number in held)
    costs = [*(pairs.costs[item] - pairs.costs[item].min() for item in several), *pairs.pair_costs]
    return Lowered(
        cost=np.concatenate(costs) if costs else np.zeros(0),
        offset=sum(float(cost.min()) for cost in pairs.costs),
        x_first=x_first,
        num_x=num_x,
        rows=_joined([np.repeat(np.arange(len(several)), sizes[several]), *pairs.rows]),
        columns=_joined([np.arange(num_x), *pairs.columns]),
        values=np.concatenate([np.ones(num_x), *pairs.values]),
        right=np.concatenate([np.ones(len(several)), np.zeros(pairs.next_row - len(several))]),
        members=_joined(pairs.members),
        class_of=_joined(pairs.class_of),
        end_a=_joined(pairs.end_a),
        end_b=_joined(pairs.end_b),
        profiles=tuple(_profile(core, name, x_first, pairs.e_column) for name in sorted(core.limits)),
    )


@dataclass(slots=True)
class _Pairs:
    """Columns and rows of the edges so far; `costs` are those of the items, to which edges add.

    e_column: edge -> its first column, and for each of its columns an option of either end.
    """

    x_first: Index
    several: int
    next_column: int
    costs: list[Array]
    next_row: int = field(init=False)
    pair_costs: list[Array] = field(default_factory=list[Array])
    rows: list[Index] = field(default_factory=list[Index])
    columns: list[Index] = field(default_factory=list[Index])
    values: list[Array] = field(default_factory=list[Array])
    members: list[Index] = field(default_factory=list[Index])
    class_of: list[Index] = field(default_factory=list[Index])
    end_a: list[Index] = field(default_factory=list[Index])
    end_b: list[Index] = field(default_factory=list[Index])
    e_column: dict[int, tuple[int, Index, Index]] = field(default_factory=dict[int, tuple[int, Index, Index]])

    def __post_init__(self) -> None:
        self.next_row = self.several

    def add(self, number: int, src: int, dst: int, told: Classes, holds: bool) -> None:
        """The edge with that number, of these items; `holds` bytes."""
        self.costs[src] += told.row_cost
        self.costs[dst] += told.column_cost
        n, m = told.cost.shape
        i, j = np.nonzero(told.cost < np.inf)
        if holds:
            self.e_column[number] = (self.next_column, told.first_rows[i], told.first_columns[j])
        elif n == m == 1 and len(i):
            return  # of one class at both ends: the edge says nothing
        self.pair_costs.append(told.cost[i, j])
        e = np.arange(self.next_column, self.next_column + len(i))
        first = self.next_row
        members = [self.x_first[src] + np.arange(len(told.rows)), self.x_first[dst] + np.arange(len(told.columns))]
        self.rows += [first + i, first + n + j, first + told.rows, first + n + told.columns]
        self.columns += [e, e, *members]
        self.values += [np.ones(2 * len(i)), -np.ones(len(told.rows) + len(told.columns))]
        first -= self.several  # there are as many classes as rows for them
        self.members += members
        self.class_of += [first + told.rows, first + n + told.columns]
        self.end_a.append(first + i)
        self.end_b.append(first + n + j)
        self.next_row, self.next_column = self.next_row + n + m, self.next_column + len(i)


def _joined(parts: Sequence[Index]) -> Index:
    return np.concatenate([np.zeros(0, np.intp), *parts]).astype(np.intp)


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
