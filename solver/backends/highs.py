# pyright: basic
"""HiGHS on numpy arrays: the linear program, limits added where they are violated, then integers if still needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import highspy
import numpy as np

from solver.backends import Budget
from solver.backends.local import improve
from solver.backends.lowering import Lowered, MemoryRow, lower, violated
from solver.backends.quiet import QuietHighs
from solver.problem import Problem
from solver.referee import evaluate
from solver.solution import OPTIMAL_REL_GAP, Outcome, relative_gap

MIP_REL_GAP = 1e-7  # HiGHS stops at 1e-4 if not told otherwise
MOST_ROWS_PER_ROUND = 20
INTEGRAL = 1e-6
# HiGHS's presolve by parallel rows and columns, as a bit of `presolve_rule_off`. With highspy 1.16.0 it came to no end,
# nor to where the clock is looked at, on the 4,390 items of Llama 1B in 32 GiB; without it that is solved in 1.3 s.
PARALLEL = 1 << 13


def run(core: Problem, budget: Budget) -> Outcome:
    """Solve the core to the budget's gap, or say how far it got."""
    return _Search(core, budget).run()


class Model:
    """A HiGHS model of a lowered core; costs and bytes are scaled here and nowhere else.

    With `peak_of` the objective is the peak of that resource instead of the cost: one more column z, in the row of
    every instant, in units of `byte_scale`, counted from the limit.
    """

    def __init__(
        self,
        lowered: Lowered,
        threads: int,
        peak_of: str | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self.lowered, self.peak_of = lowered, peak_of
        self.is_integer = False
        self.known: dict[tuple[str, int], int] = {}  # memory row of (resource, instant)
        limits = {profile.resource: profile.limit for profile in lowered.profiles}
        self.byte_scale = {name: max(limit, 1.0) / 1000 for name, limit in limits.items()}
        n = len(lowered.cost)
        cost = np.zeros(n) if peak_of else lowered.cost
        self.cost_scale = 1.0 if peak_of or not n else max(float(cost.max()) / 1e6, 1e-300)
        if not self.cost_scale or not cost.any():
            self.cost_scale = 1.0
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = n, len(lowered.right)
        lp.col_cost_ = cost / self.cost_scale
        lp.offset_ = 0.0 if peak_of else lowered.offset / self.cost_scale
        lp.col_lower_, lp.col_upper_ = np.zeros(n), np.ones(n)
        lp.row_lower_ = lp.row_upper_ = lowered.right
        order = np.lexsort((lowered.rows, lowered.columns))
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.concatenate(([0], np.cumsum(np.bincount(lowered.columns, minlength=n))))
        lp.a_matrix_.index_ = lowered.rows[order]
        lp.a_matrix_.value_ = lowered.values[order]
        self.highs = QuietHighs()
        for name, value in {
            "threads": threads,
            "random_seed": 1,
            "mip_rel_gap": MIP_REL_GAP,
        }.items():
            self.highs.setOptionValue(name, value)
        if stop is not None:
            ask = stop
            for callback in (self.highs.cbSimplexInterrupt, self.highs.cbMipInterrupt):
                callback.subscribe(lambda event: event.interrupt() if ask() else None)
        self.highs.passModel(lp)
        self.num_rows = len(lowered.right)
        if peak_of:
            lowest = max((-float(p.room.min()) for p in lowered.profiles if p.resource == peak_of), default=0.0)
            self.highs.addCol(1.0, lowest / self.byte_scale[peak_of], highspy.kHighsInf, 0, [], [])

    def add_row(self, row: MemoryRow) -> None:
        """Add a limit; the basis is kept."""
        scale = self.byte_scale[row.resource]
        columns, nbytes = row.columns.astype(np.int32), row.nbytes / scale
        if row.resource == self.peak_of:
            columns, nbytes = np.append(columns, np.int32(len(self.lowered.cost))), np.append(nbytes, -1.0)
        self.highs.addRow(-highspy.kHighsInf, row.room / scale, len(columns), columns, nbytes)
        self.known[row.resource, row.instant] = self.num_rows
        self.num_rows += 1

    def add_cover(self, columns: np.ndarray, most: int) -> None:
        """At most `most` of the columns: cuts off picks that exceed a limit by less than HiGHS notices."""
        self.highs.addRow(
            -highspy.kHighsInf, float(most), len(columns), columns.astype(np.int32), np.ones(len(columns))
        )
        self.num_rows += 1

    def add_violated(self, x: np.ndarray) -> int:
        """Add the limits that `x` exceeds (in peak mode: those above the present peak); how many were added."""
        added = 0
        rows = {profile.resource: profile for profile in self.lowered.profiles}
        for profile in self.lowered.profiles:
            if profile.resource == self.peak_of:
                z = x[len(self.lowered.cost)] * self.byte_scale[profile.resource]
                profile = replace(profile, room=profile.room + z)
            for position in violated(profile, x[: len(self.lowered.cost)], set(self.known), MOST_ROWS_PER_ROUND):
                self.add_row(rows[profile.resource].row(position))
                added += 1
        return added

    def solve(self, left_s: float) -> highspy.HighsModelStatus:
        """Run for at most that many seconds."""
        # measured with highspy 1.15.1: for linear programs the clock runs on from call to call, for integer ones not
        self.highs.setOptionValue("time_limit", left_s if self.is_integer else self.highs.getRunTime() + left_s)
        self.highs.run()
        return self.highs.getModelStatus()

    def make_integer(self) -> None:
        """Ask for integral options; pairs follow."""
        self.is_integer = True
        self.highs.setOptionValue("presolve_rule_off", PARALLEL)
        n = self.lowered.num_x
        kinds = np.full(n, highspy.HighsVarType.kInteger)
        self.highs.changeColsIntegrality(n, np.arange(n, dtype=np.int32), kinds)

    def x(self) -> np.ndarray:
        """Column values of the solution at hand."""
        return np.array(self.highs.getSolution().col_value)

    def objective(self) -> float:
        """Objective of the solution at hand, in units of cost."""
        return self.highs.getInfo().objective_function_value * self.cost_scale

    def dual_bound(self) -> float:
        """Bound of the integer search, in units of cost."""
        return self.highs.getInfo().mip_dual_bound * self.cost_scale

    def prices(self) -> dict[tuple[str, int], float]:
        """Cost per byte of the limits that bind in the linear program."""
        duals = self.highs.getSolution().row_dual
        found = {key: -duals[row] * self.cost_scale / self.byte_scale[key[0]] for key, row in self.known.items()}
        return {key: price for key, price in sorted(found.items()) if price > 0}


class _Search:
    """One run: keeps the best picks and the largest bound seen."""

    def __init__(self, core: Problem, budget: Budget) -> None:
        self.core, self.budget = core, budget
        self.lowered = lower(core)
        self.best: tuple[int, ...] | None = None
        self.cost, self.bound = math.inf, self.lowered.offset
        self.prices: dict[tuple[str, int], float] = {}
        self.model = Model(self.lowered, budget.threads, stop=budget.stop)

    def run(self) -> Outcome:
        if self.budget.start is not None:
            self.offer(self.budget.start)
        if not self.lowered.num_x:
            return self.outcome("infeasible" if not self.offer((0,) * len(self.core.costs)) else None)
        status = self.relax()
        if status is None and not self.is_done():
            status = self.branch()
        return self.outcome(status)

    def offer(self, picks: tuple[int, ...]) -> bool:
        """Take the picks if they are feasible and the best so far; whether they are feasible."""
        evaluation = evaluate(self.core, picks)
        if not evaluation.fits or math.isinf(evaluation.cost):
            return False
        if evaluation.cost < self.cost:
            self.best, self.cost = picks, evaluation.cost
        return True

    def polish(self, picks: tuple[int, ...]) -> None:
        """Offer the picks after repair and improvement."""
        self.offer(improve(self.core, self.lowered, picks, self.budget.deadline))

    def is_done(self) -> bool:
        return relative_gap(self.cost, self.bound) <= max(self.budget.gap, OPTIMAL_REL_GAP / 2)

    def relax(self) -> str | None:
        """The linear program with all limits it violates; "infeasible", "unknown" (time) or None (go on)."""
        model = self.model
        while True:
            status = model.solve(self.budget.left_s())
            if status == highspy.HighsModelStatus.kInfeasible:
                return "infeasible"
            if status != highspy.HighsModelStatus.kOptimal:
                self.polish(tuple(int(cost.argmin()) for cost in self.core.costs))
                return "unknown"
            self.bound = max(self.bound, model.objective())
            x = model.x()
            if not model.add_violated(x):
                break
        self.prices = model.prices()
        picks = self.lowered.picks(x)
        integral = np.abs(x[: self.lowered.num_x] - np.round(x[: self.lowered.num_x])).max() <= INTEGRAL
        if not (integral and self.offer(picks) and self.is_done()):
            self.polish(picks)
        return None

    def branch(self) -> str | None:
        """The integer program; adds limits that its solution exceeds and repeats."""
        model = self.model
        model.make_integer()
        model.highs.setOptionValue("mip_rel_gap", max(MIP_REL_GAP, self.budget.gap))
        if self.budget.nodes is not None:
            model.highs.setOptionValue("mip_max_nodes", self.budget.nodes)
        while True:
            if self.best is not None:
                solution = highspy.HighsSolution()
                solution.col_value = self.lowered.point(self.best).tolist()
                model.highs.setSolution(solution)
            status = model.solve(self.budget.left_s())
            if status == highspy.HighsModelStatus.kInfeasible:
                return "infeasible" if self.best is None else None
            self.bound = max(self.bound, min(model.dual_bound(), self.cost))
            x = model.x()
            if not len(x) or not np.isfinite(model.highs.getInfo().objective_function_value):
                return "unknown"
            picks = self.lowered.picks(x)
            if self.offer(picks):
                self.polish(picks)
                self.bound = max(self.bound, min(model.dual_bound(), self.cost))
                return None
            self.polish(picks)
            exact = self.lowered.point(picks)
            if self.is_done() or not self.budget.left_s():
                return None
            if not model.add_violated(exact) and not self._cover(exact):
                return "unknown"

    def _cover(self, x: np.ndarray) -> bool:
        """Forbid together what exceeds a limit by less than the tolerance; whether there was such a limit."""
        for profile in self.lowered.profiles:
            over = profile.use(x) - profile.room
            if len(over) and over.max() > 0:
                row = profile.row(int(over.argmax()))
                held = dict(zip(row.columns.tolist(), row.nbytes.tolist(), strict=True))
                taken = [column for column in held if x[column] > 0.5]
                owner = np.searchsorted(self.lowered.x_first, row.columns, side="right")
                columns = [
                    column
                    for column, who in zip(row.columns.tolist(), owner.tolist(), strict=True)
                    if column in taken
                    or any(
                        self._owner(one) == who and column < self.lowered.num_x and held[column] >= held[one]
                        for one in taken
                    )
                ]
                self.model.add_cover(np.array(columns), len(taken) - 1)
                return True
        return False

    def _owner(self, column: int) -> int:
        return int(np.searchsorted(self.lowered.x_first, column, side="right")) if column < self.lowered.num_x else -1

    def outcome(self, status: str | None) -> Outcome:
        stats = {"columns": float(len(self.lowered.cost)), "rows": float(len(self.lowered.right))}
        stats["memory_rows"] = float(len(self.model.known))
        if self.best is None:
            if status == "infeasible":
                return Outcome("infeasible", None, math.inf, math.inf, stats=stats)
            return Outcome("unknown", None, math.inf, self.bound, self.prices, stats)
        proven = relative_gap(self.cost, self.bound) <= OPTIMAL_REL_GAP
        return Outcome(
            "optimal" if proven else "feasible", self.best, self.cost, min(self.bound, self.cost), self.prices, stats
        )
