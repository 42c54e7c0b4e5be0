# pyright: basic
"""The master of a Lagrangian dual: where to look next, given what was seen (cutting planes in a box).

Every picks x ever seen says that the dual function is nowhere above the plane

    cost(x) + sum_t price_t over_t(x)        over: bytes above the limit at row t, negative below

so its maximum is nowhere above the least of the planes (Kelley 1960). The next prices are where that least is largest,
within a box around the best prices known, for far from what was seen the planes say little: Lemarechal's bundle idea,
with the box of Marsten's "boxstep" method (1975) in place of a quadratic term. The weights of the planes that meet
there mix the picks into a fractional solution, whose excess tells which rows are still missing.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from solver.backends.quiet import QuietHighs


@dataclass(frozen=True, slots=True)
class Proposal:
    """Prices to try, what the planes allow there, the planes' weights, and whether the box was in the way."""

    prices: np.ndarray
    value: float
    weights: np.ndarray
    at_wall: bool


def propose(
    costs: np.ndarray, slopes: np.ndarray, centre: np.ndarray, radius: np.ndarray, reference: float
) -> Proposal:
    """Maximise the least of costs + slopes @ prices over |prices - centre| <= radius, prices >= 0.

    `reference` is a value near the answer: differences to it keep their digits.
    """
    planes, rows = slopes.shape
    scale = float(np.abs(costs - reference).max())
    if scale <= 1e-9 * abs(reference) or not scale:  # planes that agree at 0: what the box allows is the scale
        scale = max(float((np.abs(slopes) @ radius).max()), 1e-300)
    low, high = np.maximum(centre - radius, 0.0), centre + radius
    steep = np.maximum(np.abs(slopes).max(0), 1e-300)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = rows + 1, planes
    lp.sense_ = highspy.ObjSense.kMaximize
    lp.col_cost_ = np.append(np.zeros(rows), 1.0)
    # column t is price_t times its steepest slope, in units of scale
    lp.col_lower_ = np.append(low * steep / scale, -highspy.kHighsInf)
    lp.col_upper_ = np.append(high * steep / scale, highspy.kHighsInf)
    lp.row_lower_ = np.full(planes, -highspy.kHighsInf)
    lp.row_upper_ = (costs - reference) / scale
    matrix = np.hstack((-slopes / steep, np.ones((planes, 1))))
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.arange(planes + 1) * (rows + 1)
    lp.a_matrix_.index_ = np.tile(np.arange(rows + 1), planes)
    lp.a_matrix_.value_ = matrix.ravel()
    highs = QuietHighs()
    for name, option in {"threads": 1, "random_seed": 1, "presolve": "off"}.items():
        highs.setOptionValue(name, option)
    highs.passModel(lp)
    highs.run()
    solution = highs.getSolution()
    prices = np.clip(np.array(solution.col_value[:rows]) * scale / steep, low, high)
    value = float((costs + slopes @ prices).min())
    weights = np.abs(np.array(solution.row_dual))
    total = weights.sum()
    at_wall = bool((prices >= high * (1 - 1e-9)).any() or ((prices <= low * (1 + 1e-9)) & (low > 0)).any())
    return Proposal(prices, value, weights / total if total > 0 else weights, at_wall)
