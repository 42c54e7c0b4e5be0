"""A core as flat arrays, for compiled loops over all of it.

Options of item u stand at first[u] <= k < first[u + 1]. Every edge e is two links, 2e seen from its `src` and 2e + 1
seen from its `dst`: the costs of link l lie in `pairs` from at[l] on, one row per option of its `own` item, so that a
loop over the options of `other` runs along memory. Edges that share a matrix share its place.

Once memory has prices, pairs that hold some cost more. All costs then lie in another array, which begins like `pairs`;
behind that each edge that holds memory has a place of its own, from priced_at[l] on, which is used where what it holds
has a price. `priced` is the length of it all.

All resources lie on one line of positions, those of one after those of the other. Span s is held by an item (those
with number item_spans[u] <= s < item_spans[u + 1]) or by an edge (edge_spans likewise, counted on) during positions
start[s] <= p < end[s]; option (or pair) k of the holder holds nbytes[held[s] + k].
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from solver.problem import Array, EdgeUsage, Problem, Usage

Index = NDArray[np.int64]


class Spans(NamedTuple):
    """Who holds memory at which positions; see the module."""

    item_spans: Index
    edge_spans: Index
    start: Index
    end: Index
    held: Index
    nbytes: Array


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """See the module. `room` is what the limits leave above the smallest options, `limit` the limit, per position."""

    first: Index
    cost: Array
    pairs: Array
    at: Index
    priced_at: Index
    priced: int
    own: Index
    other: Index
    message: Index  # where the message into `own` over each link begins
    of_item: Index
    links: Index  # of item u: links[of_item[u] : of_item[u + 1]]
    room: Array
    limit: Array
    resource: tuple[str, ...]  # of every position
    instant: Index
    spans: Spans

    @property
    def items(self) -> int:
        """How many items."""
        return len(self.first) - 1

    @property
    def graph(self) -> tuple[Index, Index, Index, Index, Index]:
        """What a compiled loop over items and their links reads; numba takes a plain tuple sooner than a named one."""
        return self.first, self.other, self.message, self.of_item, self.links

    @property
    def options(self) -> Index:
        """How many options every item has."""
        return np.diff(self.first)

    @property
    def holding(self) -> Index:
        """Numbers of the edges whose pairs hold memory."""
        return np.flatnonzero(np.diff(self.spans.edge_spans))

    def key(self, position: int) -> tuple[str, int]:
        """(resource, instant) at the position."""
        return self.resource[position], int(self.instant[position])

    def position(self, resource: str, instant: int) -> int | None:
        """The last position of the resource at or before the instant; None: there is none."""
        where = np.flatnonzero((np.array(self.resource, dtype=object) == resource) & (self.instant <= instant))
        return int(where[-1]) if len(where) else None

    def peaks(self, excess: Array, above: float) -> Index:
        """Positions of the local maxima of `excess` that are larger than `above`, the largest first."""
        if not len(excess):
            return np.zeros(0, dtype=np.int64)
        turn = np.array([one != other for one, other in itertools.pairwise(self.resource)], dtype=bool)
        left = np.concatenate(([-np.inf], np.where(turn, -np.inf, excess[:-1])))
        right = np.concatenate((np.where(turn, -np.inf, excess[1:]), [-np.inf]))
        found = np.flatnonzero((excess >= left) & (excess > right) & (excess > above))
        return found[np.argsort(-excess[found], kind="stable")]


def flatten(core: Problem) -> Flat:
    """The core (see backends/__init__.py for what a core is) as flat arrays; matrices are copied twice."""
    sizes = np.array([len(cost) for cost in core.costs], dtype=np.int64)
    ends = np.array([(edge.src, edge.dst) for edge in core.edges], dtype=np.int64).reshape(-1, 2)
    own, other = ends.ravel(), ends[:, ::-1].ravel()
    pairs, at, priced_at, priced = _pool(core)
    order = np.lexsort((other, own))
    room, limit, resource, instant, spans = _memory(core)
    return Flat(
        first=_bounds(sizes),
        cost=np.concatenate(core.costs) if core.costs else np.zeros(0),
        pairs=pairs,
        at=at,
        priced_at=priced_at,
        priced=priced,
        own=own,
        other=other,
        message=_bounds(sizes[own]),
        of_item=_bounds(np.bincount(own, minlength=len(sizes))),
        links=order.astype(np.int64),
        room=room,
        limit=limit,
        resource=resource,
        instant=instant,
        spans=spans,
    )


def _bounds(sizes: NDArray[np.integer]) -> Index:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)


def _pool(core: Problem) -> tuple[Array, Index, Index, int]:
    """All matrices, each from both sides, and where those of every link begin, without prices of memory and with."""
    places: dict[int, tuple[int, int]] = {}
    parts: list[Array] = []
    size = 0
    for edge in core.edges:
        if id(edge.cost) not in places:
            places[id(edge.cost)] = (size, size + edge.cost.size)
            parts += [edge.cost.ravel(), edge.cost.T.ravel()]
            size += 2 * edge.cost.size
    at = np.array([places[id(edge.cost)] for edge in core.edges], dtype=np.int64).reshape(-1, 2)
    priced_at = at.copy()
    for number in sorted({usage.edge for usage in core.edge_usages}):
        pairs = core.edges[number].cost.size
        priced_at[number] = size, size + pairs
        size += 2 * pairs
    return np.concatenate([np.zeros(0), *parts]), at.ravel(), priced_at.ravel(), size


def _memory(core: Problem) -> tuple[Array, Array, tuple[str, ...], Index, Spans]:
    """Room, limit, resource and instant of every position, and what is held there."""
    names = sorted(core.limits)
    on_items: list[list[tuple[int, int, int]]] = [[] for _ in core.costs]
    on_edges: list[list[tuple[int, int, int]]] = [[] for _ in core.edges]
    room: list[Array] = []
    limit: list[Array] = []
    instants: list[Index] = []
    parts: dict[int, tuple[float, int]] = {}  # id of bytes that usages share -> what all hold, where the rest lies
    held: list[Array] = []
    size = before = 0
    for name in names:
        usages: list[Usage | EdgeUsage] = [
            u for u in (*core.usages, *core.edge_usages) if u.resource == name and u.start < u.end
        ]
        points = np.array(sorted({u.start for u in usages}), dtype=np.int64)  # use can only peak where one starts
        least = np.zeros(len(points) + 1)
        starts = np.searchsorted(points, [u.start for u in usages])
        ends = np.searchsorted(points, [u.end for u in usages])
        for usage, start, end in zip(usages, starts.tolist(), ends.tolist(), strict=True):
            if id(usage.nbytes) not in parts:
                always, above = _above(usage.nbytes)
                parts[id(usage.nbytes)] = always, -1 if above is None else size
                if above is not None:
                    held.append(above)
                    size += len(above)
            always, place = parts[id(usage.nbytes)]
            least[start] += always
            least[end] -= always
            if place >= 0:
                holder = on_items[usage.item] if isinstance(usage, Usage) else on_edges[usage.edge]
                holder.append((before + start, before + end, place))
        room.append(core.limits[name] - np.cumsum(least)[:-1])
        limit.append(np.full(len(points), core.limits[name]))
        instants.append(points)
        before += len(points)
    spans = [span for found in (*on_items, *on_edges) for span in found]
    counts = [len(found) for found in on_items]
    return (
        np.concatenate([np.zeros(0), *room]),
        np.concatenate([np.zeros(0), *limit]),
        tuple(name for name, points in zip(names, instants, strict=True) for _ in points),
        np.concatenate([np.zeros(0, np.int64), *instants]),
        Spans(
            item_spans=_bounds(np.array(counts, dtype=np.int64)),
            edge_spans=_bounds(np.array([len(found) for found in on_edges], dtype=np.int64)) + sum(counts),
            start=np.array([span[0] for span in spans], dtype=np.int64),
            end=np.array([span[1] for span in spans], dtype=np.int64),
            held=np.array([span[2] for span in spans], dtype=np.int64),
            nbytes=np.concatenate([np.zeros(0), *held]),
        ),
    )


def _above(nbytes: Array) -> tuple[float, Array | None]:
    """What every option holds, and what each holds above that; None: nothing."""
    always = float(nbytes.min())
    above = nbytes.ravel() - always
    return always, above if above.any() else None
