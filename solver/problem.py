"""The problem: every item takes one option, so that the total cost is least and every resource fits at every instant.

    minimise    sum_u cost_u[x_u]  +  sum_(u,v) cost_uv[x_u, x_v]
    subject to  at every instant t, for every limited resource r:
                sum of the bytes of all usages of r whose interval [start, end) contains t  <=  limit_r

Costs may be in any one unit; +inf forbids an option or a pair. Instants are integers (program points), usages are
in bytes and never negative. Nothing here knows what an item stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

EXACT = 2.0**53  # below, sums of whole numbers lose nothing
Array = NDArray[np.float64]
Index = NDArray[np.intp]  # numbers of options, or of positions


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """Cost of the options of two items together: `cost[i, j]` if `src` takes i and `dst` takes j; +inf forbids."""

    src: int
    dst: int
    cost: Array

    def __post_init__(self) -> None:
        object.__setattr__(self, "cost", np.asarray(self.cost, dtype=np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class Usage:
    """Bytes of `resource` that each option of `item` holds during the instants start <= t < end."""

    item: int
    resource: str
    start: int
    end: int
    nbytes: Array

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", np.asarray(self.nbytes, dtype=np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class EdgeUsage:
    """Bytes of `resource` that each pair of options of edge number `edge` holds during start <= t < end."""

    edge: int
    resource: str
    start: int
    end: int
    nbytes: Array

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", np.asarray(self.nbytes, dtype=np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Items (one cost vector each), edges, usages and limits (bytes; a resource without one is unlimited).

    Parallel edges add. An edge from an item to itself counts its diagonal. Raises ValueError naming the first
    thing that does not fit. Arrays are shared, not copied: do not write to them afterwards.
    """

    costs: tuple[Array, ...]
    edges: tuple[Edge, ...]
    usages: tuple[Usage, ...] = ()
    edge_usages: tuple[EdgeUsage, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict[str, float])
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "costs", tuple(np.asarray(cost, dtype=np.float64) for cost in self.costs))
        for name in ("edges", "usages", "edge_usages", "names"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "limits", {name: float(limit) for name, limit in self.limits.items()})
        _check_items(self)
        _check_edges(self)
        _check_usages(self)
        _check_limits(self)
        _check_magnitude(self)

    def name(self, item: int) -> str:
        """What messages call the item."""
        return self.names[item] if self.names else f"item {item}"


def _check_items(problem: Problem) -> None:
    if problem.names and len(problem.names) != len(problem.costs):
        raise ValueError(f"{len(problem.names)} names for {len(problem.costs)} items; give one name per item or none")
    for item, cost in enumerate(problem.costs):
        if cost.ndim != 1 or not len(cost):
            shape = cost.shape
            raise ValueError(f"{problem.name(item)}: costs have shape {shape}; one number per option is needed")
    if problem.costs and not _is_cost(float(np.concatenate(problem.costs).min())):
        for item, cost in enumerate(problem.costs):
            _check_costs(cost, f"{problem.name(item)}: costs")


def _check_edges(problem: Problem) -> None:
    known = len(problem.costs)
    checked: set[int] = set()  # many edges share one array: look at each only once
    for number, edge in enumerate(problem.edges):
        for end in (edge.src, edge.dst):
            if not 0 <= end < known:
                raise ValueError(f"edge {number} names item {end}, but the items are 0 to {known - 1}")
        want = (len(problem.costs[edge.src]), len(problem.costs[edge.dst]))
        if edge.cost.shape != want:
            raise ValueError(
                f"edge {number} from {problem.name(edge.src)} to {problem.name(edge.dst)}: "
                f"its costs have shape {edge.cost.shape}, but the options make it {want}"
            )
        if id(edge.cost) not in checked:
            checked.add(id(edge.cost))
            _check_costs(edge.cost, f"edge {number}: costs")


def _is_cost(least: float) -> bool:
    """`least`: of an array, nan as soon as one entry is."""
    return least > -np.inf


def _check_costs(cost: Array, what: str) -> None:
    least = float(cost.min())
    if _is_cost(least):
        return
    if np.isnan(least):
        raise ValueError(f"{what} contain nan; use inf to forbid an option")
    raise ValueError(f"{what} contain -inf; only +inf has a meaning (forbidden)")


