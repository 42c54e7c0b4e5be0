"""The question of a plan asked anew: what the same plan takes then, and which plan is the best then.

All that is asked is in the plan: the graph that was traced is what is left of the one that runs without fetches, stores
and values that run again. Strategies are proposed and priced anew, so it takes what a search takes, without the trace.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from autopar.errors import Infeasible, NoAnswerInTime
from autopar.plan import Plan
from autopar.plan.fit import check
from autopar.price.pricer import Pricer
from autopar.rewrite import plain
from autopar.search import Request, answer, ask
from autopar.search.context import Progress
from autopar.search.kept import repriced
from autopar.search.limits import GIB
from autopar.search.overlap_loop import OPTIMUM
from autopar.search.pins import pinned
from autopar.search.reserved import held_within, telling
from cost_models.hardware import Hardware
from cost_models.reserve import Room
from cost_models.steps import DEVICE

FITS = 1 + 1e-9  # rounding of sums of bytes


@dataclass(frozen=True)
class Asked:
    """`hardware`: the machine then. `room`: what the plan may take of each rank's device then; None: no limit.
    `pin`, `allow`, `time_limit_s`: as in `autopar.search.Request`; which of these a plan was searched with, it does not
    say.
    """

    hardware: Hardware
    room: Room | None
    pin: Mapping[str, str] = field(default_factory=dict[str, str])
    allow: Collection[str] | None = None
    time_limit_s: float = 60.0


@dataclass(frozen=True)
class Answers:
    """`before`: the plan as it is. `same`: its decisions on the machine then. `best`: the best plan then, None where
    none was found, `why`. `is_same`: the search found none that is quicker than `same`.
    """

    asked: Asked
    before: Plan
    same: Plan
    best: Plan | None
    why: Infeasible | NoAnswerInTime | None = None
    is_same: bool = False

    @property
    def fits(self) -> bool:
        """Whether the same plan does then."""
        return fits(self.same, self.asked)


def fits(plan: Plan, asked: Asked) -> bool:
    """Whether the plan fits in each memory of the machine then."""
    if asked.room is not None and plan.peak_bytes[DEVICE] > asked.room.tensors * FITS:
        return False
    return all(
        nbytes <= asked.hardware.tiers[tier].capacity_bytes * FITS
        for tier, nbytes in plan.peak_bytes.items()
        if tier != DEVICE
    )


def what_if(
    plan: Plan, hardware: Hardware, asked: Asked, *, origin: str = "the plan", progress: Progress = lambda text: None
) -> Answers:
    """Both answers. `hardware`: the profile of the plan. Where nothing fits, or nothing is found in time, that is an
    answer, too. Raises PlanMismatch for a plan that was edited, ValueError for a pin that names nothing.
    """
    graph = plain(plan.graph)
    check(plan, graph, plan.mesh, origin=origin)
    pinned(asked.pin, graph)
    mesh, optimizer, room = plan.mesh, plan.optimizer, asked.room
    memory = None if room is None else room.tensors
    before = repriced(plan, Pricer.on(mesh, hardware, optimizer, plan.bucket_bytes, plan.graph.rounds))
    here = repriced(plan, Pricer.on(mesh, asked.hardware, optimizer, plan.bucket_bytes, plan.graph.rounds))
    same = replace(here, memory_limit=memory, bound=0.0, search={}, candidates=(), notes=())
    progress(f"the same plan: {same.predicted_seconds * 1e3:.3f} ms a step, {before.predicted_seconds * 1e3:.3f} now")
    question = ask(graph, mesh, asked.hardware, optimizer=optimizer, progress=progress)
    request = Request(
        outputs=plan.outputs, pin=asked.pin, allow=asked.allow, time_limit_s=asked.time_limit_s,
        simulation=plan.simulated_seconds is not None,
    )  # fmt: skip

    def held(most: float) -> Plan:
        return answer(question, replace(request, memory=most), progress=progress)

    try:
        if room is None:
            best = answer(question, request, progress=progress)
        else:
            with telling(room):
                request = replace(request, buckets_for=room.tensors)
                best = held_within(room, held, question.pricer)
    except (Infeasible, NoAnswerInTime) as error:
        return Answers(asked, before, same, None, error)
    found = Answers(asked, before, same, best)
    if asked.pin or asked.allow is not None or not found.fits or same.predicted_seconds >= best.predicted_seconds:
        return found
    bound = min(best.bound, same.step_seconds)
    kept = replace(same, bound=bound, search=best.search, candidates=best.candidates, notes=(KEPT,))
    return replace(found, best=kept, is_same=True)


KEPT = "the plan of before, asked on other figures: the search found none that is quicker"


# --- what memory is worth --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worth:
    """What a change of the limit is worth by the solver's price of memory, and what it turned out to be, in seconds of
    the sum of times that the step saves (less than 0: loses). `more_bytes`: of the limit, of what tensors may hold.
    """

    more_bytes: float
    by_price_s: float
    solved_s: float


def worth_of_memory(answers: Answers) -> Worth | None:
    """None where more than memory changes, or no price is known.

    A price is the slope of a bound that is convex in the limit (weak duality: Geoffrion 1974, section 3). So that bound
    saves no more by more memory than its price says, and loses no less by less.
    """
    before, best, room = answers.before, answers.best, answers.asked.room
    price = before.search.get(f"ms_per_gib:{DEVICE}")
    if best is None or best.hardware_digest != before.hardware_digest:
        return None
    if room is None or before.memory_limit is None or not isinstance(price, float):
        return None
    more = room.tensors - before.memory_limit
    return Worth(more, more / GIB * price / 1e3, optimum_s(before) - optimum_s(best))


def optimum_s(plan: Plan) -> float:
    """The sum of times of the best plan by that sum, which is what the solver's prices are of: among those that the
    plan was chosen from, or itself.
    """
    sums = [one.step_seconds for one in plan.candidates if one.name == OPTIMUM and one.step_seconds is not None]
    return min([plan.step_seconds, *sums])
