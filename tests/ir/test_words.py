"""Counted things read as one would say them."""

import pytest

from autopar.ir.words import count_of


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (count_of(1, "rank"), "1 rank"),
        (count_of(0, "rank"), "0 ranks"),
        (count_of(2048, "rank"), "2,048 ranks"),
        (count_of(1, "process", "processes"), "1 process"),
        (count_of(2, "process", "processes"), "2 processes"),
        (count_of(1.0, "day"), "1 day"),
        (count_of(0.5, "day"), "0.5 days"),
        (count_of(1230.0, "day"), "1230 days"),
    ],
)
def test_one_is_singular(told: str, expected: str) -> None:
    assert told == expected