def _check_usages(problem: Problem) -> None:
    checked: set[int] = set()
    for number, usage in enumerate(problem.usages):
        if not 0 <= usage.item < len(problem.costs):
            raise ValueError(f"usage {number} names item {usage.item}, but the items are 0 to {len(problem.costs) - 1}")
        what = "usage", number, problem.name(usage.item)
        _check_bytes(usage, problem.costs[usage.item].shape, what, checked)
    for number, usage in enumerate(problem.edge_usages):
        if not 0 <= usage.edge < len(problem.edges):
            raise ValueError(
                f"edge usage {number} names edge {usage.edge}, but the edges are 0 to {len(problem.edges) - 1}"
            )
        what = "edge usage", number, f"edge {usage.edge}"
        _check_bytes(usage, problem.edges[usage.edge].cost.shape, what, checked)


def _check_bytes(
    usage: Usage | EdgeUsage, shape: tuple[int, ...], what: tuple[str, int, str], checked: set[int]
) -> None:
    """`what`: kind, number and holder of the usage, for messages; `checked`: arrays that were looked at already."""
    kind, number, holder = what
    if usage.end < usage.start:
        wrong = f"its interval [{usage.start}, {usage.end}) ends before it starts"
    elif usage.nbytes.shape != shape:
        wrong = f"its bytes have shape {usage.nbytes.shape}, but the options make it {shape}"
    elif id(usage.nbytes) in checked:
        return
    else:
        checked.add(id(usage.nbytes))
        least, most = float(usage.nbytes.min()), float(usage.nbytes.max())
        if least >= 0 and most < np.inf:  # neither is true of nan
            return
        wrong = f"bytes run from {least:g} to {most:g}; they must be finite and not negative"
    raise ValueError(f"{kind} {number} of {usage.resource} by {holder}: {wrong}")


def _check_limits(problem: Problem) -> None:
    for resource, limit in problem.limits.items():
        if not limit >= 0:
            raise ValueError(f"limit of {resource} is {limit:g} bytes; it must not be negative")


def _check_magnitude(problem: Problem) -> None:
    total = 0.0
    largest: dict[int, float] = {}
    if problem.costs:
        flat = np.abs(np.concatenate(problem.costs))
        starts = np.cumsum([0, *(len(cost) for cost in problem.costs[:-1])])
        total += sum(np.maximum.reduceat(np.where(flat < np.inf, flat, 0.0), starts).tolist())
    for array in (edge.cost for edge in problem.edges):
        if id(array) not in largest:
            finite = array[np.isfinite(array)]
            largest[id(array)] = float(np.abs(finite).max()) if finite.size else 0.0
        total += largest[id(array)]
    if total > 1e300:
        raise ValueError(f"the costs may add up to {total:g}, which overflows; use a larger unit of cost")
    for resource, nbytes in _most_at_once(problem).items():
        if nbytes >= EXACT:
            raise ValueError(
                f"the usages of {resource} may add up to {nbytes:g} bytes at once; they are exact below 2^53 only: "
                "use a larger unit"
            )


def _most_at_once(problem: Problem) -> dict[str, float]:
    """Resource -> the sum of the largest bytes of all usages that share an instant, at its largest."""
    most: dict[int, float] = {}
    spans: dict[str, list[tuple[int, int, float]]] = {}
    for usage in (*problem.usages, *problem.edge_usages):
        if id(usage.nbytes) not in most:
            most[id(usage.nbytes)] = float(usage.nbytes.max())
        if usage.start < usage.end:
            spans.setdefault(usage.resource, []).append((usage.start, usage.end, most[id(usage.nbytes)]))
    found: dict[str, float] = {}
    for resource, held in spans.items():
        starts, ends, nbytes = (np.array(column) for column in zip(*held, strict=True))
        instants = np.unique(np.concatenate((starts, ends)))
        change = np.zeros(len(instants))
        np.add.at(change, np.searchsorted(instants, starts), nbytes)
        np.subtract.at(change, np.searchsorted(instants, ends), nbytes)
        found[resource] = float(np.cumsum(change).max())
    return found
