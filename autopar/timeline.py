"""One rank's training step, played: the timeline of a plan, and its trace file."""

from __future__ import annotations

from pathlib import Path

from autopar.events import events_of
from autopar.plan.plan import Plan, PlanMismatch
from autopar.price import Pricer
from cost_models.hardware import Hardware
from cost_models.simulator import Timeline, play
from cost_models.trace_file import write_trace

__all__ = ["events_of", "pricer_of", "timeline_of", "to_trace"]


def pricer_of(plan: Plan, hardware: Hardware | None = None) -> Pricer:
    """What priced the plan: its profile by name, or `hardware`. Raises PlanMismatch where the figures are others."""
    hardware = (hardware or Hardware.known(plan.hardware)).allowing(plan.tf32)
    if hardware.digest != plan.hardware_digest:
        raise PlanMismatch(
            f"the plan was priced on {plan.hardware} with figures {plan.hardware_digest[:8]}, {hardware.name} has "
            f"{hardware.digest[:8]}; give the profile it was made with, or run `python -m autopar.search` again."
        )
    return Pricer.on(plan.mesh, hardware, plan.optimizer, plan.bucket_bytes)


def timeline_of(plan: Plan, pricer: Pricer, *, overlap: bool = False, prefetch: int = 1) -> Timeline:
    """One training step, played."""
    return play(events_of(plan, pricer, overlap=overlap, prefetch=prefetch))


def to_trace(
    plan: Plan, path: str | Path, hardware: Hardware | None = None, *, overlap: bool | None = None,
    prefetch: int | None = None,
) -> None:  # fmt: skip
    """Write the step as a trace that chrome://tracing and ui.perfetto.dev open; what is not said is as in the plan."""
    overlap = plan.prefetch is not None if overlap is None else overlap
    prefetch = (1 if plan.prefetch is None else plan.prefetch) if prefetch is None else prefetch
    timeline = timeline_of(plan, pricer_of(plan, hardware), overlap=overlap, prefetch=prefetch)
    about = {"mesh": str(plan.mesh), "hardware": plan.hardware, "optimizer": plan.optimizer, "overlap": int(overlap)}
    write_trace(timeline, path, process=f"one rank of {plan.mesh} on {plan.hardware}", about=about)
