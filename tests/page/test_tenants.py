"""The stack of tenants is the memory of the timeline: its peak to the byte, and nowhere more."""

from dataclasses import replace

import pytest

from autopar.lower.program import Kind
from autopar.page.tenants import FOR, SAVED, TENANTS, stack_of
from autopar.simulate.timeline import timeline_of
from tests.simulate.plans import drawn

CASES = [("gpt2", (2, 2), 1), ("block", (2,), 3), ("cnn", (2, 2), 2), ("mlp", (2,), 5)]


@pytest.mark.parametrize("bins", [1000, 7])
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize(("name", "sizes", "seed"), CASES)
def test_its_top_is_the_predicted_peak(name, sizes, seed, prefetch, bins):
    plan, pricer = drawn(name, sizes, seed)
    timeline = timeline_of(plan, pricer, prefetch)
    for tier, memory in timeline.memory.items():
        stack = stack_of(timeline, tier, bins)
        totals = [sum(levels) for levels in zip(*stack.levels.values(), strict=True)]
        assert sum(stack.peak.values()) == max(totals) == memory.peak_bytes
        if prefetch is None:
            assert memory.peak_bytes == plan.peak_bytes[tier]
        held = {}
        for owner, _, nbytes in stack.holders:
            held[owner] = held.get(owner, 0) + nbytes
        assert held == dict(memory.holders)
        by_tenant = {tenant: sum(n for _, t, n in stack.holders if t == tenant) for tenant in stack.peak}
        assert by_tenant == stack.peak
        assert len(stack.times) <= bins + 1 and list(stack.times) == sorted(stack.times)


def test_what_backward_reads_is_told_apart_from_what_is_in_use():
    plan, pricer = drawn("gpt2", (2, 2), 1)
    stack = stack_of(timeline_of(plan, pricer, None), "hbm")
    assert {SAVED, "parameters", "optimizer states", "activations in use"} <= {*stack.levels}
    saved = stack.levels[SAVED]
    highest = saved.index(max(saved))
    assert 0 < highest < len(saved) - 1 and saved[0] < max(saved) > saved[-1] == 0


def test_every_kind_of_buffer_has_a_tenant():
    assert {*FOR} == {*Kind} and {*FOR.values(), SAVED} == {*TENANTS}


def test_a_peak_that_is_shorter_than_a_bin_is_seen():
    plan, pricer = drawn("gpt2", (2, 2), 1)
    timeline = timeline_of(plan, pricer, 1)
    tops = {sum(stack_of(timeline, "hbm", bins).peak.values()) for bins in (1, 2, 13, 500)}
    assert tops == {timeline.memory["hbm"].peak_bytes}
    assert replace(plan, prefetch=1).peak_bytes == plan.peak_bytes
