"""Picks for large cores: many starts, each repaired and annealed, and the best of all of them merged.

A single search ends in whatever valley it began in (on the contest's V the costs of 50 starts differ by a factor of
two), but different searches are right in different places. The union of the options that the best of them picked is a
small kernel of the problem, which presolve and the integer program solve exactly: the best mixture of all that was
found ("construct, merge, solve and adapt", Blum, Pinacho, Lopez-Ibanez and Lozano, 2016). Then a new generation
begins from the best picks.

The first starts are what message passing decodes on its way up (ascent.py), the searches are tree moves (trees.py).
In the end the options that the bound cannot rule out may be few enough to prove or improve the best picks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from solver.backends import Budget, kernel
from solver.backends.ascent import Climb, Found, as_prices, climb
from solver.backends.compiled import cost_of, use_of
from solver.backends.flat import Index
from solver.backends.sweeps import Sweeps
from solver.backends.trees import Forest
from solver.problem import Array, Problem
from solver.referee import evaluate
from solver.solution import OPTIMAL_REL_GAP, Outcome, Prices, relative_gap

_T = TypeVar("_T")

CLIMB_SHARE = 0.25  # of the time
STARTS = 32  # of the first generation
HEIRS = 8  # of later ones
POLISHERS = 2  # of picks near which better ones are wanted at once
ROUNDS = 16  # of tree moves, for each of a generation; doubled when a generation brings nothing
MOST_REPAIRS = 60  # rounds with rising prices before a start is given up
MOST_STALE = 4  # generations in a row without better picks that end the search
# Temperatures are in shares of what an item costs on average above the least it could cost.
HOT, COLD = 0.1, 1e-3
# Memory is cheap in some rounds and dear in others: what is cheap finds the cost, what is dear finds the room.
DEARNESS = (0.0, 0.3, 1.0, 1.0, 2.0)
MERGE_SHARE, MERGE_GAP, MERGE_NODES = 0.1, 1e-5, 200  # of the time left; of the integer program of a merger
MERGE_PAIRS = 60_000
NARROW_SHARE = 0.4  # of the time left


@dataclass(slots=True)
class _Runner:
    """One start: its best picks and what they cost."""

    number: int
    price: Array
    picks: Index
    cost: float


def run(core: Problem, budget: Budget, sweeps: Sweeps | None = None) -> Outcome:
    """Bound and picks of a core; "infeasible" only when proven. `sweeps` of this core, if given, carry messages in."""
    return _Race(core, budget, sweeps or Sweeps(core)).run()


def polish(core: Problem, budget: Budget, sweeps: Sweeps, known: Outcome) -> Outcome:
    """The same with better picks, if a few short searches from those that it has, at its prices, find some."""
    assert known.picks is not None
    price = np.zeros(len(sweeps.flat.room))
    for (resource, instant), worth in known.prices.items():
        row = sweeps.flat.position(resource, instant)
        if row is not None:
            price[row] = worth
    search = _Race(core, budget, sweeps)
    picks = np.array(known.picks, dtype=np.int64)
    search.offer(picks)
    for runner in search.all(
        lambda number: search.anneal(_Runner(number, price, picks, known.cost), ROUNDS), range(POLISHERS)
    ):
        search.offer(runner.picks)
    return replace(known, picks=search.best, cost=search.cost)


class _Race:
    def __init__(self, core: Problem, budget: Budget, sweeps: Sweeps) -> None:
        self.core, self.budget, self.sweeps = core, budget, sweeps
        self.forest = Forest(sweeps.flat)
        self.best: tuple[int, ...] | None = None
        self.cost, self.bound = math.inf, -math.inf
        self.stats = {"price_steps": 0.0, "generations": 0.0, "tree_rounds": 0.0}
        least = sum(float(cost.min()) for cost in core.costs) + sum(float(edge.cost.min()) for edge in core.edges)
        self.least = least

    def run(self) -> Outcome:
        if self.budget.start is not None:
            self.offer(np.array(self.budget.start, dtype=np.int64))
        if not self.sweeps.is_consistent():
            return self.outcome(None)  # some option has no allowed partner: messages would be infinite
        part = replace(self.budget, deadline=time.monotonic() + CLIMB_SHARE * self.budget.left_s())
        way = climb(self.core, self.sweeps, part)
        if way.bound == math.inf:
            return Outcome("infeasible", None, math.inf, math.inf, stats=self.stats)
        self.bound = way.bound
        self.stats["price_steps"] = float(way.steps)
        rounds, stale, generation = ROUNDS, 0, 0
        most = math.inf if self.budget.generations is None else self.budget.generations
        while not self.is_done() and stale < MOST_STALE and generation < most:
            before = self.cost
            self.merge(self.generation(way, generation, rounds, fresh=stale % 2 == 1))
            if generation == 1:
                self.narrow(way)
            generation += 1
            if self.cost < before:
                stale = 0
            else:
                stale, rounds = stale + 1, 2 * rounds
        return self.outcome(way)

    def is_done(self) -> bool:
        reached = relative_gap(self.cost, self.bound) <= max(self.budget.gap, OPTIMAL_REL_GAP / 2)
        return reached or not self.budget.left_s()

    def generation(self, way: Climb, number: int, rounds: int, fresh: bool) -> list[_Runner]:
        """New runners, the cheapest first: from the starts (the first ones, and `fresh`) or from the best picks."""
        self.stats["generations"] += 1
        first = number * STARTS
        if fresh or self.best is None or number == 0:
            starts = list(enumerate(_spread(way.found, STARTS), start=first))
            runners = self.all(lambda pair: self.settle(pair[1], pair[0]), starts)
        else:
            best = np.array(self.best, dtype=np.int64)
            runners = [_Runner(first + k, way.price, best, self.cost) for k in range(HEIRS)]
        runners = self.all(lambda runner: self.anneal(runner, rounds), runners)
        runners.sort(key=lambda runner: (runner.cost, runner.number))
        if runners:
            self.offer(runners[0].picks)
        return runners

    def merge(self, runners: list[_Runner]) -> None:
        """The best mixture of the best two, four, eight and so on, as long as that is quickly found."""
        several = 2
        while not self.is_done() and several < 2 * len(runners):
            everyone = [runner.picks for runner in runners[:several]]
            if self.best is not None:
                everyone.append(np.array(self.best, dtype=np.int64))
            keep = [np.unique(picks) for picks in np.array(everyone).T]
            part = replace(
                self.budget,
                start=self.best,
                gap=max(self.budget.gap, MERGE_GAP),
                deadline=time.monotonic() + MERGE_SHARE * self.budget.left_s(),
                nodes=MERGE_NODES,
            )
            answer = kernel.solve(self.core, keep, part, MERGE_PAIRS)
            if answer is None:
                break
            if answer.picks is not None:
                self.offer(np.array(answer.picks, dtype=np.int64))
            if not part.left_s():
                break
            several *= 2

    def all(self, work: Callable[[_T], _Runner | None], over: Iterable[_T]) -> list[_Runner]:
        """Do the work for each, on the budget's threads (the compiled loops hold no lock)."""
        if self.budget.threads == 1:
            done = [work(one) for one in over]
        else:
            with ThreadPoolExecutor(self.budget.threads) as pool:
                done = list(pool.map(work, over))
        return [runner for runner in done if runner is not None]

    def settle(self, start: Found, number: int) -> _Runner | None:
        """Make memory dearer where it is exceeded until the picks fit; None if they never do."""
        flat, forest = self.sweeps.flat, self.forest
        limit = np.maximum(flat.limit, 1.0)
        picks, price = start.picks.copy(), start.price.copy()
        for turn in range(MOST_REPAIRS):
            use = use_of(flat, picks)
            over = (use - flat.room) / limit
            if not (over > 0).any():
                cost = cost_of(flat, picks)
                return _Runner(number, start.price, picks, cost) if math.isfinite(cost) else None
            if not self.budget.left_s():
                return None
            worst = flat.peaks(over, 0.0)
            known = price[price > 0]
            typical = np.median(known) if len(known) else 0.01 * abs(self.bound) / flat.limit[worst[0]]
            price[worst] = 1.1 * price[worst] + 0.1 * typical * over[worst] / over[worst[0]]
            forest.round(picks, use, forest.priced(price), _seed(number, turn, 0), 0.0, False)
        return None

    def anneal(self, runner: _Runner, rounds: int) -> _Runner:
        """Search from the runner's picks, hot to cold; the best picks on the way."""
        flat, forest = self.sweeps.flat, self.forest
        base = max(runner.cost - self.least, 0.0) / max(flat.items, 1)
        priced = [forest.priced(dear * runner.price) for dear in DEARNESS]
        picks, best, cost = runner.picks.copy(), runner.picks, runner.cost
        for turn in range(rounds):
            if not self.budget.left_s():
                break
            temperature = base * HOT * (COLD / HOT) ** (turn / max(rounds - 1, 1))
            use = use_of(flat, picks)  # afresh: sums of changes would drift
            way = priced[turn % len(priced)]
            forest.round(picks, use, way, _seed(runner.number, turn, rounds), temperature, True)
            now = cost_of(flat, picks)
            if now < cost:
                cost, best = now, picks.copy()
        self.stats["tree_rounds"] += rounds
        return _Runner(runner.number, runner.price, best, cost)

    def narrow(self, way: Climb) -> None:
        """Solve what the bound cannot rule out, if it is little enough."""
        if self.best is None or self.is_done():
            return
        sweeps = self.sweeps
        sweeps.price(way.price)
        offset = float(way.price @ sweeps.flat.room)
        least = sweeps.least_costs(offset)
        cap = self.cost * (1 + 1e-10)
        keep = kernel.chosen(least, cap, self.best)
        self.stats["kernel_options"] = float(sum(len(kept) for kept in keep))
        part = replace(self.budget, start=self.best, deadline=time.monotonic() + NARROW_SHARE * self.budget.left_s())
        answer = kernel.solve(self.core, keep, part)
        if answer is not None:
            self.stats["kernel_pairs"] = float(answer.pairs)
            if answer.picks is not None:
                self.offer(np.array(answer.picks, dtype=np.int64))
            self.bound = max(self.bound, min(cap, answer.bound, self.cost))

    def offer(self, picks: Index) -> None:
        evaluation = evaluate(self.core, picks.tolist())
        if evaluation.fits and evaluation.cost < self.cost:
            self.best, self.cost = tuple(picks.tolist()), evaluation.cost

    def outcome(self, way: Climb | None) -> Outcome:
        prices: Prices = as_prices(self.sweeps, way.price) if way else {}
        if self.best is None:
            return Outcome("unknown", None, math.inf, self.bound, prices, self.stats)
        proven = relative_gap(self.cost, self.bound) <= OPTIMAL_REL_GAP
        bound = min(self.bound, self.cost)
        return Outcome("optimal" if proven else "feasible", self.best, self.cost, bound, prices, self.stats)


def _spread(found: list[Found], most: int) -> list[Found]:
    """At most so many, from all along the way; the last ones are the best informed."""
    if len(found) <= most:
        return found[::-1]
    places = np.unique(np.linspace(0, len(found) - 1, most).round().astype(int))
    return [found[place] for place in places[::-1].tolist()]


def _seed(number: int, turn: int, rounds: int) -> int:
    return (number * 1_000_003 + rounds) * 1_000_003 + turn
