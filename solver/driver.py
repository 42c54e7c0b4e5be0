"""solve: presolve, backend, way back, referee; and the reason when nothing fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from solver.backends import QUICK_PAIRS, Budget, run
from solver.explain import explain
from solver.presolve import Dead, Presolved, presolve
from solver.problem import Problem
from solver.referee import evaluate
from solver.solution import OPTIMAL_REL_GAP, BackendError, Outcome, Prices, Solution, relative_gap


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 60.0,
    gap: float = 0.0,
    threads: int | None = None,
    backend: str = "auto",
    start: Sequence[int] | None = None,
    start_prices: Prices | None = None,
    reductions: bool | Collection[str] = True,
    quick: bool = False,
    generations: int | None = None,
    stop: Callable[[], bool] | None = None,
) -> Solution:
    """Find the cheapest picks that fit, or say why there are none.

    time_limit_s  wall clock; the best picks and bound known by then are returned
    gap           stop when (cost - bound) / cost is at most this; 0 means as small as doubles allow (1e-7)
    threads       of the backend, one if not given: the same answer on every machine
    backend       "auto" or a name in solver.backends.BACKENDS
    start         picks to begin from; the answer is never worse than they are
    start_prices  prices of memory to begin from, such as the `prices` of a similar problem's solution
    reductions    True: all, False: none, or names out of solver.presolve.REDUCTIONS
    quick         only what takes some seconds on a large problem: prices of memory and small integer programs, no large
                  linear program, and no search for better picks once these are through; for who has picks to begin
                  from, or wants a bound. Where nothing fits, a lower bound of what is needed, and not the least that
                  would do. Where that ends hangs on the problem alone
    generations   at most so many of a race for better picks, which ends at the same place on every run; None: as long
                  as it betters some
    stop          asked now and then, also inside HiGHS; once true, the best picks and bound so far are returned. A time
                  limit leaves a part of the time for a search for picks; so does this, for `GRACE_S`, without any yet

    The answer is the same on every run unless the time limit cuts it. Raises ValueError for arguments that make no
    sense and BackendError if the referee disagrees with what the backend claims.
    """
    began = time.monotonic()
    if not time_limit_s > 0 or not gap >= 0:
        raise ValueError(f"time_limit_s={time_limit_s:g} must be positive and gap={gap:g} not negative")
    deadline = began + time_limit_s
    stats: dict[str, float] = {"items": len(problem.costs), "edges": len(problem.edges)}
    given = evaluate(problem, start) if start is not None else None
    try:
        presolved = presolve(problem, reductions)
    except Dead as dead:
        explanation = explain(problem, str(dead), _until(deadline, stop), quick)
        seconds = time.monotonic() - began
        return Solution("infeasible", None, math.inf, math.inf, seconds, explanation, stats)
    stats |= _sizes(presolved)
    stats["presolve_s"] = time.monotonic() - began
    projected = presolved.project(start) if start is not None else None
    # the way back and the referee take part of what presolve took
    reserve_s = min(0.25 * stats["presolve_s"], 0.1 * time_limit_s)
    budget = Budget(
        deadline - reserve_s, gap, threads or 1, projected, start_prices or {},
        quick=quick, generations=generations, stop=stop,
    )  # fmt: skip
    if stats["core_items"]:
        outcome = run(backend, presolved.core, budget) if backend != "auto" else _within(presolved.core, budget)
    else:
        outcome = _certain(presolved)
    stats |= outcome.stats
    stats["cut_by_time"] = float(not budget.left_s())
    picks, cost = _lifted(problem, presolved, outcome)
    if start is not None and given is not None and given.fits and given.cost < cost:
        picks, cost = tuple(int(pick) for pick in start), given.cost
    if picks is None:
        explanation = (
            explain(problem, "no choice of options fits", _until(deadline, stop), quick)
            if outcome.status == "infeasible"
            else None
        )
        seconds = time.monotonic() - began
        return Solution(outcome.status, None, math.inf, outcome.bound, seconds, explanation, stats, outcome.prices)
    bound = min(outcome.bound, cost)
    status = "optimal" if relative_gap(cost, bound) <= OPTIMAL_REL_GAP else "feasible"
    return Solution(status, picks, cost, bound, time.monotonic() - began, None, stats, outcome.prices)


def _until(deadline: float, stop: Callable[[], bool] | None) -> float:
    """The deadline, or now where it is time to stop."""
    return time.monotonic() if stop is not None and stop() else deadline


# Above LARGE allowed pairs the linear program takes minutes or does not come to an end in time (measured on the
# contest's V, 0.4 million, and M, 1.6 million). Prices of memory give picks and a bound at once.
LARGE = 250_000
HIGHS_SHARE = 0.6  # of the time, before a race for better picks
GRACE_S = 5.0  # once it is time to stop, where there are no picks yet


def _within(core: Problem, budget: Budget) -> Outcome:
    """The best effort; who stops it before it has come to look for picks gets some all the same, soon."""
    best = _best_effort(core, budget)
    if best.status != "unknown" or budget.stop is None or not budget.stop():
        return best
    from solver.backends import race

    soon = min(budget.deadline, time.monotonic() + GRACE_S)
    return _better(best, race.run(core, replace(budget, deadline=soon, stop=None)))


def _best_effort(core: Problem, budget: Budget) -> Outcome:
    """The linear and integer program; the Lagrangian dual if the core is larger; where they end loose, a race."""
    pairs = sum(edge.cost.size for edge in core.edges)
    if pairs > QUICK_PAIRS and not core.limits:
        from solver.backends import lagrange  # message passing alone is often exact, ten times as fast

        best = lagrange.run(core, budget)
        if best.status in ("infeasible", "optimal") or _is_done(best, budget):
            return best
    if pairs <= (QUICK_PAIRS if budget.quick else LARGE):
        part = replace(budget, deadline=time.monotonic() + HIGHS_SHARE * budget.left_s())
        best = run("highs", core, part)
        if best.status in ("infeasible", "optimal") or _is_done(best, budget):
            return best
        from solver.backends import race  # compiled loops: whoever solves small problems need not wait for numba

        return _better(best, race.run(core, replace(budget, start=best.picks or budget.start)))
    from solver.backends import lagrange, race
    from solver.backends.sweeps import Sweeps

    sweeps = Sweeps(core)
    best = lagrange.run(core, budget, sweeps)
    if best.status == "infeasible" or _is_done(best, budget):
        return best
    if budget.quick:
        return best if best.picks is None or best.stats.get("loose") else race.polish(core, budget, sweeps, best)
    if best.picks is not None and not best.stats.get("loose"):
        return best  # what is left is for a search tree, and that of the whole core is larger than those of its kernels
    return _better(best, race.run(core, budget, sweeps))


def _is_done(outcome: Outcome, budget: Budget) -> bool:
    return relative_gap(outcome.cost, outcome.bound) <= max(budget.gap, OPTIMAL_REL_GAP) or not budget.left_s()


def _better(one: Outcome, other: Outcome) -> Outcome:
    """The cheaper picks with the larger bound, and the prices of that bound."""
    if "infeasible" in (one.status, other.status):
        return one if one.status == "infeasible" else other
    prices = other.prices if other.bound >= one.bound else one.prices
    best = min(one, other, key=lambda outcome: outcome.cost)
    return replace(best, bound=max(one.bound, other.bound), prices=prices, stats={**one.stats, **other.stats})


def _certain(presolved: Presolved) -> Outcome:
    """Presolve settled everything."""
    cost = float(presolved.core.costs[0][0])
    return Outcome("optimal", (0,), cost, cost)


def _lifted(problem: Problem, presolved: Presolved, outcome: Outcome) -> tuple[tuple[int, ...] | None, float]:
    """Picks and cost for the whole problem, by the referee."""
    if outcome.picks is None:
        return None, math.inf
    picks = presolved.lift(outcome.picks)
    evaluation = evaluate(problem, picks)
    if not math.isclose(evaluation.cost, outcome.cost, rel_tol=1e-6, abs_tol=1e-12):
        raise BackendError(f"claimed cost {outcome.cost:.9g}, but the picks cost {evaluation.cost:.9g}")
    if not evaluation.fits:
        over = {name: evaluation.peak[name] for name, limit in problem.limits.items() if evaluation.peak[name] > limit}
        raise BackendError(f"claimed to fit, but the picks peak at {over} bytes, above the limits {problem.limits}")
    return picks, evaluation.cost


def _sizes(presolved: Presolved) -> dict[str, float]:
    core, state = presolved.core, presolved.state
    sizes: dict[str, float] = {
        "core_items": len(presolved.items),
        "core_edges": len(core.edges),
        "core_options": sum(len(core.costs[item]) for item in range(len(presolved.items))),
        "core_pairs": sum(edge.cost.size for edge in core.edges),
    }
    return sizes | {f"fired_{name}": count for name, count in sorted(state.fired.items())}
