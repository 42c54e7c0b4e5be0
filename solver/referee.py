"""The referee: what a list of picks costs and how many bytes it holds, computed the plain way.

Shares no code with presolve or backends, so that an error there cannot hide itself here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from solver.problem import Problem

# Sums of bytes are rounded; with limits below 10^12 bytes this allows less than one byte.
FITS_REL_TOL = 1e-12


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Cost (inf when an option or pair is forbidden), and per resource the peak bytes and its first instant."""

    cost: float
    peak: dict[str, float]
    peak_at: dict[str, int]
    fits: bool


def evaluate(problem: Problem, picks: Sequence[int]) -> Evaluation:
    """Price `picks`. Raises ValueError if they are not one existing option per item."""
    if len(picks) != len(problem.costs):
        raise ValueError(f"{len(picks)} picks for {len(problem.costs)} items")
    for item, pick in enumerate(picks):
        if not 0 <= pick < len(problem.costs[item]):
            raise ValueError(
                f"{problem.name(item)} picks option {pick}, but its options are 0 to {len(problem.costs[item]) - 1}"
            )
    terms = [float(cost[pick]) for cost, pick in zip(problem.costs, picks, strict=True)]
    terms += [float(edge.cost[picks[edge.src], picks[edge.dst]]) for edge in problem.edges]
    peak: dict[str, float] = {}
    peak_at: dict[str, int] = {}
    for resource, events in _events(problem, picks).items():
        peak[resource], peak_at[resource] = _peak(events)
    fits = all(peak.get(name, 0.0) <= limit * (1 + FITS_REL_TOL) for name, limit in problem.limits.items())
    return Evaluation(math.fsum(terms), peak, peak_at, fits)


def tenants(problem: Problem, picks: Sequence[int], resource: str, instant: int, n: int = 5) -> list[tuple[str, float]]:
    """The `n` largest holders of `resource` at `instant`: (name, bytes), largest first."""
    held: dict[str, float] = {}
    for usage in problem.usages:
        if usage.resource == resource and usage.start <= instant < usage.end:
            name = problem.name(usage.item)
            held[name] = held.get(name, 0.0) + float(usage.nbytes[picks[usage.item]])
    for usage in problem.edge_usages:
        if usage.resource == resource and usage.start <= instant < usage.end:
            edge = problem.edges[usage.edge]
            name = f"{problem.name(edge.src)} -> {problem.name(edge.dst)}"
            held[name] = held.get(name, 0.0) + float(usage.nbytes[picks[edge.src], picks[edge.dst]])
    largest = sorted(held.items(), key=lambda pair: (-pair[1], pair[0]))
    return [(name, nbytes) for name, nbytes in largest[:n] if nbytes > 0]


def _events(problem: Problem, picks: Sequence[int]) -> dict[str, dict[int, list[float]]]:
    """For every resource and instant, the bytes that appear (positive) and disappear (negative) there."""
    events: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in problem.limits}
    held = [(usage, float(usage.nbytes[picks[usage.item]])) for usage in problem.usages]
    ends = [(picks[edge.src], picks[edge.dst]) for edge in problem.edges]
    on_edges = [(usage, float(usage.nbytes[ends[usage.edge]])) for usage in problem.edge_usages]
    for usage, nbytes in (*held, *on_edges):
        at = events.setdefault(usage.resource, defaultdict(list))
        if nbytes and usage.start < usage.end:
            at[usage.start].append(nbytes)
            at[usage.end].append(-nbytes)
    return events


def _peak(events: dict[int, list[float]]) -> tuple[float, int]:
    """Largest running total and the first instant that reaches it."""
    peak, peak_at, held = 0.0, min(events, default=0), 0.0
    for instant in sorted(events):
        held += math.fsum(events[instant])
        if held > peak:
            peak, peak_at = held, instant
    return peak, peak_at
