"""A plan's file on a command line, and the profile that priced it."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import BadArgument, PlanMismatch
from autopar.plan import Plan
from autopar.simulate.timeline import pricer_of
from cost_models.hardware import IMAGINED, Hardware


def plan_in(path: str) -> Plan:
    """Raises BadArgument where there is no file to be read, PlanMismatch where it holds no plan."""
    try:
        return Plan.load(Path(path))
    except OSError as error:
        raise BadArgument(
            f"plan {path} cannot be read: {error.strerror}; make one with python -m autopar.search ... -o FILE"
        ) from error


def hardware_of(name: str | None, plan: Plan) -> Hardware:
    """The profile of the plan, or the given one, which must be it; with the TF32 that the plan was priced with."""
    try:
        hardware = Hardware.known(plan.hardware) if name is None else Hardware.load(name)
    except OSError as error:
        raise BadArgument(f"hardware profile {name} cannot be read: {error.strerror}") from error
    except PlanMismatch:
        raise
    except ValueError as error:
        own = "" if IMAGINED in plan.hardware else "; give the plan's own with --hardware FILE"
        raise BadArgument(f"{error}{own}") from error
    pricer_of(plan, hardware)  # raises PlanMismatch for other figures
    return hardware.allowing(plan.tf32)
