"""Plans in a cache, for the next time. What a file says that its plan takes is computed again; only then is it asked
whether it fits. Training goes on where the cache cannot be read or written.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autopar.assemble.problem import DEVICE
from autopar.decide.referee import refereed
from autopar.errors import PlanMismatch
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.outside import Rules
from autopar.plan import Plan
from autopar.plan.fit import check
from autopar.plan.value import AGAIN
from autopar.price.pricer import Pricer
from autopar.rewrite.cast_once import in_rounds_of_stages
from autopar.search.cutting import cut_again
from autopar.search.orders import within_stage
from autopar.search.pipeline import Pipeline
from autopar.simulate.timeline import timeline_of
from cost_models.hardware import Hardware

ROOM = 1.1  # times the room that a plan was searched for: with more than that there may be a better one
CUT = "cut_at_s"  # among the facts of a search that its time limit has ended


def kept_plan(
    path: Path, graph: Graph, mesh: Mesh | int, hardware: Hardware, optimizer: str, rules: Sequence[Rules] = ()
) -> Plan | None:
    """What an earlier search has found. None where there is none, or something else: damaged, a pipe, a device.

    `mesh`: of the plan, or of how many devices it is. `rules`: of users' packages.
    """
    try:
        if not path.is_file():
            return None
        known = Plan.load(path, rules)
        if known.mesh.ranks == mesh:
            mesh = known.mesh
        elif isinstance(mesh, int):
            return None
        check(known, graph, mesh, origin=str(path))
        return priced_again(known, hardware, optimizer, str(path))
    except PlanMismatch:  # cut short or edited: found again, and written anew
        return None
    except OSError as error:
        warnings.warn(f"the plan kept in {path} cannot be read ({error}); it is found again", stacklevel=2)
        return None


def kept_pipeline(
    path: Path, graph: Graph, mesh: Mesh, hardware: Hardware, optimizer: str, rules: Sequence[Rules] = ()
) -> Pipeline | None:
    """What an earlier search of a step in stages has found, as `kept_plan`: its cut, with all that is said of it found
    again.
    """
    try:
        if not path.is_file():
            return None
        known = Pipeline.load(path, rules)
        rounds = in_rounds_of_stages(graph, known.whole.graph.rounds.count)
        check(known.whole, rounds, within_stage(mesh), origin=str(path))
        whole = priced_again(known.whole, hardware, optimizer, str(path))
        return None if known.mesh != mesh else cut_again(known, whole, hardware)
    except PlanMismatch:
        return None
    except OSError as error:
        warnings.warn(f"the pipeline kept in {path} cannot be read ({error}); it is found again", stacklevel=2)
        return None


def keep_plan(plan: Plan | Pipeline, path: Path) -> None:
    """For the next time; a warning where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():  # where a plan is kept is not for the folder to choose
            path.unlink()
        plan.save(path)
    except OSError as error:
        warnings.warn(f"the plan cannot be kept in {path.parent} ({error}); training goes on without", stacklevel=2)


def lasting(plan: Plan, time_limit_s: float) -> bool:
    """Whether a search with this limit would find nothing better: one that was cut short had no less time."""
    cut_at_s = plan.search.get(CUT, math.inf)
    return isinstance(cut_at_s, (int, float)) and time_limit_s <= cut_at_s


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
    found = repriced(plan, Pricer.on(plan.mesh, hardware, optimizer, plan.bucket_bytes, plan.graph.rounds))
    if plan.bound > found.step_seconds * (1 + 1e-6):
        raise PlanMismatch(
            f"{origin} was edited: it says that every plan takes {plan.bound:.6g} s a step at least, and takes "
            f"{found.step_seconds:.6g} s itself; {AGAIN}"
        )
    return found


def repriced(plan: Plan, pricer: Pricer) -> Plan:
    """The same decisions with times and peaks by the referee, and the timeline at the plan's own prefetch, on the
    machine of `pricer`. All else that the plan says of itself stays as it is.
    """
    found = refereed(
        plan.graph, plan.choices, plan.deliveries, pricer, objective=None, bound=plan.bound, memory=plan.memory_limit,
        outputs=plan.outputs, residence=plan.residence,
    )  # fmt: skip
    seconds, peaks = found.predicted_seconds, dict(found.peak_bytes)
    if pricer.hardware.overlaps and plan.prefetch is not None:
        timeline = timeline_of(plan, pricer, plan.prefetch)
        seconds, peaks[DEVICE] = timeline.seconds, max(peaks[DEVICE], timeline.memory[DEVICE].peak_bytes)
    return replace(
        plan, hardware=found.hardware, hardware_digest=found.hardware_digest, step_seconds=found.step_seconds,
        seconds_by=found.seconds_by, peak_bytes=peaks,
        simulated_seconds=None if plan.simulated_seconds is None else seconds,
    )  # fmt: skip


def still_good(plan: Plan, room: float) -> bool:
    """What is free is never twice the same: a plan that fits is the best one, unless there is far more room now."""
    return plan.peak_bytes[DEVICE] <= room and plan.memory_limit is not None and room <= ROOM * plan.memory_limit
