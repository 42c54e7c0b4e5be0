"""Prices of memory that raise the bound of message passing, and picks to begin a search from.

For any prices lambda >= 0 of the positions that can bind

    sum_u [cost_u + held_u lambda](x_u)  +  sum_uv [cost_uv + held_uv lambda](x_u, x_v)  -  room lambda

is, at its least, at most the cost of every solution that fits. sweeps.py bounds that least value and decodes picks,
whose excess of memory, averaged over steps, is a direction in which to move the prices (a deflected subgradient step of
Polyak's length, cut where it leads nowhere; Camerini, Fratta and Maffioli, 1975). The bound is about that of the linear
program; the decoded picks, right to different degrees in different places, are starts for race.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from solver.backends import Budget
from solver.backends.flat import Index
from solver.backends.sweeps import Sweeps, dearest
from solver.problem import Array, Problem
from solver.solution import Prices

FIRST_SWEEPS = 4
MOST_INSTANTS = 64  # with a price rising from zero at a time
REACH = 0.05  # share of the bound that the first price step aims above it
PATIENCE = 8  # price steps without a better bound before the step is cut
RISE = 1e-6  # share of the bound that counts as better
# Of earlier directions: picks jump to and fro, their average is near what the linear program holds. On S this raises
# the bound by 4 %; on M the plain direction is better, so that it follows.
MEMORIES = (0.9, 0.0)
CUT, SMALLEST = 1 / 1.5, 1e-5  # of the step; below the smallest the ascent ends
SPACING = 1.15  # between the numbers of price steps after which picks are kept


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Picks that message passing decoded (they may not fit) and the prices of memory that led to them."""

    picks: Index
    price: Array


@dataclass(frozen=True, slots=True, eq=False)
class Climb:
    """The best bound (inf: nothing fits), its prices, its picks last among `found`, which come from all the way up."""

    bound: float
    price: Array
    found: list[Found]
    steps: int


def climb(core: Problem, sweeps: Sweeps, budget: Budget) -> Climb:
    """Raise the bound until the budget's deadline or until steps have become too small to matter."""
    flat = sweeps.flat
    limit = np.maximum(flat.limit, 1.0)
    ceiling, rounding = dearest(core)
    price = best_price = np.zeros(len(flat.room))
    over = price
    bound = -math.inf
    found: list[Found] = []
    step, stale, steps, next_kept = 1.0, 0, 0, 0.0
    memory, *to_come = MEMORIES
    sweeps.price(price)
    while True:
        value = -math.inf
        picks: list[Index] = []
        for _ in range(FIRST_SWEEPS if not steps else 1):
            forth, low = sweeps.sweep(True)
            back, high = sweeps.sweep(False)
            value, picks = max(value, low, high), [forth, back]
        value -= float(price @ flat.room)
        now = (sweeps.over(picks[0]) + sweeps.over(picks[1])) / 2
        over = now if not steps else memory * over + (1 - memory) * now
        stale = 0 if value > bound + RISE * abs(bound) else stale + 1
        if value > bound:
            bound, best_price = value, price
        if bound > ceiling + rounding + 1e-9 * float(best_price @ flat.limit):
            return Climb(math.inf, best_price, found, steps)  # dearer than all picks there are
        if steps >= next_kept:
            found += [Found(one, price) for one in picks]
            next_kept = max(steps + 1, steps * SPACING)
        steps += 1
        if not budget.left_s():
            break
        if step < SMALLEST:
            if not to_come:
                break
            memory, step, stale, price = to_come.pop(0), 1.0, 0, best_price
        if stale >= PATIENCE:
            step, stale, price = step * CUT, 0, best_price
        else:
            move = np.zeros(len(over))
            rising = flat.peaks(over / limit, 0.0)[:MOST_INSTANTS]
            move[rising] = over[rising]
            move[price > 0] = over[price > 0]
            move /= limit
            length = float((move**2).sum())
            if not length:
                break  # fits everywhere, and no price is too high
            price = np.maximum(0.0, price + step * REACH * abs(bound) / length * move / limit)
        sweeps.price(price)
    sweeps.price(best_price)
    found += [Found(sweeps.sweep(forth)[0], best_price) for forth in (True, False)]
    return Climb(bound, best_price, found, steps)


def as_prices(sweeps: Sweeps, price: Array) -> Prices:
    """The positive prices by resource and instant."""
    return {sweeps.flat.key(k): float(price[k]) for k in np.flatnonzero(price).tolist()}
