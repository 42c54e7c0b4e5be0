"""A measured curve: seconds of some work, from a start-up time and a rate that changes with size.

    seconds = base_s + bytes / rate(bytes)              over "bytes": memory, copies, collectives
    seconds = base_s + flops / rate(flops / bytes)      over "flops_per_byte": a measured roofline

`rate` is linear between its points on doubly logarithmic paper. Flops per byte is what the smallest dim of a matrix
product comes down to, and tells tall and wide from square. Which curves a profile may have:

    matmul|attention|conv.<dtype>              flops/s over flops per byte
    elementwise|stream|host.<dtype>            bytes/s over bytes: fresh result; in place; on the host's processor
    ops.<operator>.<dtype>                     one operator, like its kind, before the curve of its kind
    copy.h2d|d2h|duplex                        bytes/s over bytes; duplex: each way while both are busy
    intra|inter.<collective>.<ranks>x<groups>  payload bytes/s over payload bytes; so many groups at once on a node

A bigger job never takes less time: the slope of a rate is at most 1, and at least 0 where it is over flops per byte.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import exp, isfinite, log

from cost_models.steps import COLLECTIVES, MATRIX_KINDS

NAMES = re.compile(
    r"(?P<kind>matmul|attention|conv|elementwise|stream|host)\.(?P<dtype>\w+)"
    r"|ops\.(?P<op>\w+(\.\w+)*)\.(?P<op_dtype>\w+)"
    r"|copy\.(h2d|d2h|duplex)"
    rf"|(?P<reach>intra|inter)\.(?P<collective>{'|'.join(COLLECTIVES)})\.(?P<ranks>[1-9]\d*)x(?P<groups>[1-9]\d*)"
)
INTENSITY = "flops_per_byte"
OVER = ("bytes", INTENSITY)
PLAUSIBLE_SIZE = (1e-9, 1e18)  # bytes, or flops per byte
PLAUSIBLE_RATE = (1e2, 1e19)  # flops or bytes per second
SLACK = 1e-6  # of a slope, for points that were rounded


@dataclass(frozen=True)
class Curve:
    """Points (size, rate), the start-up seconds, and how far the measurements lay from it (median, relative)."""

    points: tuple[tuple[float, float], ...]
    base_s: float = 0.0
    residual: float = 0.0
    over: str = "bytes"

    def __post_init__(self) -> None:
        if self.over not in OVER:
            raise ValueError(f"it is over {self.over!r}, must be over {' or '.join(OVER)}")
        for what, value, low, high in (("base_s", self.base_s, 0.0, 10.0), ("residual", self.residual, 0.0, 1e9)):
            if not (isfinite(value) and low <= value <= high):
                raise ValueError(f"{what} is {value}, must lie between {low:g} and {high:g}")
        if not self.points:
            raise ValueError("points are missing")
        for size, rate in self.points:
            if not PLAUSIBLE_SIZE[0] <= size <= PLAUSIBLE_SIZE[1]:
                low, high = PLAUSIBLE_SIZE
                raise ValueError(f"a point at {size}, must lie between {low:g} and {high:g}")
            if not (isfinite(rate) and PLAUSIBLE_RATE[0] <= rate <= PLAUSIBLE_RATE[1]):
                low, high = PLAUSIBLE_RATE
                raise ValueError(f"the rate at {size:g} is {rate}, must lie between {low:g} and {high:g}")
        for (size, rate), (size_2, rate_2) in pairwise(self.points):
            if size_2 <= size * (1 + SLACK):
                raise ValueError(f"points must rise in size, {size_2:g} follows {size:g}")
            slope = log(rate_2 / rate) / log(size_2 / size)
            if slope > 1 + SLACK:
                raise ValueError(f"a job of size {size_2:g} would take less time than one of {size:g}")
            if self.over == INTENSITY and slope < -SLACK:
                raise ValueError(f"the rate falls from {size:g} to {size_2:g} flops/byte: more bytes would be quicker")

    @cached_property
    def _logs(self) -> tuple[list[float], list[float]]:
        return [log(size) for size, _ in self.points], [log(rate) for _, rate in self.points]

    def rate(self, at: float) -> float:
        """Work per second at that size. Beyond the points it stays, but few flops per byte are bound by bytes."""
        if at <= self.points[0][0]:
            size, rate = self.points[0]
            return rate * at / size if self.over == INTENSITY else rate
        if at >= self.points[-1][0]:
            return self.points[-1][1]
        sizes, rates = self._logs
        x = log(at)
        i = min(max(bisect_right(sizes, x), 1), len(sizes) - 1)
        share = (x - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return exp(rates[i - 1] + share * (rates[i] - rates[i - 1]))

    def seconds(self, flops: float, nbytes: float) -> float:
        """Seconds of a job of so many flops and bytes; the flops count only where the curve is over flops per byte."""
        if self.over != INTENSITY:
            return self.base_s + nbytes / self.rate(nbytes)
        least = self.points[0][0]
        if flops <= least * nbytes:
            return self.base_s + nbytes * least / self.points[0][1]
        return self.base_s + flops / (self.rate(flops / nbytes) if nbytes else self.points[-1][1])

    def scaled(self, base: float, work: float) -> Curve:
        """The curve of something whose start-up takes `base` times, and whose work takes `work` times the seconds."""
        return replace(self, points=tuple((size, rate / work) for size, rate in self.points), base_s=self.base_s * base)


def check_name(name: str, over: str) -> None:
    """Raise ValueError unless a profile may have a curve of that name, over that quantity."""
    found = NAMES.fullmatch(name)
    if found is None:
        raise ValueError(f"curves.{name} is not a curve of a hardware profile")
    if found["op"] is None and over != (INTENSITY if found["kind"] in MATRIX_KINDS else "bytes"):
        raise ValueError(f"curves.{name} cannot be over {over}")
