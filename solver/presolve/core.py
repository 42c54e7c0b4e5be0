"""The problem while it shrinks, and the way back.

`Core` is the one mutable object of presolve. Every change to it is one of a few steps (delete options, add or drop an
edge, settle an item), each of which keeps these claims true:

- at most one edge per pair of items; both orientations of its matrix are stored, the second a view of the first;
- components (usages) of an item have least option 0: what every option holds is taken off `room` instead;
- an instant in `points` is one where the limit can still bind; intervals count positions in `points`;
- `undo` holds one record per deletion, so that walking it backwards rebuilds the picks of the whole problem.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from solver.presolve.facts import Facts, facts_of
from solver.problem import Array, Index, Problem
from solver.referee import FITS_REL_TOL


class Dead(Exception):
    """No assignment is feasible; the message says why."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Only `options` of `item` were kept: pick k of the smaller item is options[k] of the larger."""

    item: int
    options: Index


@dataclass(frozen=True, slots=True)
class Settle:
    """`item` left the problem: its pick is table[picks of others]."""

    item: int
    others: tuple[int, ...]
    table: Index


# (resource r, first, last): a usage at positions first <= k < last of points[r]
Span = tuple[int, int, int]
# bytes per option (per pair of options, on an edge) over spans
Held = dict[Span, Array]


def each(held: Held, change: Callable[[Array], Array]) -> Held:
    """The same spans with other arrays. Spans that have one array in common still do: it is changed once."""
    made: dict[int, Array] = {}
    for nbytes in held.values():
        if id(nbytes) not in made:
            made[id(nbytes)] = change(nbytes)
    return {span: made[id(nbytes)] for span, nbytes in held.items()}


