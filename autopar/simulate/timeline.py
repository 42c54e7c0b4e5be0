"""One rank's training step, simulated: the timeline of a plan, and its trace file."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import PlanMismatch
from autopar.lower import lower
from autopar.plan.plan import Plan
from autopar.price.pricer import Pricer
from autopar.simulate.events import events
from cost_models.hardware import Hardware
from cost_models.simulator import Event, Timeline, play
from cost_models.trace_file import write_trace


def pricer_of(plan: Plan, hardware: Hardware | None = None) -> Pricer:
    """What priced the plan: its profile by name, or `hardware`. Raises PlanMismatch where the figures are others."""
    hardware = (hardware or Hardware.known(plan.hardware)).allowing(plan.tf32)
    if hardware.digest != plan.hardware_digest:
        raise PlanMismatch(
            f"the plan was priced on {plan.hardware} with figures {plan.hardware_digest[:8]}, {hardware.name} has "
            f"{hardware.digest[:8]}; give the profile it was made with, or run `python -m autopar.search` again."
        )
    return Pricer.on(plan.mesh, hardware, plan.optimizer, plan.bucket_bytes, plan.graph.rounds)


def events_of(plan: Plan, pricer: Pricer, prefetch: int | None = None) -> list[Event]:
    """The events of one step with transfers at prefetch distance `prefetch`; None: with nothing overlapped."""
    return events(lower(plan, prefetch, pricer), plan.graph, pricer)


def timeline_of(plan: Plan, pricer: Pricer, prefetch: int | None = None) -> Timeline:
    """One training step, simulated."""
    return play(events_of(plan, pricer, prefetch))


def to_trace(plan: Plan, path: str | Path, hardware: Hardware | None = None) -> None:
    """Write the step as a trace that chrome://tracing and ui.perfetto.dev open, simulated as the plan runs.

    `hardware`: the profile that priced the plan, where it is none of autopar's. Raises PlanMismatch where it did not.
    """
    timeline = timeline_of(plan, pricer_of(plan, hardware), plan.prefetch)
    about = {
        "mesh": str(plan.mesh), "hardware": plan.hardware, "optimizer": plan.optimizer,
        "prefetch": "nothing overlaps" if plan.prefetch is None else plan.prefetch,
    }  # fmt: skip
    write_trace(timeline, path, process=f"one rank of {plan.mesh} on {plan.hardware}", about=about)
