"""Fits find the curve that the numbers were made from, through noise, and never break the laws of prices."""

import itertools
import math
import random

import numpy as np
import pytest

from autopar.calibrate.fit import _never_falling, fit, lawful
from cost_models import Curve

NOISE = 0.05


def memory_s(nbytes: float) -> float:
    """A cache of 1 MB: 100 GB/s inside, 30 GB/s outside, and 2 us for the start."""
    return 2e-6 + (nbytes / 100e9 if nbytes < 1e6 else 1e-5 + (nbytes - 1e6) / 30e9)


def matmul_s(flops: float, nbytes: float) -> float:
    return 10e-6 + max(flops / 100e9, nbytes / 20e9)


def test_a_curve_over_bytes_is_recovered():
    rng = random.Random(1)
    points = [(0.0, 2.0**e, memory_s(2.0**e) * (1 + NOISE * rng.random())) for e in range(9, 27)]
    curve = fit(points, "bytes")
    assert curve.residual < NOISE
    for e in range(9, 26):
        nbytes = 1.4 * 2.0**e
        assert curve.seconds(0.0, nbytes) == pytest.approx(memory_s(nbytes), rel=0.2)


def test_a_roofline_is_recovered_from_square_tall_and_wide():
    rng = random.Random(2)
    sizes = [2**e for e in range(3, 12)]
    points = []
    for m, k, n in itertools.product(sizes, repeat=3):
        if rng.random() < 0.1:
            job = 2.0 * m * k * n, 4.0 * (m * k + k * n + m * n)
            points.append((*job, matmul_s(*job) * (1 + NOISE * rng.random())))
    curve = fit(points, "flops_per_byte")
    missed = [abs(curve.seconds(f, b) / matmul_s(f, b) - 1) for f, b, _ in points]
    assert np.median(missed) < NOISE
    assert curve.base_s == pytest.approx(10e-6, rel=0.2)
    assert curve.points[-1][1] == pytest.approx(100e9, rel=0.1)


def test_one_disturbed_measurement_does_not_bend_the_curve():
    points = [(0.0, 2.0**e, 1e-4 + 2.0**e / 1e9) for e in range(10, 27)]
    disturbed = [(f, b, t * (20 if i in (0, 3, 9) else 1)) for i, (f, b, t) in enumerate(points)]
    curve = fit(disturbed, "bytes")
    for _, nbytes, seconds in points[11:]:
        assert curve.seconds(0.0, nbytes) == pytest.approx(seconds, rel=0.1)
    # What is disturbed counts at most as the next larger size does.
    for (_, nbytes, _), (_, _, next_s) in itertools.pairwise(points[:11]):
        assert curve.seconds(0.0, nbytes) <= next_s * 1.1


def test_times_that_fall_count_as_their_median_and_the_others_as_they_are():
    times = np.array([1.0, 2.0, 90.0, 3.0, 5.0, 4.5, 4.0, 6.0])
    assert _never_falling(times).tolist() == [1.0, 2.0, 3.0, 3.0, 4.5, 4.5, 4.5, 6.0]


@pytest.mark.parametrize("over", ["bytes", "flops_per_byte"])
def test_fits_of_anything_at_all_are_lawful(over):
    rng = random.Random(3)
    for count in (1, 2, 3, 5, 40):
        for _ in range(20):
            points = [
                tuple(10 ** rng.uniform(low, high) for low, high in ((3, 12), (2, 9), (-6, 0))) for _ in range(count)
            ]
            curve = fit(points, over)  # Curve itself refuses what is not lawful
            jobs = sorted(10 ** rng.uniform(1, 10) for _ in range(30))
            for less, more in itertools.pairwise(jobs):
                assert curve.seconds(1e6, less) <= curve.seconds(1e6, more) * (1 + 1e-9)
                assert curve.seconds(less, 1e5) <= curve.seconds(more, 1e5) * (1 + 1e-9)


def test_no_points_are_refused():
    with pytest.raises(ValueError, match="no measurements"):
        fit([], "bytes")


def test_lawful_leaves_lawful_points_alone():
    x = np.array([0.0, 1.0, 3.0])
    for y in ([0.0, 1.0, 1.0], [0.0, 0.5, 2.0]):
        assert np.allclose(lawful(x, np.array(y), 0.0), y)
    assert np.allclose(np.diff(lawful(x, np.array([0.0, 5.0, -1.0]), 0.0)) <= np.diff(x) + 1e-12, True)


def test_a_curve_between_and_beyond_its_points():
    curve = Curve(((1e3, 1e9), (1e5, 4e9)), 1e-6)
    assert curve.seconds(0.0, 1e3) == pytest.approx(1e-6 + 1e-6)
    assert curve.rate(1e4) == pytest.approx(2e9)
    assert curve.rate(1.0) == 1e9 and curve.rate(1e9) == 4e9
    roof = Curve(((1.0, 1e9), (10.0, 1e10)), 0.0, 0.0, "flops_per_byte")
    assert roof.seconds(1e3, 1e6) == roof.seconds(0.0, 1e6) == pytest.approx(1e-3)  # bound by bytes
    assert roof.seconds(1e10, 1.0) == roof.seconds(1e10, 0.0) == pytest.approx(1.0)
    assert math.isclose(curve.scaled(2, 3).seconds(0.0, 1e3), 2e-6 + 3e-6)
