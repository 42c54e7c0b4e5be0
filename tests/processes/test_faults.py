"""One rank does something wrong, and all end, with a reason: a part of `python -m benchmarks.faults`."""

from __future__ import annotations

import pytest

from benchmarks.faults import CELLS, Cell, outcomes

FIRST = [
    Cell("raise and go on", "forward", 2, "plain", 1),
    Cell("freeze", "optimizer", 2, "plain", 0),
    Cell("an extra call", "backward", 2, "plain", 1),
]
# Each fault and each place at least once, on each rank, under both launchers.
MORE = [
    Cell(fault, place, 2 if number % 4 else 4, ("plain", "torchrun")[number // 3 % 2], number % 2)
    for number, (fault, place) in enumerate(CELLS)
    if number % 5 == 0 or fault in ("another file", "another setting")  # which have one place only
]


def test_a_setting_that_changed_on_one_rank_is_named() -> None:
    (found,) = outcomes([Cell("another setting", "forward", 2, "plain", 1)], at_once=1)
    assert found.is_right and "(scale was 1.0 and is 2.0) on rank 1" in str(found), found


def all_end(cells: list[Cell]) -> None:
    found = [*outcomes(cells, at_once=len(FIRST))]
    assert len(found) == len(cells)
    assert all(one.is_right and one.seconds >= 0 for one in found), "\n".join(map(str, found))


def test_all_ranks_end_with_a_reason() -> None:
    all_end(FIRST)


@pytest.mark.slow
def test_all_ranks_end_with_a_reason_wherever_it_happens() -> None:
    assert {fault for fault, _ in CELLS} == {cell.fault for cell in MORE + FIRST}
    all_end(MORE)
