"""Who holds how many bytes when, of a core: what picks exceed the limits by, and costs with memory priced in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from solver.backends.lowering import bincount
from solver.problem import Array, Problem

Row = tuple[int, int]  # (resource, position): the limit of resources[r] at instants[r][k]
Prices = Mapping[Row, float]


class Ledger:
    """Usages of limited resources by position; the use can only reach a maximum where a usage starts."""

    def __init__(self, core: Problem) -> None:
        self.core = core
        self.resources = sorted(core.limits)
        self.limits = [core.limits[name] for name in self.resources]
        number = {name: r for r, name in enumerate(self.resources)}
        usages = [u for u in core.usages if u.resource in number and u.start < u.end]
        edge_usages = [u for u in core.edge_usages if u.resource in number and u.start < u.end]
        self.instants: list[NDArray[np.intp]] = []
        self._items: list[list[tuple[int, Array]]] = []
        self._edges: list[list[tuple[int, Array]]] = []
        self._first: list[NDArray[np.intp]] = []
        self._last: list[NDArray[np.intp]] = []
        for name in self.resources:
            on_items = [u for u in usages if u.resource == name]
            on_edges = [u for u in edge_usages if u.resource == name]
            every = [(u.start, u.end) for u in (*on_items, *on_edges)]
            spans: NDArray[np.intp] = np.array(every, dtype=np.intp).reshape(-1, 2)
            instants = np.unique(spans[:, 0])
            self.instants.append(instants)
            self._first.append(np.searchsorted(instants, spans[:, 0]).astype(np.intp))
            self._last.append(np.searchsorted(instants, spans[:, 1]).astype(np.intp))
            self._items.append([(u.item, u.nbytes) for u in on_items])
            self._edges.append([(u.edge, u.nbytes) for u in on_edges])

    def over(self, picks: Sequence[int]) -> list[Array]:
        """Bytes above the limit (negative: below) per resource and position."""
        edges = self.core.edges
        found: list[Array] = []
        for r in range(len(self.resources)):
            held = [nbytes[picks[item]] for item, nbytes in self._items[r]]
            held += [nbytes[picks[edges[e].src], picks[edges[e].dst]] for e, nbytes in self._edges[r]]
            found.append(self._use(r, np.array(held, dtype=np.float64)) - self.limits[r])
        return found

    def least_peak(self, r: int) -> float:
        """Bytes that the smallest options hold together at their worst instant."""
        held = [float(nbytes.min()) for _, nbytes in (*self._items[r], *self._edges[r])]
        return float(self._use(r, np.array(held, dtype=np.float64)).max(initial=0.0))

    def _use(self, r: int, held: Array) -> Array:
        size = len(self.instants[r])
        change = bincount(self._first[r], held, size + 1) - bincount(self._last[r], held, size + 1)
        return np.cumsum(change)[:size]

    def priced(self, prices: Prices) -> tuple[dict[int, Array], dict[int, Array]]:
        """Extra costs of options by item, and of pairs by edge: the sum of price times bytes."""
        items: dict[int, Array] = {}
        edges: dict[int, Array] = {}
        for r in range(len(self.resources)):
            price = np.zeros(len(self.instants[r]))
            for (resource, position), value in prices.items():
                if resource == r:
                    price[position] = value
            if not price.any():
                continue
            rising = np.concatenate(([0.0], np.cumsum(price)))
            per_byte = rising[self._last[r]] - rising[self._first[r]]
            for n in np.flatnonzero(per_byte > 0).tolist():
                on_item = n < len(self._items[r])
                owner, nbytes = self._items[r][n] if on_item else self._edges[r][n - len(self._items[r])]
                extra = items if on_item else edges
                term = per_byte[n] * nbytes
                extra[owner] = extra[owner] + term if owner in extra else term
        return items, edges

    def position(self, resource: str, instant: int) -> Row | None:
        """The last row at or before the instant."""
        if resource not in self.resources:
            return None
        r = self.resources.index(resource)
        position = int(np.searchsorted(self.instants[r], instant, side="right")) - 1
        return (r, position) if position >= 0 else None
