"""Bounds and picks for cores that are too large for a linear program: message passing and prices of memory.

For any prices lambda >= 0 of the binding instants the least of

    sum_u [cost_u + held_u lambda](x_u)  +  sum_uv [cost_uv + held_uv lambda](x_u, x_v)  -  room lambda

over all picks, which fit or not, is at most the cost of every solution that fits. sweeps.py bounds that least value and
decodes picks, whose excess of memory says how to move the prices (Polyak's step). The best decoded picks are repaired
and improved one item at a time.

Exact only by luck: its gap is what local consistency leaves, about that of the linear program.
"""

from __future__ import annotations

import math
import time

import numpy as np
from numpy.typing import NDArray

from solver.backends import Budget
from solver.backends.local import improve
from solver.backends.lowering import Lowered, bincount, lower
from solver.backends.sweeps import Sweeps
from solver.problem import Array, Problem
from solver.referee import evaluate
from solver.solution import OPTIMAL_REL_GAP, Outcome, Prices, relative_gap

FIRST_SWEEPS, SWEEPS_PER_PRICE = 4, 1
MOST_INSTANTS = 64
REACH = 1.0  # share of the bound that a price step may aim above it; 0.05 was far too slow on M and S
POLISH_SHARE = 0.25  # of the time so far
PATIENCE = 8  # price steps without a better bound before the step is halved


def run(core: Problem, budget: Budget, sweeps: Sweeps | None = None) -> Outcome:
    """Improve bound and picks until the deadline or the budget's gap. `sweeps` of this core, if given, go on."""
    return _Ascent(core, budget, sweeps or Sweeps(core)).run()


