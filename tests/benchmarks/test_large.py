"""What the pages on large models say of what was found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.large import CASES, GPT, row
from benchmarks.opt_30b import PROFILE, Row, found, line, verdict
from cost_models.hardware import Hardware

SEARCHED: dict[str, Any] = {
    "seconds": {"trace": 40.0, "propose": 1.0, "search": 99.0, "total": 150.0}, "cpu_seconds": 75.0, "nodes": 1,
    "peak_rss_bytes": 1e9, "simulated_seconds": 1.0, "step_seconds": 2.0, "peak_bytes": {"hbm": 2**30},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "kept"),
    [({}, "yes"), ({"cpu_seconds": 100.0}, "no"), ({"peak_rss_bytes": 4.1e9}, "no")],
    ids=str,
)
def test_cpu_seconds_of_the_parts_that_count_and_the_memory_say_whether_it_is_kept(
    change: dict[str, Any], kept: str
) -> None:
    told = row(GPT, SEARCHED | change)  # of 75 CPU seconds two thirds are of the search
    assert told.endswith(f"| {kept} |")
    assert told.count("|") == row(GPT, {"failed": "why"}).count("|")
    assert len(CASES) == 4


@pytest.fixture(scope="module")
def small() -> Row:
    """One layer on a GPU that is too small for it."""
    hardware = Hardware.load(PROFILE)
    tiers = {**hardware.tiers, "hbm": replace(hardware.tiers["hbm"], capacity_bytes=6_000_000_000)}
    row = found(1, replace(hardware, tiers=tiers), layers=1)
    assert row is not None
    return row


def test_copies_hide_and_the_step_on_the_host_does_where_it_overlaps(small: Row) -> None:
    assert small.tokens == 2048 and small.simulated.peak_bytes <= 6e9
    assert small.simulated.plan.residence and small.simulated.timeline is not None
    host_s = small.simulated.timeline.exposed_s["host"]
    assert host_s > 0.9 * small.simulated.timeline.busy_s["host"] > 0
    assert 0 < small.with_nothing_hidden < small.efficiency < small.overlapped <= 1
    assert small.simulated.seconds - host_s <= small.overlapped_s < small.simulated.seconds


def test_the_page_says_whether_the_claim_holds(small: Row) -> None:
    assert line(1, small).count("|") == line(1, None).count("|")
    told = verdict([small, replace(small, tokens=4096, overlapped_s=small.compute_s)])[0]
    assert "with none of these numbers of tokens" in told and "forward from 4,096 tokens a step on" in told
    assert "is reached from 4,096 tokens a step on" in verdict([small, replace(small, tokens=4096, compute_s=1e2)])[0]
