"""Where the time of a predicted step goes, to the last instant, and what memory holds at its peak.

Every instant of the step belongs to one class: what the compute stream runs then, or, where it stands still, the
transfer that it waits for (`Timeline.exposed_of`). So the classes add up to the step, and those of two plans to the
difference of their steps; nothing is left over for a class "other". A plan that was not simulated is one whose
transfers are waited for where they stand: its step is the sum of its parts, each of them exposed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import isclose

from autopar.errors import PlanMismatch
from autopar.lower import lower
from autopar.lower.memory import held_at_peak, peaks
from autopar.lower.program import (
    Buffer,
    Copy,
    Inner,
    Launch,
    Local,
    Operator,
    Read,
    Receive,
    Run,
    Send,
    SendTo,
    Update,
    Within,
)
from autopar.plan.plan import Plan
from autopar.plan.tell import backward_homes, home
from autopar.plan.value import AGAIN, is_product
from autopar.price.pricer import Pricer
from autopar.price.reshard import Work
from autopar.simulate.timeline import events_of
from cost_models.simulator import COMPUTE, Event, play
from cost_models.steps import DEVICE, Comm, Compute

PRODUCTS, OPERATORS = "products", "other operators"
PRODUCTS_AGAIN, OPERATORS_AGAIN = "products run again", "other operators run again"
REORDER, OPTIMIZER = "reorder", "optimizer"
TO_HOST, FROM_HOST, ON_HOST = "copies to the host", "copies from the host", "updates on the host"
BESIDE = {"d2h": TO_HOST, "h2d": FROM_HOST, "host": ON_HOST}  # by stream
EXACT = 1e-9  # relative: what sums of floats may differ by


@dataclass(frozen=True, slots=True)
class Part:
    """Of a step: `what` is done or waited for, for which module."""

    what: str
    module: str


@dataclass(frozen=True)
class Account:
    """`seconds`: of each part, together `step`. `busy`: what all transfers of a part take, exposed or not; of what
    runs on the compute stream nothing. `held`: the device's buffers at the peak, with their bytes.
    """

    step: float
    seconds: Mapping[Part, float]
    busy: Mapping[Part, float]
    held: Mapping[Buffer, int]


def account_of(plan: Plan, pricer: Pricer) -> Account:
    """`pricer`: what priced the plan (`autopar.simulate.timeline.pricer_of`). Raises PlanMismatch where the plan says
    that its step takes another time than its program does.
    """
    told = _Classes(plan)
    events = [_as_predicted(event, plan, pricer) for event in events_of(plan, pricer, plan.prefetch)]
    timeline = play(events)
    seconds: dict[Part, float] = defaultdict(float)
    busy: dict[Part, float] = defaultdict(float)
    for event, exposed_s in zip(timeline.events, timeline.exposed_of, strict=True):
        if not event.seconds:
            continue
        part = told.part(event)
        if event.stream != COMPUTE:
            busy[part] += event.seconds
        seconds[part] += event.seconds if event.stream == COMPUTE else exposed_s
    if not isclose(timeline.seconds, plan.predicted_seconds, rel_tol=EXACT):
        raise PlanMismatch(
            f"the plan says that a step takes {plan.predicted_seconds * 1e3:.6g} ms, but what it does takes "
            f"{timeline.seconds * 1e3:.6g} ms; it was edited, or made by another autopar: {AGAIN}"
        )
    programs = [lower(plan, prefetch, pricer) for prefetch in dict.fromkeys((None, plan.prefetch))]
    fullest = max(programs, key=lambda program: peaks(program)[DEVICE])
    return Account(plan.predicted_seconds, dict(seconds), dict(busy), held_at_peak(fullest))


def _as_predicted(event: Event, plan: Plan, pricer: Pricer) -> Event:
    """Where a step is a sum, a gradient in a bucket takes its share of a full one (`autopar.decide.referee`)."""
    is_sum = plan.simulated_seconds is None or (plan.prefetch is None and pricer.hardware.overlaps)
    match event.by:
        case Launch(step=Comm() as step, in_bucket=True) if is_sum:
            return replace(event, seconds=pricer.share(step))
        case _:
            return event


class _Classes:
    """To which part an event counts."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.node_of = plan, plan.graph.by_name

    @cached_property
    def module_of(self) -> dict[str, str]:
        """Node -> module."""
        return {node.name: home(node) for node in self.plan.graph.nodes} | backward_homes(self.plan)

    def part(self, event: Event) -> Part:
        return Part(self._what(event), self._module(event))

    def _what(self, event: Event) -> str:
        if event.stream != COMPUTE:
            beside = BESIDE.get(event.stream)
            return beside or _collective(event)
        match event.by:
            case Run(Operator(name) | Inner(name)):
                node = self.node_of[name]
                is_again = bool(node.target) and not node.is_source
                if is_product(self.plan.choices[name]):
                    return PRODUCTS_AGAIN if is_again else PRODUCTS
                return OPERATORS_AGAIN if is_again else OPERATORS
            case Run(Update() | Local(Work.ADD_UP)) | Launch(of=Update(), step=Compute()):
                return OPTIMIZER
            case Run(Local()):
                return REORDER
            case _:
                raise AssertionError(f"no class for {event}")

    def _module(self, event: Event) -> str:
        by = event.by
        assert isinstance(by, Run | Launch | SendTo | Receive), event
        if isinstance(by, SendTo | Receive):
            return ""
        of = by.what if isinstance(by, Run) else by.of
        match of.of if isinstance(of, Local) else of:
            case Operator(name) | Inner(name) | Within(name) | Copy(name) | Read(name):
                return self.module_of[name]
            case Update(parameter):
                return parameter.rpartition(".")[0]
            case Send(places):
                result = self.plan.graph.results[places[0]]
                if result.kind == "output" and result.ref is not None:
                    return self.module_of[result.ref.name]
                return result.target.rpartition(".")[0]


def _collective(event: Event) -> str:
    """`all_gather over data+tensor`: its axes, whichever one's stream it runs on."""
    about = dict(event.about)
    return f"{about.get('collective', 'send')} over {about['axis']}"
