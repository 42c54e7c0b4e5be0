"""What a plan's step takes as its program is run, as facts of its search: prices are of kernels one by one, as if a GPU
never waited for the host.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.lower import lower
from autopar.lower.program import Launch, Run
from autopar.lower.verify import flat
from autopar.plan import Plan
from autopar.plan.explain import DISPATCH, DISPATCHED, FUSED
from autopar.plan.utilisation import PEAK
from autopar.price.pricer import Pricer
from autopar.simulate.kernels import as_kernels
from autopar.simulate.timeline import timeline_of
from cost_models.steps import Compute


def with_backends(plan: Plan, pricer: Pricer) -> Plan:
    """The plan, which says what it takes where inductor fuses its operators, how many kernels the host launches
    without, and what its flops are a share of. Only for GPUs: on CPUs inductor's kernels were not compared with
    anything, and nobody waits for a launch.
    """
    if not pricer.hardware.reserve:
        return plan
    priced = replace(pricer, bucket_bytes=plan.bucket_bytes)
    fused = as_kernels(plan, lambda node: "the program")
    facts: dict[str, float] = {FUSED: timeline_of(fused, priced, plan.prefetch).seconds}
    facts |= {f"{PEAK}{dtype}": rate for dtype, rate in pricer.hardware.flops_per_s.items()}
    if each_s := pricer.hardware.dispatch_s:
        count = launched(plan, priced)
        facts |= {DISPATCHED: count, DISPATCH: count * each_s}
    return replace(plan, search={**plan.search, **facts})


def launched(plan: Plan, pricer: Pricer) -> int:
    """How many kernels, collectives and copies of a step the host launches, one by one, in all micro-batches; an update
    of a parameter is one.
    """
    count = 0
    for instruction in flat(lower(plan, plan.prefetch, pricer)):
        steps = instruction.steps if isinstance(instruction, Run) else ()
        steps = (instruction.step,) if isinstance(instruction, Launch) else steps
        count += sum((step.kernels if isinstance(step, Compute) else 1) * pricer.times(step) for step in steps)
    return count
