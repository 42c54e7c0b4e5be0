"""Ticks, units and places on an axis."""

from itertools import pairwise

import pytest

from autopar.page.scales import TICKS, percentage, ticks, unit_of


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (5.26, 47.9), (41.871, 43.2), (0.043, 0.081), (98.1, 98.1)])
def test_ticks_are_round_numbers_around_what_is_shown(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low and high <= found[-1] and 2 <= len(found) <= TICKS + 3
    assert all(len(f"{tick:g}") <= 6 for tick in found)
    assert len({round(b - a, 9) for a, b in pairwise(found)}) == 1


@pytest.mark.parametrize(("nbytes", "told"), [(0, "B"), (1023, "B"), (2048, "KiB"), (3 * 2**20, "MiB"), (2**41, "GiB")])
def test_a_unit_is_the_largest_of_which_there_is_one(nbytes: int, told: str) -> None:
    scale, unit = unit_of(nbytes)
    assert unit == told and (nbytes < 1024 or nbytes / scale >= 1)


def test_a_place_is_as_exact_as_a_screen() -> None:
    for part in (0.0, 1e-7, 0.123456789, 1.0):
        assert abs(float(percentage(part, 1.0).rstrip("%")) - 100 * part) <= 5e-5
    assert percentage(3.0, 0.0) == "0%"