class Core:
    """See the module. `room[r][k]` is what is left of the limit of resource r at instant points[r][k]."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.costs: list[Array] = list(problem.costs)
        self.neighbours: list[dict[int, Array]] = [{} for _ in problem.costs]
        self.components: list[Held] = [{} for _ in problem.costs]
        self.edge_components: dict[tuple[int, int], Held] = {}
        self.alive: list[bool] = [True] * len(problem.costs)
        self.resources = sorted(problem.limits)
        self.points: list[Index] = [np.zeros(0, np.intp) for _ in self.resources]
        self.room: list[Array] = [np.zeros(0) for _ in self.resources]
        self.constant = 0.0
        self.undo: list[Keep | Settle] = []
        self.fired: Counter[str] = Counter()
        self.stirred: set[int] = set()  # items whose surroundings changed since dominance last looked
        self._items: deque[int] = deque()
        self._edges: deque[tuple[int, int]] = deque()
        self._queued: set[int | tuple[int, int]] = set()
        self._shared: dict[int, Array] = {}  # arrays used by several edges; kept alive so that ids stay theirs
        self._flips: dict[int, Array] = {}
        self._taken: dict[tuple[int, bytes], Array] = {}  # array, rows -> those rows
        self._above: dict[tuple[int, int], tuple[float, Array]] = {}  # cost, bytes -> `_above_least`
        self._facts: dict[int, Facts] = {}
        self._most: dict[int, float] = {}
        self._build()

    def _build(self) -> None:
        uses = Counter(id(edge.cost) for edge in self.problem.edges)
        for edge in self.problem.edges:
            if uses[id(edge.cost)] > 1 and id(edge.cost) not in self._shared:
                flip = edge.cost.T
                self._share(edge.cost, flip)
        held = Counter(id(usage.nbytes) for usage in self.problem.edge_usages)
        for usage in self.problem.edge_usages:
            if held[id(usage.nbytes)] > 1 and id(usage.nbytes) not in self._shared:
                self._share(usage.nbytes, usage.nbytes.T)
        for edge in self.problem.edges:
            if edge.src == edge.dst:
                self.costs[edge.src] = self.costs[edge.src] + np.diagonal(edge.cost)
            else:
                self.add_edge(edge.src, edge.dst, edge.cost)
        for item in range(len(self.costs)):
            self.touch(item)

    # Arrays that several edges share

    def _share(self, array: Array, flip: Array) -> None:
        self._shared[id(array)], self._shared[id(flip)] = array, flip
        self._flips[id(array)], self._flips[id(flip)] = flip, array

    def is_shared(self, array: Array) -> bool:
        """Whether several edges use this very array."""
        return id(array) in self._shared

    def flipped(self, array: Array) -> Array:
        """The other side of a matrix; of one that is shared, always the same array."""
        return self._flips[id(array)] if id(array) in self._shared else array.T

    def taken(self, array: Array, rows: Index) -> Array:
        """These rows of a matrix; of one that is shared, shared in turn: repeated layers shrink alike."""
        if id(array) not in self._shared:
            return array[rows]
        key = id(array), rows.tobytes()
        if key not in self._taken:
            self._taken[key] = array[rows]
            self._share(self._taken[key], self._taken[key].T)
        return self._taken[key]

    # Work still to do

    def touch(self, item: int) -> None:
        """Look at the item again."""
        self.stirred.add(item)
        if item not in self._queued:
            self._queued.add(item)
            self._items.append(item)

    def touch_edge(self, u: int, v: int) -> None:
        """Look at the edge again."""
        pair = (u, v) if u < v else (v, u)
        if pair not in self._queued:
            self._queued.add(pair)
            self._edges.append(pair)

    def next_item(self) -> int | None:
        """The next living item to look at, None when there is none."""
        while self._items:
            item = self._items.popleft()
            self._queued.discard(item)
            if self.alive[item]:
                return item
        return None

    def next_edge(self) -> tuple[int, int] | None:
        """The next existing edge to look at, None when there is none."""
        while self._edges:
            u, v = self._edges.popleft()
            self._queued.discard((u, v))
            if v in self.neighbours[u]:
                return u, v
        return None

    # Reading

    def items(self) -> list[int]:
        """Living items in order."""
        return [item for item, alive in enumerate(self.alive) if alive]

    def facts(self, cost: Array) -> Facts:
        """What the matrix allows to conclude; worked out once for arrays that several edges share."""
        if id(cost) not in self._shared:
            return facts_of(cost)
        if id(cost) not in self._facts:
            self._facts[id(cost)] = facts_of(cost)
        return self._facts[id(cost)]

    def most(self, nbytes: Array) -> float:
        """The largest entry of an array; looked for once where several edges share it."""
        if id(nbytes) not in self._shared:
            return float(nbytes.max())
        if id(nbytes) not in self._most:
            self._most[id(nbytes)] = float(nbytes.max())
        return self._most[id(nbytes)]

    def edge_usages(self, u: int, v: int) -> Held:
        """Components on the edge, as matrices with u as the slow index."""
        if not self.edge_components:
            return {}
        found = self.edge_components.get((u, v) if u < v else (v, u), {})
        return found if u < v else each(found, self.flipped)

    def is_neutral(self, item: int) -> bool:
        """Whether no pick of the item changes any use of memory that can still bind."""
        if self.components[item]:
            return False
        return not self.edge_components or all(
            ((item, v) if item < v else (v, item)) not in self.edge_components for v in self.neighbours[item]
        )

    def certain(self, r: int) -> float:
        """Bytes of the resource that all picks hold at some instant that can bind; 0 if none can."""
        room = self.room[r]
        return self.problem.limits[self.resources[r]] * (1 + FITS_REL_TOL / 2) - float(room.min()) if len(room) else 0.0

    # Changing

    def set_edge(self, u: int, v: int, cost: Array) -> None:
        """Give the edge this matrix (u slow)."""
        self.neighbours[u][v] = cost
        self.neighbours[v][u] = self.flipped(cost)
        self.touch_edge(u, v)
        self.stirred.add(u)
        self.stirred.add(v)

    def add_edge(self, u: int, v: int, cost: Array) -> None:
        """Add the matrix to the edge between u and v, which need not exist yet."""
        old = self.neighbours[u].get(v)
        self.set_edge(u, v, cost if old is None else old + cost)
        if old is None:
            self.touch(u)
            self.touch(v)

    def drop_edge(self, u: int, v: int) -> None:
        """Forget the edge; what it cost and held must have been moved before."""
        del self.neighbours[u][v], self.neighbours[v][u]
        self.edge_components.pop((u, v) if u < v else (v, u), None)
        self.touch(u)
        self.touch(v)

    def keep(self, item: int, options: Index, cause: str) -> None:
        """Delete all options of the item but these. `cause` says why, for the message when none is left."""
        if not len(options):
            raise Dead(f"no option of {self.problem.name(item)} is left: {cause}")
        self.undo.append(Keep(item, options))
        self.costs[item] = self.costs[item][options]
        for other, cost in list(self.neighbours[item].items()):
            found = self.edge_usages(item, other)
            self.set_edge(item, other, self.taken(cost, options))
            if found:
                self.edge_components.pop((item, other) if item < other else (other, item))
                self.hold_on_edge(item, other, each(found, lambda held: self.taken(held, options)).items())
            self.stirred.add(other)
        held, self.components[item] = self.components[item], {}
        self.hold(item, {span: nbytes[options] for span, nbytes in held.items()})
        self.touch(item)

    def hold(self, item: int, extra: Held) -> None:
        """Give the item more components; equal spans are summed, what all options hold is taken off the room."""
        components = self.components[item]
        for span, nbytes in extra.items():
            resource, first, last = span
            if first == last:
                continue
            least = nbytes.min()
            if least > 0:
                self.room[resource][first:last] -= least
                nbytes = nbytes - least
            old = components.pop(span, None)
            if old is not None:  # both have a least option, but perhaps not the same one
                nbytes = old + nbytes
                if (least := nbytes.min()) > 0:
                    self.room[resource][first:last] -= least
                    nbytes = nbytes - least
            if nbytes.any():
                components[span] = nbytes

    def hold_on_edge(self, u: int, v: int, extra: Iterable[tuple[Span, Array]]) -> None:
        """Give the edge more components (u slow), one after the other. The edge must exist; entries at forbidden pairs
        do not matter.
        """
        pair = (u, v) if u < v else (v, u)
        cost = self.neighbours[pair[0]][pair[1]]
        components = self.edge_components.pop(pair, {})
        # tied layers hold the same bytes at many spans: worked out once, they stay one array
        known: dict[tuple[int, int], tuple[float, Array, Array, Array | None]] = {}
        for span, matrix in extra:
            resource, first, last = span
            old = components.pop(span, None)
            if first == last:
                continue
            key = id(matrix), id(old)
            if key not in known:
                nbytes = matrix if u < v else self.flipped(matrix)
                known[key] = *self._above_least(cost, nbytes if old is None else old + nbytes), matrix, old
            least, nbytes, *_ = known[key]
            if least > 0:
                self.room[resource][first:last] -= least
            if nbytes.any():
                components[span] = nbytes
        if components:
            self.edge_components[pair] = components
        self.touch(u)
        self.touch(v)

    def _above_least(self, cost: Array, nbytes: Array) -> tuple[float, Array]:
        """The least of the bytes at allowed pairs, and what each has above it; 0 at forbidden ones, and where there are
        no others: then costs alone say that no assignment is feasible.
        """
        key = id(cost), id(nbytes)
        if key in self._above:
            return self._above[key]
        allowed = cost < np.inf
        least = float(nbytes[allowed].min()) if allowed.any() else 0.0
        above = np.where(allowed, nbytes - least, 0.0)
        if self.is_shared(cost) and self.is_shared(nbytes):
            self._share(above, above.T)
            self._above[key], self._above[id(cost), id(above)] = (least, above), (0.0, above)
        return least, above

    def settle(self, item: int, others: Sequence[int], table: Index) -> None:
        """Take the item out: its pick follows from those of `others`. Its edges must have been moved or priced in."""
        self.undo.append(Settle(item, tuple(others), table))
        self.alive[item] = False
        for other in list(self.neighbours[item]):
            self.drop_edge(item, other)
        self.components[item] = {}
        self.stirred.discard(item)

    # The way back, and the way there

    def lift(self, picks_of: dict[int, int]) -> tuple[int, ...]:
        """Picks of the whole problem from the picks of the living items (consumes `picks_of`)."""
        for record in reversed(self.undo):
            match record:
                case Keep(item, options):
                    picks_of[item] = int(options[picks_of[item]])
                case Settle(item, others, table):
                    picks_of[item] = int(table[tuple(picks_of[other] for other in others)])
        return tuple(picks_of[item] for item in range(len(self.problem.costs)))

    def project(self, picks: Sequence[int]) -> dict[int, int] | None:
        """Picks of the living items from picks of the whole; None if they use an option that was deleted."""
        picks_of = dict(enumerate(picks))
        for record in self.undo:
            if isinstance(record, Keep):
                place = np.flatnonzero(record.options == picks_of[record.item])
                if not len(place):
                    return None
                picks_of[record.item] = int(place[0])
            else:
                del picks_of[record.item]
        return picks_of
