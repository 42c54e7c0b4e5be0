# pyright: basic
"""The smallest peak of one resource, all other limits kept: what to tell someone whose limit is too small."""

from __future__ import annotations

import time

import highspy
import numpy as np

from solver.backends.highs import Model
from solver.backends.local import improve
from solver.backends.lowering import lower
from solver.problem import Problem
from solver.referee import evaluate

Peak = tuple[tuple[int, ...] | None, float]


def least_peak(core: Problem, resource: str, deadline: float) -> Peak | None:
    """(picks or None, lower bound in bytes); None if no picks keep the other limits."""
    lowered = lower(core)
    profile = next((p for p in lowered.profiles if p.resource == resource), None)
    if profile is None or not lowered.num_x:
        picks = (0,) * len(core.costs)
        return picks, evaluate(core, picks).peak.get(resource, 0.0)
    limit = core.limits[resource]
    at_least = limit - float(profile.room.min()) if len(profile.room) else 0.0
    best: tuple[int, ...] | None = None
    least = np.inf
    model = Model(lowered, 1, peak_of=resource)
    integer = False
    while True:
        status = model.solve(max(0.1, deadline - time.monotonic()))
        if status == highspy.HighsModelStatus.kInfeasible:
            return None if best is None else (best, at_least)
        solved = status == highspy.HighsModelStatus.kOptimal
        if solved or integer:
            value = model.dual_bound() if integer else model.objective()
            if np.isfinite(value):
                at_least = max(at_least, limit + value * model.byte_scale[resource])
        x = model.x()
        if len(x) and np.isfinite(model.highs.getInfo().objective_function_value):
            picks = lowered.picks(x)
            for candidate in (picks,) if integer else (picks, improve(core, lowered, picks, deadline)):
                evaluation = evaluate(core, candidate)
                if evaluation.fits and np.isfinite(evaluation.cost) and evaluation.peak[resource] < least:
                    best, least = candidate, evaluation.peak[resource]
        if best is not None and least <= at_least * (1 + 1e-9):
            return best, least
        if time.monotonic() > deadline:
            return best, at_least
        if solved and model.add_violated(x if not integer else _rounded(model, lowered, x)):
            continue
        if integer or not solved:
            return best, at_least
        model.make_integer()
        integer = True


def _rounded(model: Model, lowered, x: np.ndarray) -> np.ndarray:
    return np.append(lowered.point(lowered.picks(x)), x[len(lowered.cost)])
