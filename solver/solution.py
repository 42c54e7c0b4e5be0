"""What solving gives back: the picks, how good they are for certain, and what memory is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["optimal", "feasible", "infeasible", "unknown"]
Prices = Mapping[tuple[str, int], float]

# Backends work in double precision to a relative gap of 1e-7; "optimal" claims no more than this.
OPTIMAL_REL_GAP = 2e-7


class BackendError(RuntimeError):
    """A backend's claim does not survive the referee: a defect of ours or of the solver below."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why one resource is too small: bytes at `instant` of the plan with the smallest peak that was found.

    No plan peaks below `at_least` bytes; a plan with peak `enough` bytes is known (None: none found in time). When
    the two agree, this is the exact smallest workable limit. `alone` says that other limits were set aside.
    """

    resource: str
    limit: float
    at_least: float
    enough: float | None
    instant: int
    tenants: tuple[tuple[str, float], ...]
    alone: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a problem is infeasible: one sentence, and a Shortage for every resource that is too small.

    `contradictory`: no limit is to blame, each choice of options has a forbidden pair.
    """

    text: str
    shortages: tuple[Shortage, ...] = ()
    contradictory: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """A backend's answer for a core. `bound` is a proven lower bound on the cost (-inf: none known)."""

    status: Status
    picks: tuple[int, ...] | None
    cost: float
    bound: float
    prices: Prices = field(default_factory=dict[tuple[str, int], float])
    stats: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Solution:
    """The answer of `solve`.

    status       "optimal" (within OPTIMAL_REL_GAP), "feasible" (picks, but cut by time or by the gap asked for),
                 "infeasible" (proven; see explanation) or "unknown" (no picks found in time)
    cost, bound  cost of the picks by the referee (inf without picks); no solution costs less than bound
    prices       (resource, instant) -> cost saved per byte by which the limit grows; of the LP, not of the picks
    stats        sizes: items and edges before and after presolve, variables, rows, how often each reduction fired
    """

    status: Status
    picks: tuple[int, ...] | None
    cost: float
    bound: float
    seconds: float
    explanation: Explanation | None = None
    stats: Mapping[str, float] = field(default_factory=dict[str, float])
    prices: Prices = field(default_factory=dict[tuple[str, int], float])

    @property
    def gap(self) -> float:
        """(cost - bound) / cost: at most this share of the cost could still be saved."""
        return relative_gap(self.cost, self.bound)


def relative_gap(cost: float, bound: float) -> float:
    """(cost - bound) / |cost|, 0 when they agree, inf when either is unknown."""
    if math.isinf(cost) or math.isinf(bound):
        return math.inf
    if cost <= bound:
        return 0.0
    return (cost - bound) / abs(cost) if cost else math.inf
