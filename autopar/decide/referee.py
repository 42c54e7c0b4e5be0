"""The referee: a plan is priced again from its program alone, and what it holds is counted there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import isclose

from autopar.ir.graph import Graph
from autopar.lower import Program, lower
from autopar.lower.memory import peaks
from autopar.lower.program import Inner, Launch, Local, Operator, Run, Update
from autopar.lower.verify import flat
from autopar.plan.plan import Plan
from autopar.plan.value import Choice, Decision, Delivery
from autopar.price.pricer import Pricer
from autopar.price.reshard import Work
from cost_models.price import stream_of
from cost_models.steps import DEVICE, Comm, Move, Step


class RefereeError(AssertionError):
    """The solver's objective and the price of its plan disagree: a defect of autopar, never of the user."""


def seconds_by(program: Program, pricer: Pricer) -> dict[str, float]:
    """Seconds of one step: compute, optimizer, reorder (copies of layout changes), communication per axis, and copies
    between device and host, each way. A gradient in a bucket takes its share of a full one, as the solver has it.

    By plain loops over the program, which share nothing with the solver's matrices.
    """
    total: dict[str, float] = {"compute": 0.0, "optimizer": 0.0, "reorder": 0.0}

    def add(step: Step, seconds: float, part: str) -> None:
        name = stream_of(step) if isinstance(step, Comm | Move) else part
        total[name] = total.get(name, 0.0) + seconds

    for instruction in flat(program):
        match instruction:
            case Run(what, steps, share=share):
                part = _part(what)
                for step in steps:
                    add(step, share * pricer.seconds((step,)), part)
            case Launch(step=Comm() as step, in_bucket=True):
                add(step, pricer.share(step), "reorder")
            case Launch(step=step):
                add(step, pricer.seconds((step,)), "optimizer")
            case _:
                pass
    return total


def _part(what: Operator | Local | Update | Inner) -> str:
    match what:
        case Update() | Local(Work.ADD_UP):
            return "optimizer"
        case Local():
            return "reorder"
        case _:
            return "compute"


def unfilled(program: Program, pricer: Pricer) -> dict[str, float]:
    """Axis -> seconds that buckets of gradients take beyond the shares of full ones at which each gradient is priced.
    A bucket that is not full waits as long as one that is.
    """
    beyond: dict[str, float] = defaultdict(float)
    for _, instruction in program:
        match instruction:
            case Launch(step=Comm() as step, in_bucket=True):
                beyond[stream_of(step).removeprefix("comm:")] += pricer.seconds((step,)) - pricer.share(step)
            case _:
                pass
    return dict(beyond)


def refereed(
    graph: Graph,
    choices: Mapping[str, Choice],
    deliveries: tuple[Delivery | None, ...],
    pricer: Pricer,
    *,
    objective: float | None,
    bound: float,
    memory: float | None,
    outputs: str,
    notes: Sequence[str] = (),
    search: Mapping[str, float | int | str] | None = None,
    residence: Mapping[str, str] | None = None,
) -> Plan:
    """A plan of given choices with the referee's own prices; `objective` is what somebody claims it costs."""
    resides = dict(sorted((residence or {}).items()))
    program = lower(Decision(graph, pricer.mesh, choices, deliveries, resides, pricer.bucket_bytes), None, pricer)
    parts = seconds_by(program, pricer)
    total = sum(parts.values())
    if objective is not None and not isclose(total, objective, rel_tol=1e-6, abs_tol=1e-12):
        raise RefereeError(f"the solver claims {objective:.9g} s a step, its plan costs {total:.9g} s")
    held = peaks(program)
    peak = held[DEVICE]
    if memory is not None and objective is not None and peak > memory * (1 + 1e-9):
        raise RefereeError(f"the solver's plan needs {peak} bytes, the limit is {memory:.0f}")
    simulated_s = None  # where transfers overlap compute, only the timeline tells what they delay
    if pricer.bucket_bytes and not pricer.hardware.overlaps:
        simulated_s = total + sum(unfilled(program, pricer).values())
    return Plan(
        graph, pricer.mesh, pricer.hardware.name, pricer.hardware.digest, pricer.optimizer, memory, outputs,
        choices, deliveries, total, min(bound, total), held, parts, tuple(notes),
        bucket_bytes=pricer.bucket_bytes, search=dict(search or {}), simulated_seconds=simulated_s,
        residence=resides, tf32=pricer.hardware.tf32,
    )  # fmt: skip
