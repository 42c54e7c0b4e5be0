"""A benchmark under a cap does not cap itself out of memory."""

from __future__ import annotations

import pytest

from benchmarks.capped import fraction_of
from cost_models.caching_allocator import PAGE
from cost_models.hardware import Hardware
from cost_models.reserve import room_in

GIB = 2**30


@pytest.mark.parametrize("cap", [0.3 * GIB, 4 * GIB + 12345.6, 30 * GIB, 139.8 * GIB, 200 * GIB])
def test_the_allocator_may_reserve_what_a_plan_may_take(cap: float) -> None:
    total = int(139.8 * GIB)
    allowed = int(fraction_of(cap, total) * total)  # as torch computes it
    assert min(cap, total) <= allowed <= min(total, cap + 2 * PAGE)
    room = room_in(int(cap), Hardware.load("h200-sxm"), (1,), expandable=True)
    assert room.taken(room.tensors) <= max(allowed, room.fixed) or cap > total
