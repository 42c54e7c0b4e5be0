"""Memory limits are kept by what runs; what the page says of rows."""

import math
from dataclasses import replace

import pytest

from autopar.errors import Infeasible
from benchmarks.limits import Row, least_limit, limits_between, markdown, rising, run
from benchmarks.small import SMALL

GOOD = Row("mlp", 1000.0, 990.0, 985.0, 0.002, 0.0, 1, 64, 2, 1, 1e-7)


def test_two_limits_of_a_model_hold() -> None:
    least, ample = run("mlp", 2)
    for row in (least, ample):
        assert row.broken == "" and row.measured <= row.limit, row
    assert least.limit < ample.limit and least.predicted_s > ample.predicted_s
    assert least.hosted + least.streamed > 0 == ample.hosted + ample.streamed
    assert not rising([least, ample])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"measured": 1001.0, "predicted": 1000.0}, "above the limit"),
        ({"measured": 900.0}, "predicted wrongly"),
        ({"loss_off": math.nan}, "another loss"),
        ({"measured": math.nan}, "above the limit, predicted wrongly"),
        ({"error": "RefereeError: why"}, "RefereeError: why"),
    ],
    ids=str,
)
def test_a_broken_claim_is_named(change: dict, told: str) -> None:
    row = replace(GOOD, **change)
    assert GOOD.broken == "" and row.broken == told
    assert f"| {told} |" in markdown([GOOD, row], "a command")


def test_a_step_time_that_rises_with_the_limit_is_found_within_its_model() -> None:
    slower = replace(GOOD, limit=2000.0, predicted_s=0.00201)
    other = replace(slower, model="gpt2")
    assert rising([slower, GOOD, other]) == {("mlp", 2000.0)}
    assert "| slower with more |" in markdown([GOOD, slower], "a command")
    assert "rises with the limit: 1" in markdown([GOOD, slower], "a command")


class Planned:
    """As much of a plan as limits are found from."""

    def __init__(self) -> None:
        self.peak_bytes = {"hbm": 1600}


@pytest.mark.parametrize("tells", [True, False])
def test_the_least_limit_is_found_and_the_others_lie_in_even_ratios(tells: bool) -> None:
    def find(limit: float | None) -> Planned:
        if limit is not None and limit < 100:
            raise Infeasible("no", 50.0, 100.0 if tells else None)
        return Planned()

    assert 100 <= least_limit(find, 1600.0) <= 112  # a ratio of 32, cut in halves five times
    if tells:
        assert limits_between(find) == [100, 200, 400, 800, 1600]


def test_there_are_ten_models() -> None:
    assert len(SMALL) == 10
