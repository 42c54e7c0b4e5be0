"""The Lagrangian dual: prices for memory, the problem without limits solved exactly, and a kernel of what is left.

For prices lambda >= 0 of the instants that can bind,

    q(lambda) = min over all picks x of  cost(x) + sum_t lambda_t (use_t(x) - limit_t)

is at most the cost of every x that fits (Geoffrion, "Lagrangean relaxation for integer programming", 1974; Held and
Karp 1970), and at best no less than the linear program. Three steps:

1. q by message passing (sweeps.py). Where the picks that it decodes cost as much as its bound, both are exact: so on
   all problems of autopar seen so far, within ten sweeps. If the messages stall before, the options that they cannot
   rule out may be few enough for bucket elimination, which is exact. (Elimination of the whole core is out of reach:
   its tables have 10^11 to 10^15 entries.)
2. q is concave, and every picks x seen is a plane above it: the next prices come from the planes (bundle.py), mostly a
   handful of rows. Rows are added where the mixture of the best planes exceeds a limit. If q rises above what any
   picks could cost, nothing fits.
3. Where the planes meet, some fit and some are cheap. What separates them is in the reduced costs: every option whose
   least cost is above the best picks' is out for good, and among the options near the bound the integer program finds
   the mixture (kernel.py), first in a small kernel, then in larger ones until nothing is left outside.

The bound is valid throughout. Where messages stay far from exact the backend gives up early; see messages.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from solver.backends import Budget, kernel
from solver.backends.bundle import propose
from solver.backends.compiled import cost_of
from solver.backends.flat import Index
from solver.backends.sweeps import Sweeps, dearest
from solver.problem import Array, Edge, Problem
from solver.referee import evaluate
from solver.solution import OPTIMAL_REL_GAP, Outcome, relative_gap

MOST_ROUNDS = 200
MOST_SWEEPS = 50  # per evaluation; from known messages 1 to 8 are usual
# Messages count as stuck after PATIENCE sweeps that neither halve the distance to exact nor raise the bound by RISE.
PATIENCE, RISE = 6, 1e-5
LOOSE = 0.02  # share of the cost: stuck further off than this, another backend is better
EXACT = 1e-10  # share of the cost
ROWS_PER_ROUND, MOST_ROWS = 4, 64
STEP, STEP_SWEEPS, STEP_GAIN = 0.8, 16, 5e-3  # of prices that are tried in turn where messages are loose
SHARES = (1e-3, 0.03, 0.2, 0.5, 1.0)  # of the gap: how far above the bound the options of each kernel lie
NODES = 200  # of the search tree of each kernel but the last


def run(core: Problem, budget: Budget, sweeps: Sweeps | None = None) -> Outcome:
    """Bound and picks; "infeasible" only when proven. `sweeps` of this core, if given, carry messages in and out."""
    return _Dual(core, budget, sweeps or Sweeps(core)).run()


class _Dual:
    def __init__(self, core: Problem, budget: Budget, sweeps: Sweeps) -> None:
        self.core, self.budget = core, budget
        self.sweeps = sweeps
        self.limit = np.maximum(sweeps.flat.limit, 1.0)
        self.best: tuple[int, ...] | None = None
        self.cost, self.bound = math.inf, -math.inf
        self.rows: list[int] = []  # positions that have a price
        self.centre = np.zeros(0)  # the prices of the best bound
        self.radius = np.zeros(0)
        self.seen: dict[tuple[int, ...], int] = {}
        self.plane_cost: list[float] = []
        self.plane_over: list[Array] = []
        self.forth = False  # direction of the last sweep
        self.is_loose = False
        self.eliminate = True
        self.stats = {"evaluations": 0.0, "sweeps": 0.0, "kernels": 0.0}

    def run(self) -> Outcome:
        if self.budget.start is not None:
            self.look(self.budget.start)
        # without a partner for every option messages would be infinite: the kernel of all options is what remains
        if self.sweeps.is_consistent() and self.ascend() == "infeasible":
            return Outcome("infeasible", None, math.inf, math.inf, stats=self.stats)
        status = None if self.is_loose or self.is_done() else self.narrow()
        return self.outcome(status)

    def is_done(self) -> bool:
        return relative_gap(self.cost, self.bound) <= max(self.budget.gap, OPTIMAL_REL_GAP / 2)

    # The dual

    def ascend(self) -> str | None:
        """Raise the bound until prices are best; "infeasible" if it passes every cost."""
        for (resource, instant), price in sorted(self.budget.prices.items()):
            row = self.sweeps.flat.position(resource, instant)
            if price > 0 and row is not None and row not in self.rows:
                self.add_row(row, price)
        distance = self.evaluate(self.centre)
        if not self.plane_cost or distance > LOOSE * abs(self.plane_value(self.centre)):
            self.is_loose = not self.is_small()
            self.stats["loose"] = float(self.is_loose)
            if self.budget.quick:
                self.descend()
            return None
        ceiling, rounding = dearest(self.core)
        mixture = self.plane_over[-1]
        self.add_missing(mixture)
        for _ in range(MOST_ROUNDS):
            if self.is_done() or not self.budget.left_s():
                break
            if self.bound > ceiling + rounding + 1e-9 * float(self.centre @ self._magnitude()):
                return "infeasible"
            if not self.rows:
                break
            costs = np.array(self.plane_cost)
            slopes = self.slopes()
            proposal = propose(costs, slopes, self.centre, self.radius, self.bound)
            gain = proposal.value - self.bound
            if proposal.at_wall and 1e-12 * abs(self.bound) < gain <= self._tolerance():
                self.radius = self.radius * 10  # little to gain, but only because the box is small
                continue
            if gain <= self._tolerance():
                if not self.add_missing(proposal.weights @ np.array(self.plane_over)):
                    break
                continue
            known, before = len(self.plane_cost), self.bound
            self.evaluate(proposal.prices)
            if self.bound > before:
                if proposal.at_wall:
                    self.radius = self.radius * 4
            elif len(self.plane_cost) == known:
                break  # nothing learnt: the messages are stuck
            else:
                self.radius = self.radius / 2
        return None

    def descend(self) -> None:
        """Try lower prices as long as that raises the bound, for picks say little while messages are far from exact;
        and the prices of a part of the core, which is what a quick search begins with, are too high for the whole.
        """
        prices, before = self.centre, -math.inf
        while len(prices) and self.bound > before + STEP_GAIN * abs(self.bound) and self.budget.left_s():
            before, prices = self.bound, STEP * prices
            self.set_prices(prices)
            low = -math.inf
            for _ in range(STEP_SWEEPS):
                self.forth = not self.forth
                self.stats["sweeps"] += 1
                low = max(low, self.sweeps.sweep(self.forth)[1])
            low -= float(prices @ self.sweeps.flat.room[self.rows])
            if low > self.bound:
                self.bound, self.centre = low, prices

    def _tolerance(self) -> float:
        return max(1e-8, 0.02 * self.budget.gap) * abs(self.bound)

    def _magnitude(self) -> Array:
        return self.sweeps.flat.limit[self.rows]

    def slopes(self) -> Array:
        """Bytes over the limit, of every plane at every row."""
        return np.array([over[self.rows] for over in self.plane_over])

    def plane_value(self, prices: Array) -> float:
        """The least of the planes at these prices."""
        return float((np.array(self.plane_cost) + self.slopes() @ prices).min()) if self.rows else min(self.plane_cost)

    def add_row(self, row: int, price: float = 0.0) -> None:
        self.rows.append(row)
        self.centre = np.append(self.centre, price)
        steepest = max((float(np.abs(over[row])) for over in self.plane_over), default=0.0)
        size = 0.01 * abs(self.bound) if math.isfinite(self.bound) and self.bound else 1.0
        first = size / max(steepest, 1e-3 * float(self.sweeps.flat.limit[row]), 1e-300)
        self.radius = np.append(self.radius, max(first, 0.1 * price))

    def add_missing(self, over: Array) -> bool:
        """Price the worst peaks of the mixture that have no row yet."""
        excess = over / self.limit
        fresh = [row for row in self.sweeps.flat.peaks(excess, 1e-7).tolist() if row not in self.rows]
        fresh = fresh[: min(ROWS_PER_ROUND, MOST_ROWS - len(self.rows))]
        for row in fresh:
            self.add_row(row)
        return bool(fresh)

    def set_prices(self, prices: Array) -> None:
        price = np.zeros(len(self.limit))
        price[self.rows] = prices
        self.sweeps.price(price)

    def evaluate(self, prices: Array) -> float:
        """Take in q at these prices: its picks and its bound. How far the two stay apart."""
        self.stats["evaluations"] += 1
        self.set_prices(prices)
        offset = float(prices @ self.sweeps.flat.room[self.rows])
        low, reached, before, since = -math.inf, math.inf, -math.inf, 0
        for _ in range(MOST_SWEEPS):
            self.forth = not self.forth
            self.stats["sweeps"] += 1
            picks, value = self.sweeps.sweep(self.forth)
            low = max(low, value - offset)
            self.look(picks)
            high = self.plane_value(prices) if self.plane_cost else math.inf
            distance = high - low
            if distance <= EXACT * max(abs(high), abs(offset)) or not self.budget.left_s():
                break
            since += 1
            if distance <= reached / 2 or low > before + RISE * abs(low):
                reached, before, since = min(reached, distance), low, 0
            elif since >= PATIENCE:
                if self.eliminate and math.isfinite(high):
                    low = max(low, self.eliminated(prices, offset, low, high))
                break
        if low > self.bound:
            self.bound, self.centre = low, prices
        return (self.plane_value(prices) if self.plane_cost else math.inf) - low

    def eliminated(self, prices: Array, offset: float, low: float, high: float) -> float:
        """The exact q if the options that messages leave are few enough to eliminate; otherwise `low`."""
        least = self.sweeps.least_costs(offset)
        self.forth = False  # its last sweep went back
        keep = kernel.chosen(least, high + EXACT * abs(high), None)
        sweeps, core = self.sweeps, self.core
        edges = list(core.edges)
        for number in map(int, sweeps.flat.holding):
            edges[number] = Edge(edges[number].src, edges[number].dst, sweeps.matrix(number))
        free = Problem(tuple(sweeps.split(sweeps.costs)), tuple(edges))
        answer = kernel.solve(free, keep, self.budget, most_pairs=0)
        if answer is None or answer.picks is None:
            self.eliminate = False  # elsewhere it will not be much better
            return low
        self.look(answer.picks)
        return min(answer.bound - offset, high)

    def look(self, at: Sequence[int] | Index) -> None:
        """Remember the picks' plane, and the picks if they are the best that fit."""
        picks: tuple[int, ...] = tuple(np.asarray(at).tolist())
        if picks in self.seen:
            return
        flat_picks = np.array(picks, dtype=np.int64)
        cost = cost_of(self.sweeps.flat, flat_picks)
        if not math.isfinite(cost):
            return
        over = self.sweeps.over(flat_picks)
        self.seen[picks] = len(self.plane_cost)
        self.plane_cost.append(cost)
        self.plane_over.append(over)
        if cost < self.cost and bool((over <= 0).all()):
            self.offer(picks)

    def offer(self, picks: tuple[int, ...]) -> None:
        evaluation = evaluate(self.core, picks)
        if evaluation.fits and evaluation.cost < self.cost:
            self.best, self.cost = picks, evaluation.cost

    # The kernels

    def narrow(self) -> str | None:
        """Solve kernels, each larger than the one before, until nothing outside can matter; "infeasible" if proven."""
        offset = 0.0
        if not self.sweeps.is_consistent():
            least = [np.full(len(cost), self.bound) for cost in self.core.costs]
        else:
            self.set_prices(self.centre)
            offset = float(self.centre @ self._magnitude())
            least = self.sweeps.least_costs(float(self.centre @ self.sweeps.flat.room[self.rows]))
        hair = EXACT * max(abs(self.cost) if math.isfinite(self.cost) else 0.0, offset)
        counts: list[int] = []
        for share in SHARES:
            known = math.isfinite(self.cost)
            cap = self.bound + share * (self.cost - self.bound if known else 10 * share * abs(self.bound))
            last = share == 1.0
            if last:
                # a hair above: rounding must not cut off the best
                cap = self.cost + hair
            elif not math.isfinite(cap):
                continue
            keep = kernel.chosen(least, cap, self.best)
            count = sum(len(kept) for kept in keep)
            if count in counts and not last:
                continue
            counts.append(count)
            self.stats["kernels"] += 1
            gap = self.budget.gap if last else max(self.budget.gap, 0.1 * min(relative_gap(self.cost, self.bound), 0.1))
            part = replace(self.budget, gap=gap, start=self.best, nodes=None if last else NODES)
            answer = kernel.solve(self.core, keep, part)
            if answer is None:
                break
            if answer.picks is not None:
                self.offer(answer.picks)
            elif last and not known and answer.bound == math.inf:
                return "infeasible"
            self.bound = max(self.bound, min(cap, answer.bound, self.cost))
            if self.is_done() or not self.budget.left_s():
                break
        return None

    def is_small(self) -> bool:
        return sum(edge.cost.size for edge in self.core.edges) <= kernel.MOST_PAIRS

    def outcome(self, status: str | None) -> Outcome:
        prices: dict[tuple[str, int], float] = {}
        for row, price in sorted(zip(self.rows, self.centre.tolist(), strict=True)):
            if price > 0:
                prices[self.sweeps.flat.key(row)] = price
        if self.best is None:
            if status == "infeasible":
                return Outcome("infeasible", None, math.inf, math.inf, prices, self.stats)
            return Outcome("unknown", None, math.inf, self.bound, prices, self.stats)
        proven = relative_gap(self.cost, self.bound) <= OPTIMAL_REL_GAP
        bound = min(self.bound, self.cost)
        return Outcome("optimal" if proven else "feasible", self.best, self.cost, bound, prices, self.stats)
