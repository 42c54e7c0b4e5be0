"""What a plan's step takes compiled by inductor, as a fact of its search: prices are of kernels one by one."""

from __future__ import annotations

from dataclasses import replace

from autopar.plan import Plan
from autopar.plan.explain import FUSED
from autopar.price.pricer import Pricer
from autopar.simulate.kernels import as_kernels
from autopar.simulate.timeline import timeline_of


def with_fused(plan: Plan, pricer: Pricer) -> Plan:
    """The plan, which says it where it is for GPUs: on CPUs inductor's kernels were not compared with anything."""
    if not pricer.hardware.reserve:
        return plan
    priced = replace(pricer, bucket_bytes=plan.bucket_bytes)
    fused = as_kernels(plan, lambda node: "the program")
    return replace(plan, search={**plan.search, FUSED: timeline_of(fused, priced, plan.prefetch).seconds})
