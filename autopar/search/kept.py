"""A plan out of a cache: what it says that it takes is computed again, and only then is it asked whether it fits."""

from __future__ import annotations

from dataclasses import replace

from autopar.assemble import DEVICE
from autopar.decide import refereed
from autopar.events import Staged
from autopar.plan import Plan, PlanMismatch
from autopar.plan.plan import AGAIN
from autopar.price import Pricer
from cost_models.hardware import Hardware
from cost_models.simulator import play

ROOM = 1.1  # times the room that a plan was searched for: with more than that there may be a better one


def priced_again(plan: Plan, hardware: Hardware, optimizer: str, origin: str) -> Plan:
    """The plan with times and peaks by the referee, and the timeline, on this machine: what a file says of them counts
    for nothing. Bound, limit, candidates, notes and the times that operators were measured to take stay claims.

    Raises PlanMismatch where it was made for another machine or optimizer, or claims a bound that it is below itself.
    """
    if (plan.hardware_digest, plan.optimizer) != (hardware.digest, optimizer):
        raise PlanMismatch(
            f"{origin} was made for {plan.hardware} with figures {plan.hardware_digest[:8]} and {plan.optimizer}, here "
            f"are {hardware.name} with {hardware.digest[:8]} and {optimizer}; {AGAIN}"
        )
    pricer = Pricer.on(plan.mesh, hardware, optimizer, plan.bucket_bytes)
    found = refereed(
        plan.graph, plan.choices, plan.deliveries, pricer, objective=None, bound=plan.bound, memory=plan.memory_limit,
        outputs=plan.outputs, residence=plan.residence,
    )  # fmt: skip
    played, peaks = found.predicted_seconds, dict(found.peak_bytes)
    if hardware.overlaps and plan.prefetch is not None:
        timeline = play(Staged(plan, pricer).events(overlap=True, prefetch=plan.prefetch))
        played, peaks[DEVICE] = timeline.seconds, max(peaks[DEVICE], timeline.memory[DEVICE].peak_bytes)
    if plan.bound > found.step_seconds * (1 + 1e-6):
        raise PlanMismatch(
            f"{origin} was edited: it says that every plan takes {plan.bound:.6g} s a step at least, and takes "
            f"{found.step_seconds:.6g} s itself; {AGAIN}"
        )
    return replace(
        plan, hardware=hardware.name, step_seconds=found.step_seconds, seconds_by=found.seconds_by, peak_bytes=peaks,
        simulated_seconds=None if plan.simulated_seconds is None else played,
    )  # fmt: skip


def still_good(plan: Plan, room: float) -> bool:
    """What is free is never twice the same: a plan that fits is the best one, unless there is far more room now."""
    return plan.peak_bytes[DEVICE] <= room and plan.memory_limit is not None and room <= ROOM * plan.memory_limit