class _Ascent:
    def __init__(self, core: Problem, budget: Budget, sweeps: Sweeps) -> None:
        self.core, self.budget = core, budget
        self.lowered: Lowered = lower(core)
        self.best: tuple[int, ...] | None = None
        self.cost, self.bound = math.inf, self.lowered.offset
        self.sweeps = sweeps
        self.holding = {usage.edge for usage in core.edge_usages}
        self.price: list[Array] = [np.zeros(len(profile.instants)) for profile in self.lowered.profiles]
        self.best_price: list[Array] = _copied(self.price)

    def run(self) -> Outcome:
        if self.budget.start is not None:
            self._offer(self.budget.start)
        if not self.sweeps.is_consistent():
            return self._outcome()  # some option has no allowed partner: messages would be infinite
        self._price_in()
        step, stale, rounds = 1.0, 0, 0
        began, polish_s = time.monotonic(), 0.0
        while True:
            picks: tuple[int, ...] = ()
            value = -math.inf
            for _ in range(SWEEPS_PER_PRICE if rounds else FIRST_SWEEPS):
                picks, forth = self._sweep(forth=True)
                _, back = self._sweep(forth=False)
                value = max(value, forth, back)
                if not self.budget.left_s():
                    break
            if value > self.bound + 1e-6 * abs(self.bound):
                stale = 0
            else:
                stale += 1
            if value > self.bound:
                self.bound, self.best_price = value, _copied(self.price)
            now = time.monotonic()
            if not rounds or polish_s < POLISH_SHARE * (now - began) or not self.budget.left_s():
                self._offer(improve(self.core, self.lowered, picks, self._polish_until()))
                polish_s += time.monotonic() - now
            self._offer(picks)
            rounds += 1
            done = relative_gap(self.cost, self.bound) <= max(self.budget.gap, OPTIMAL_REL_GAP / 2)
            if done or not self.budget.left_s() or step < 1e-3:
                return self._outcome()
            if stale >= PATIENCE:
                step, stale = step / 2, 0
                self.return_to_best()
            self._move_prices(picks, value, step)

    def _polish_until(self) -> float:
        # on a large core improving may take longer than many sweeps; it may outlast the deadline by a little
        now = time.monotonic()
        return max(now + 0.2 * self.budget.left_s(), min(now + 1.0, self.budget.deadline + 0.5))

    def return_to_best(self) -> None:
        """Go on from the prices of the best bound."""
        self.price = _copied(self.best_price)
        self._price_in()

    def _sweep(self, forth: bool) -> tuple[tuple[int, ...], float]:
        picks, bound = self.sweeps.sweep(forth)
        return picks, bound - sum(
            float(price @ p.room) for price, p in zip(self.price, self.lowered.profiles, strict=True)
        )

    def _move_prices(self, picks: tuple[int, ...], value: float, step: float) -> None:
        """One subgradient step: dearer where the picks exceed the limit, cheaper where room is left."""
        moves: list[Array] = []
        norm = 0.0
        x = self._x(picks)
        for profile, price in zip(self.lowered.profiles, self.price, strict=True):
            over = profile.use(x) - profile.room
            chosen = _separated_peaks(over, price)
            move = np.zeros(len(over))
            move[chosen] = over[chosen]
            move[(price <= 0) & (over < 0)] = 0.0
            moves.append(move / max(profile.limit, 1.0))
            norm += float((moves[-1] ** 2).sum())
        if norm == 0:
            return
        # aim at the cost at hand, but not far above the bound: early costs are poor and would make the step too long
        target = min(self.cost, self.bound + REACH * abs(self.bound))
        length = step * max(target - value, 1e-6 * abs(value)) / norm
        for r, (profile, move) in enumerate(zip(self.lowered.profiles, moves, strict=True)):
            self.price[r] = np.maximum(0.0, self.price[r] + length * move / max(profile.limit, 1.0))
        self._price_in()

    def _price_in(self) -> None:
        """Add price times bytes to the costs of options and pairs."""
        extra = np.zeros(len(self.lowered.cost))
        for profile, price in zip(self.lowered.profiles, self.price, strict=True):
            rising = np.concatenate(([0.0], np.cumsum(price)))
            per_byte = rising[profile.last] - rising[profile.first]
            extra += bincount(profile.column, profile.nbytes * per_byte, len(extra))
        bounds = self.lowered.x_first.tolist()
        for u, cost in enumerate(self.core.costs):
            if bounds[u + 1] > bounds[u]:
                self.sweeps.costs[u] = cost + extra[bounds[u] : bounds[u + 1]]
        column = self.lowered.num_x
        for number, edge in enumerate(self.core.edges) if self.core.edge_usages else ():
            i, j = np.nonzero(edge.cost < np.inf)
            here = extra[column : column + len(i)]
            column += len(i)
            if number in self.holding:
                priced = edge.cost.copy()
                priced[i, j] += here
                self.sweeps.set_edge(number, priced)

    def _x(self, picks: tuple[int, ...]) -> Array:
        if self.core.edge_usages:
            return self.lowered.point(picks)
        x = np.zeros(len(self.lowered.cost))
        several = np.diff(self.lowered.x_first) > 0
        x[(self.lowered.x_first[:-1] + np.array(picks))[several]] = 1.0
        return x

    def _offer(self, picks: tuple[int, ...]) -> None:
        evaluation = evaluate(self.core, picks)
        if evaluation.fits and evaluation.cost < self.cost:
            self.best, self.cost = picks, evaluation.cost

    def _outcome(self) -> Outcome:
        prices: dict[tuple[str, int], float] = {}
        for profile, price in zip(self.lowered.profiles, self.best_price, strict=True):
            for k in np.flatnonzero(price):
                prices[profile.resource, int(profile.instants[k])] = float(price[k])
        return outcome(self.best, self.cost, self.bound, prices)


def _copied(prices: list[Array]) -> list[Array]:
    return [price.copy() for price in prices]


def outcome(best: tuple[int, ...] | None, cost: float, bound: float, prices: Prices) -> Outcome:
    """Label what is known."""
    if best is None:
        return Outcome("unknown", None, math.inf, bound, prices)
    proven = relative_gap(cost, bound) <= OPTIMAL_REL_GAP
    return Outcome("optimal" if proven else "feasible", best, cost, min(bound, cost), prices)


def _separated_peaks(over: Array, price: Array) -> NDArray[np.intp]:
    """Positions that have a price already, and the worst local maxima, MOST_INSTANTS in all."""
    padded = np.concatenate(([-np.inf], over, [-np.inf]))
    peaks = np.flatnonzero((over > 0) & (over >= padded[:-2]) & (over > padded[2:]))
    peaks = peaks[np.argsort(-over[peaks], kind="stable")]
    priced = np.flatnonzero(price > 0)
    fresh = peaks[: max(0, MOST_INSTANTS - len(priced))]
    return np.union1d(priced, fresh)
