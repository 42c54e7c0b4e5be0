"""Among known layouts: the best plan whose every node does what it does in one of a few plans.

That is a small problem even where much may be recomputed and offloaded, and what saves memory hangs less on
layouts than on what they cost. So it is where a large search begins, and what is solved again once prices have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.assemble.activations import Rematerialization
from autopar.assemble.problem import Assembled
from autopar.decide.picks import Pick, came, picked
from autopar.propose.strategies import Strategy
from autopar.rewrite import RECOMPUTE, SAVE
from solver import REDUCTIONS, Index, Prices, Problem, Solution, cut, evaluate, inside, solve

LOOSE = 3e-3  # of a problem whose prices are only a means to find candidates

# Of a race for picks, where the sum is only a means: on four problems of tied Llamas on three axes, where messages stay
# loose, the best came in the first generation, or in the third; it went on for four more, two thirds of the time. On
# two layers of Llama-8B's widths on 4x4x4, which are not tied, it went on for 200 s where nobody stopped it, for a plan
# that was not chosen.
GENERATIONS = 3

# Above so many pairs of options messages pass through all of them in less time than it takes to compare options. Of
# Llama-8B on 4x4x4, tied, comparing took 1.1 of 1.7 s, for 3.7 million pairs that were left in the place of 4.0.
COMPARED_BELOW_PAIRS = 1_000_000


@dataclass(frozen=True)
class Known:
    """A plan that was found: the picks of a problem, which may be another one of the same graph."""

    assembled: Assembled
    picks: tuple[int, ...]

    @property
    def pick(self) -> Pick:
        return picked(self.assembled, self.picks)


@dataclass(frozen=True)
class Proven:
    """A bound of a large problem, `of` all that it hangs on but its limit of `memory`, and the prices that it comes
    with. What the problem began with was not bettered.
    """

    of: Hashable
    memory: float
    bound: float
    prices: Prices


def best_among(
    known: Sequence[Known],
    assembled: Assembled,
    again: Collection[str],
    time_limit_s: float,
    prices: Prices | None = None,
    stop: Callable[[], bool] | None = None,
) -> Solution | None:
    """`again`: the nodes that are forward values, of which it is open how they come back; so is where parameters
    reside. None if nothing of the kind was found to fit. `prices`: of memory, in a problem like this one. `stop`: as
    in `solve`.
    """
    problem = assembled.problem
    keep = _open(known, assembled, again)
    part, back = cut(problem, keep)
    start = cheapest(known, assembled)
    within = None if start is None else inside(start, keep)
    solution = solve(
        part, time_limit_s=time_limit_s, gap=LOOSE, start=within, start_prices=prices, quick=True, stop=stop,
        reductions=worthwhile(part),
    )  # fmt: skip
    if solution.status == "unknown":
        left_s = max(1.0, time_limit_s - solution.seconds)
        solution = solve(
            part, time_limit_s=left_s, gap=LOOSE, start_prices=solution.prices, stop=stop, reductions=worthwhile(part)
        )
    return None if solution.picks is None else replace(solution, picks=back(solution.picks))


def worthwhile(problem: Problem) -> frozenset[str]:
    """The reductions that save a problem of this size more time than they take. Each is exact."""
    pairs = sum(edge.cost.size for edge in problem.edges)
    return REDUCTIONS if pairs <= COMPARED_BELOW_PAIRS else REDUCTIONS - {"dominance"}


def cheapest(known: Sequence[Known], assembled: Assembled) -> tuple[int, ...] | None:
    """The picks of the best of these plans that fits in this problem; None if none does."""
    told = {picks: evaluate(assembled.problem, picks) for one in known if (picks := carried(one, assembled))}
    return min((picks for picks in told if told[picks].fits), key=lambda picks: told[picks].cost, default=None)


def carried(known: Known, assembled: Assembled) -> tuple[int, ...] | None:
    """The picks that mean the same in this problem; None where it lacks an option."""
    before, found = known.assembled, [-1] * len(assembled.problem.costs)
    for name, item in assembled.item_of.items():
        if (at := before.item_of.get(name)) is None:
            continue
        options, earlier, pick = assembled.options[item], before.options[at], known.picks[at]
        if options is earlier and item not in assembled.residences:
            found[item] = pick
            continue
        where = before.residences[at][pick] if at in before.residences else "device"
        resides = assembled.residences.get(item, ("device",) * len(options))
        told = enumerate(options)
        found[item] = next((i for i, o in told if resides[i] == where and _same(o, earlier[pick])), -1)
    for origin, back in assembled.modes.items():
        if back.item is not None:
            found[back.item] = _mode(known, origin, back)
    return None if -1 in found else tuple(found)


def _mode(known: Known, origin: str, back: Rematerialization) -> int:
    """How a value comes back there: what is not open comes back saved, or is a view of what is there anyway."""
    earlier = known.assembled.modes.get(origin)
    if earlier is not None:
        mode, strategy = came(earlier, known.picks)
    else:
        mode, strategy = next((m, None) for m in (SAVE, RECOMPUTE) if m in back.again.modes)
    if mode == RECOMPUTE and strategy is None:
        strategy = known.pick(origin)
    told = enumerate(back.options)
    return next((i for i, (m, s) in told if m == mode and _same(s, strategy if mode == RECOMPUTE else None)), -1)


def _same(one: Strategy | None, other: Strategy | None) -> bool:
    return one is other or one == other


def _open(known: Sequence[Known], assembled: Assembled, again: Collection[str]) -> list[Index]:
    """Of every item, the options that one of the plans takes, and all that is open besides."""
    places: dict[tuple[int, int], list[int]] = {}  # ids of options and strategy -> where it stands among them

    def where(options: tuple[Strategy, ...], strategy: Strategy) -> list[int]:
        key = id(options), id(strategy)
        if key not in places:
            places[key] = [place for place, option in enumerate(options) if _same(option, strategy)]
        return places[key]

    is_open = [np.ones(len(cost), dtype=bool) for cost in assembled.problem.costs]
    made = {name: item for name, item in assembled.item_of.items() if name not in again}
    for item in made.values():
        is_open[item][:] = False
    for name, item in made.items():
        for one in known:
            is_open[item][where(assembled.options[item], one.pick(name))] = True
    return [np.flatnonzero(mask) for mask in is_open]
