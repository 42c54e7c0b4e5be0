"""Samples to a curve: robust least squares on doubly logarithmic paper, held to the laws that prices obey.

    minimise over base_s, y    sum_i rho( (t_i - base_s) / t_i * (log(w_i / (t_i - base_s)) - sum_k h_k(log x_i) y_k) )
    subject to                 low * dx_k <= y_k+1 - y_k <= dx_k       bigger jobs never take less time

y_k is the logarithm of the rate at knot k, h_k the hat function of that knot, w_i the work, rho Cauchy's function. The
factor in front turns an error of the rate into one of the time. base_s is tried on a grid. Over bytes, where more of
them were quicker than fewer, all those count as their median before anything else: t_i never falls.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

import numpy as np
from numpy.typing import NDArray

from cost_models.curves import INTENSITY, Curve

Array = NDArray[np.float64]
KNOTS = {INTENSITY: 12, "bytes": 24}
SHARES = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.94, 0.97)  # of the quickest sample: what base_s may be
OUTSIDE = 0.1  # errors of the time above this count less and less
SMOOTH = 1e-2
GOOD_ENOUGH = 1.05  # of curves this close to the best the one with most base_s is taken: it is what small jobs cost


def fit(points: Sequence[tuple[float, float, float]], over: str) -> Curve:
    """The curve through (flops, bytes, seconds). Raises ValueError without points."""
    if not points:
        raise ValueError("no measurements to fit a curve to")
    flops, nbytes, seconds = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    as_timed = seconds
    if over != INTENSITY:
        order = np.argsort(nbytes)
        nbytes, as_timed = nbytes[order], seconds[order]
        seconds = _never_falling(as_timed)
        flops = np.zeros_like(nbytes)
    work, at = (flops, flops / nbytes) if over == INTENSITY else (nbytes, nbytes)
    knots = _knots(np.log(at), KNOTS[over])
    tried: list[tuple[float, float, Array]] = []
    for share in SHARES:
        base = float(share * seconds.min())
        rates = _rates(np.log(at), np.log(work), seconds, base, knots, 0.0 if over == INTENSITY else -np.inf)
        error = np.abs(np.log((base + work / np.exp(np.interp(np.log(at), knots, rates))) / seconds))
        tried.append((float(np.minimum(error, 0.5).mean()), base, rates))
    best = min(error for error, _, _ in tried)
    error, base, rates = max((t for t in tried if t[0] <= best * GOOD_ENOUGH + 1e-3), key=lambda t: t[1])
    curve = Curve(
        tuple((float(x), float(y)) for x, y in zip(np.exp(knots), np.exp(rates), strict=True)), base, 0.0, over
    )
    missed = [abs(curve.seconds(f, b) / s - 1) for f, b, s in zip(flops, nbytes, as_timed, strict=True)]
    return Curve(curve.points, base, float(np.median(missed)), over)


def _never_falling(seconds: Array) -> Array:
    """The nearest times that never fall: pool adjacent violators, a pool counts as its (low) median."""
    pools: list[list[float]] = []
    for value in seconds.tolist():
        pools.append([value])
        while len(pools) > 1 and median_low(pools[-2]) > median_low(pools[-1]):
            pools[-2:] = [[*pools[-2], *pools[-1]]]
    return np.concatenate([np.full(len(pool), median_low(pool)) for pool in pools])


def _knots(x: Array, most: int) -> Array:
    """The sizes that were measured, where there are few; else `most` of their quantiles, the ends among them."""
    different = np.unique(np.round(x, 2))
    found = different if len(different) <= most else np.quantile(different, np.linspace(0, 1, most))
    return np.array([v for i, v in enumerate(found) if i == 0 or v - found[i - 1] > 0.05])


def _rates(x: Array, log_work: Array, seconds: Array, base: float, knots: Array, low: float) -> Array:
    target = log_work - np.log(seconds - base)
    weight = (seconds - base) / seconds
    if len(knots) == 1:
        return np.array([np.median(target)])
    hats = np.array([np.interp(x, knots, unit) for unit in np.eye(len(knots))]).T
    bends = np.diff(np.eye(len(knots)), 2, axis=0) * SMOOTH if len(knots) > 2 else np.zeros((0, len(knots)))
    trust = np.ones_like(x)
    rates: Array = target[:0]
    for _ in range(8):
        rows = np.concatenate([hats * (weight * trust)[:, None], bends])
        wanted = np.concatenate([target * weight * trust, np.zeros(len(bends))])
        rates = np.linalg.lstsq(rows, wanted, rcond=None)[0].astype(np.float64)
        missed = np.abs(weight * (target - hats @ rates))
        trust = 1 / np.sqrt(1 + (missed / OUTSIDE) ** 2)
    rates = np.clip(rates, target.min(), target.max())  # a knot with little near it says anything
    return lawful(knots, rates, low, (hats * (weight * trust)[:, None]).sum(0) + 1e-9)


def lawful(x: Array, y: Array, low: float, weight: Array | None = None) -> Array:
    """The values nearest to y (least squares) with slopes of at least `low`, then the nearest with slopes up to 1."""
    weight = np.ones_like(y) if weight is None else weight
    if np.isfinite(low):
        y = _rising(y - low * x, weight) + low * x
    return x - _rising(x - y, weight)


def _rising(y: Array, weight: Array) -> Array:
    """Pool adjacent violators: the nearest values that never fall."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, heavy in zip(y.tolist(), weight.tolist(), strict=True):
        blocks.append((value, heavy, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (one, w1, n1), (two, w2, n2) = blocks[-2:]
            blocks[-2:] = [((one * w1 + two * w2) / (w1 + w2), w1 + w2, n1 + n2)]
    return np.repeat([mean for mean, _, _ in blocks], [count for _, _, count in blocks])
