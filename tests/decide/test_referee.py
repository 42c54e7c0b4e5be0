"""The referee refuses what does not hold: prices that differ a little, memory beyond the limit by a byte."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autopar.decide.referee import RefereeError, refereed, seconds_by, unfilled
from autopar.lower import lower
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from cost_models.hardware import Hardware
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.plans import PlanSampler


@cache
def drawn() -> tuple[Plan, Pricer]:
    sampler = PlanSampler(family("block").graph, mesh_of(2, 2), Hardware.load("h100-sxm"))
    return sampler.draw(19), sampler.pricer  # several of its gradients share a bucket


def judged(objective: float | None, memory: float | None) -> Plan:
    plan, pricer = drawn()
    return refereed(
        plan.graph, plan.choices, plan.deliveries, pricer,
        objective=objective, bound=0.0, memory=memory, outputs="sharded",
    )  # fmt: skip


def test_a_plan_that_holds_what_it_claims_passes() -> None:
    plan, _ = drawn()
    assert judged(plan.step_seconds, plan.peak_bytes["hbm"]).peak_bytes == plan.peak_bytes


def test_one_byte_too_much_is_refused() -> None:
    plan, _ = drawn()
    peak = plan.peak_bytes["hbm"]
    with pytest.raises(RefereeError, match=rf"the solver's plan needs {peak} bytes, the limit is {peak - 1}"):
        judged(plan.step_seconds, peak - 1)


@pytest.mark.parametrize("times", [1 - 1e-5, 1 + 1e-5])
def test_a_price_that_is_off_by_a_hundred_thousandth_is_refused(times: float) -> None:
    with pytest.raises(RefereeError, match="the solver claims"):
        judged(drawn()[0].step_seconds * times, None)


def test_a_price_is_the_sum_of_its_parts_and_of_what_buckets_wait() -> None:
    """A gradient in a bucket takes its share of a full one; what the bucket lacks is counted apart."""
    plan, pricer = drawn()
    pricer = replace(pricer, bucket_bytes=3000)
    program = lower(replace(plan, bucket_bytes=3000), None, pricer)
    beyond = unfilled(program, pricer)
    assert beyond and all(seconds > 0 for seconds in beyond.values())
    alone = seconds_by(lower(replace(plan, bucket_bytes=0), None, pricer), replace(pricer, bucket_bytes=0))
    together = seconds_by(program, pricer)
    for axis, seconds in beyond.items():
        assert together[f"comm:{axis}"] + seconds < alone[f"comm:{axis}"]
