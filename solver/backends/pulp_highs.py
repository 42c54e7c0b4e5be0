# pyright: basic
"""The same integer program written with PuLP and solved by HiGHS: readable, and the door to PuLP's other solvers.

    minimise    offset + sum cost_ui x_ui + sum cost_eij y_eij
    subject to  sum_i x_ui = 1              one_u       each item takes one option
                sum_j y_eij = x_ui          src_e_i     an edge agrees with the option at its source
                sum_i y_eij = x_vj          dst_e_j     ... and at its target
                sum nbytes (x, y) <= room   fits_r_t    resource r at instant t, added when exceeded

x_ui = 1 if item u takes option i; y_eij = 1 if edge e joins options i and j, for allowed pairs only. For small cores:
building it takes about 30 times as long as backends/highs.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pulp

from solver.backends import Budget
from solver.backends.local import improve
from solver.backends.lowering import Lowered, lower, violated
from solver.problem import Array, Problem
from solver.referee import evaluate
from solver.solution import OPTIMAL_REL_GAP, Outcome, relative_gap

MOST_ROWS_PER_ROUND = 20


@dataclass
class _Best:
    """The cheapest picks so far, and what none are below."""

    bound: float
    picks: tuple[int, ...] | None = None
    cost: float = math.inf

    def offer(self, core: Problem, picks: tuple[int, ...]) -> bool:
        """Take them if they are cheaper; whether they fit."""
        evaluation = evaluate(core, picks)
        fits = evaluation.fits and evaluation.cost < math.inf
        if fits and evaluation.cost < self.cost:
            self.picks, self.cost = picks, evaluation.cost
        return fits


def run(core: Problem, budget: Budget) -> Outcome:
    """Solve, add the limits that the answer exceeds, solve again."""
    lowered = lower(core, merged=False)
    scale = max(float(lowered.cost.max(initial=0.0)) / 1e6, 1e-300) if lowered.cost.any() else 1.0
    model, columns = formulate(core, lowered, scale)
    best = _Best(lowered.offset)
    if budget.start is not None:
        best.offer(core, budget.start)
    known: set[tuple[str, int]] = set()
    covers = 0
    while True:
        solver = pulp.HiGHS(
            msg=False, threads=budget.threads, gapRel=max(1e-7, budget.gap), timeLimit=max(budget.left_s(), 0.01)
        )
        model.solve(solver)
        if model.status == pulp.LpStatusInfeasible:
            if best.picks is None:
                return Outcome("infeasible", None, math.inf, math.inf)
            break
        value = _dual_bound(model, lowered)
        if np.isfinite(value):
            best.bound = max(best.bound, min(lowered.offset + value * scale, best.cost))
        picks = lowered.picks(np.array([column.value() or 0.0 for column in columns]))
        found = best.offer(core, picks)
        best.offer(core, improve(core, lowered, picks, budget.deadline))
        is_close = relative_gap(best.cost, best.bound) <= max(budget.gap, OPTIMAL_REL_GAP / 2)
        if found or not budget.left_s() or is_close:
            break
        exact = lowered.point(picks)
        if not _add_exceeded(model, columns, lowered, exact, known):  # by less than HiGHS notices: forbid these picks
            taken = [columns[c] for c in np.flatnonzero(exact[: lowered.num_x] > 0.5)]
            model += pulp.lpSum(taken) <= len(taken) - 1, f"not_again_{covers}"
            covers += 1
    stats = {
        "columns": float(len(columns)),
        "rows": float(len(lowered.right) + len(known)),
        "memory_rows": float(len(known)),
    }
    if best.picks is None:
        return Outcome("unknown", None, math.inf, best.bound, stats=stats)
    status = "optimal" if relative_gap(best.cost, best.bound) <= OPTIMAL_REL_GAP else "feasible"
    return Outcome(status, best.picks, best.cost, min(best.bound, best.cost), stats=stats)


def _dual_bound(model: pulp.LpProblem, lowered: Lowered) -> float:
    """What HiGHS says that the program just solved costs at least; it may not be finite."""
    info = cast(Any, model.solverModel).getInfo()  # the HiGHS object PuLP leaves behind
    # a program without integer variables has no dual bound of its own: its objective is one
    return info.mip_dual_bound if lowered.num_x else info.objective_function_value


def _add_exceeded(
    model: pulp.LpProblem, columns: list[pulp.LpVariable], lowered: Lowered, exact: Array, known: set[tuple[str, int]]
) -> bool:
    """Add the limits that this point exceeds and that are not `known`; whether there were any."""
    before = len(known)
    for profile in lowered.profiles:
        for position in violated(profile, exact, known, MOST_ROWS_PER_ROUND):
            row = profile.row(position)
            terms = [(columns[c], nbytes) for c, nbytes in zip(row.columns, row.nbytes, strict=True)]
            byte_scale = max(profile.limit, 1.0) / 1000
            use = pulp.LpAffineExpression([(column, nbytes / byte_scale) for column, nbytes in terms])
            model += use <= row.room / byte_scale, f"fits_{row.resource}_{row.instant}"
            known.add((row.resource, row.instant))
    return len(known) > before


def formulate(core: Problem, lowered: Lowered, scale: float) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    """The program without limits, and its variables in the order of the lowered columns. Costs in units of `scale`."""
    model = pulp.LpProblem("core", pulp.LpMinimize)
    columns: list[pulp.LpVariable] = []
    x: dict[tuple[int, int], pulp.LpVariable] = {}
    for u, cost in enumerate(core.costs):
        if len(cost) > 1:
            for i in range(len(cost)):
                x[u, i] = model.add_variable(f"x_{u}_{i}", 0, 1, "Integer")
                columns.append(x[u, i])
            model += pulp.lpSum(x[u, i] for i in range(len(cost))) == 1, f"one_{u}"
    for e, edge in enumerate(core.edges):
        n, m = edge.cost.shape
        pairs = list(zip(*(ends.tolist() for ends in np.nonzero(edge.cost < np.inf)), strict=True))
        y = {(i, j): model.add_variable(f"y_{e}_{i}_{j}", 0, 1) for i, j in pairs}
        columns += y.values()
        rows: list[list[pulp.LpVariable]] = [[] for _ in range(n)]
        cols: list[list[pulp.LpVariable]] = [[] for _ in range(m)]
        for (i, j), column in y.items():
            rows[i].append(column)
            cols[j].append(column)
        for i in range(n):
            model += pulp.lpSum(rows[i]) == x[edge.src, i], f"src_{e}_{i}"
        for j in range(m):
            model += pulp.lpSum(cols[j]) == x[edge.dst, j], f"dst_{e}_{j}"
    costs = (lowered.cost / scale).tolist()
    model.setObjective(pulp.LpAffineExpression([(c, cost) for c, cost in zip(columns, costs, strict=True) if cost]))
    return model, columns
