"""What commands read of a plan's file: the plan, and the profile that priced it."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import BadArgument, PlanMismatch
from autopar.machine.rules_files import rules_named
from autopar.plan import Plan
from autopar.simulate.timeline import pricer_of
from cost_models.hardware import IMAGINED, Hardware


def plan_at(path: str | Path, rules: str | None = None) -> Plan:
    """The plan in that file; `rules`: as `--rules` names them. Raises BadArgument where there is none to be read,
    PlanMismatch where it is no plan, or was made with other rules.
    """
    try:
        return Plan.load(Path(path), rules_named(rules))
    except OSError as error:
        raise BadArgument(
            f"plan {path} cannot be read: {error.strerror}; make one with python -m autopar.search ... -o FILE"
        ) from error


def profile_of(plan: Plan, name: str | None = None) -> Hardware:
    """The profile that priced the plan: `name`, or the one that the plan names, as it allows TF32. Raises BadArgument
    where there is no such profile, PlanMismatch where its figures are others.
    """
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
