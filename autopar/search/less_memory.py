"""Pipelines in little memory: stages that leave less to backward, or a whole plan with less room.

Each search here may be cut short by the clock, and what one of them finds may be worse than what the one before it
found. So all of them go on from the best so far, and nothing takes its place but something better.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.assemble.problem import output_name
from autopar.errors import Infeasible, NoAnswerInTime, NotCut
from autopar.ir.words import count_of
from autopar.pipeline import in_flight
from autopar.plan.tell import human
from autopar.rewrite import RECOMPUTE
from autopar.search.context import Progress, Question
from autopar.search.cutting import KEPT, Cutting
from autopar.search.memory_options import ways_on
from autopar.search.pins import obeyable
from autopar.search.pipeline import Pipeline
from autopar.search.request import Held, Request
from cost_models.steps import DEVICE

TRIES, CLOSE = 8, 0.02  # of rooms, and how near to the right one they end
# Of the limit is left free for what ranks work with, which grows as less is saved; twice as much each time.
SLACK = 0.005
# Of all modules: what both GPipe and Megatron-LM do where activations do not fit.
SAVING_NOTHING: Mapping[str, str] = {"*": RECOMPUTE}
SOME = 6  # tries that are made however late it is
LEAST_S = 1.0  # seconds for each search, however late it is, or as many as the first one took


def running_all_again(question: Question, request: Request) -> Request | None:
    """The same request, with all layers run again in backward; None where they may not be."""
    if RECOMPUTE not in ways_on(question.pricer, request.allow):
        return None
    return replace(request, pin=obeyable({**SAVING_NOTHING, **request.pin}, question)[0])


@dataclass
class Clock:
    """Of all searches of a pipeline together, in seconds in which this process computes: so a busy machine does not cut
    them shorter, and what is priced and played between them does not count.
    """

    limit_s: float
    spent_s: float = 0.0
    least_s: float = 0.0

    @property
    def left_s(self) -> float:
        """For the next search: never less than the first one took, without a limit of memory, as a problem in which
        more is open does not take less.
        """
        return max(self.least_s, self.limit_s - self.spent_s)

    @property
    def is_late(self) -> bool:
        return self.spent_s > self.limit_s

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """While a search is."""
        began = time.process_time()
        try:
            yield
        finally:
            taken = time.process_time() - began
            self.spent_s += taken
            self.least_s = self.least_s or max(LEAST_S, taken)


def saving_less(
    found: Pipeline,
    limit: float,
    whole_holding: Callable[[tuple[Held, ...]], Cutting],
    clock: Clock,
    progress: Progress,
) -> tuple[Cutting, Pipeline] | None:
    """The pipeline with the same cut whose ranks hold so much less as backward begins that they fit, or the one that
    comes nearest, which another cut may make fit; None where there is none. What a rank works with is more where values
    are run again, so the first answer may be too large yet.
    """
    limits, part = limits_of(found), 1.0
    least = [KEPT * one.most for one in limits]
    best: tuple[Cutting, Pipeline] | None = None
    slack = SLACK * limit
    for number in range(1, TRIES + 1):
        wanted = _less(limits, found, limit, least, part, slack)
        try:
            cutting = whole_holding(wanted)
            cut = cutting.cuts.at([*found.ends])
            tried = cutting.first() if cut is None else cutting.pipeline(*cut)
        except (Infeasible, NoAnswerInTime, NotCut):
            part /= 2  # too little for any plan, perhaps
            if part < 0.2 or (best is not None and clock.is_late):
                break
            continue
        progress(f"saving less: {tried.step_seconds * 1e3:.3f} ms a step, {human(tried.peak_bytes)}")
        is_less = over(tried, limit) < over(found, limit)
        if best is None or is_less:
            best = cutting, tried
        if over(tried, limit) <= 0 or cut is None or (clock.is_late and not is_less and number >= SOME):
            break
        limits, found = wanted, tried if is_less else found
        slack = SLACK * limit if is_less else 2 * slack
    return best


def over(found: Pipeline, limit: float) -> float:
    """Bytes above the limit, of all ranks together."""
    return sum(max(0.0, rank.peak - limit) for rank in found.memory)


def limits_of(found: Pipeline) -> tuple[Held, ...]:
    """What ranks hold now as backward begins."""
    chunks, flying = found.schedule.stages_per_rank, in_flight(found.schedule).most_saved
    values, known = list[frozenset[str]](), frozenset[str]()
    for stage in found.stages:  # masks and positions are of the first that has them
        own = {node.name for node in stage.graph.nodes if node.phase == "forward" and not node.is_source}
        given = (result.target for result in stage.graph.results if result.kind == "output")
        own |= {output_name(target) for target in given if target not in stage.sends}
        values.append(frozenset(own - known))
        known |= values[-1]
    held: list[Held] = []
    for rank in range(found.schedule.ranks):
        own = [stage for stage, where in enumerate(found.schedule.rank_of) if where == rank]
        parameters = (node.name for stage in own for node in found.stages[stage].graph.nodes if node.op == "parameter")
        named = frozenset[str]().union(*(values[stage] for stage in own)), frozenset(parameters)
        held.append(Held(*named, flying[rank] / chunks, _held(found, rank, flying[rank] / chunks)))
    return tuple(held)


def _held(found: Pipeline, rank: int, times: float) -> float:
    """Bytes of a rank's stages as backward begins."""
    stages = zip(found.schedule.rank_of, found.nbytes.fixed, found.nbytes.saved, strict=True)
    return sum(fixed + times * saved for where, fixed, saved in stages if where == rank)


def _less(
    limits: Sequence[Held], found: Pipeline, limit: float, least: Sequence[float], part: float, slack: float
) -> tuple[Held, ...]:
    """What ranks may hold next for them to fit: less than these limits, and than what they hold now, by a `part` of
    what they are over.
    """
    told: list[Held] = []
    for rank, (one, floor) in enumerate(zip(limits, least, strict=True)):
        more = found.memory[rank].peak - limit
        now = min(one.most, _held(found, rank, one.times))
        told.append(replace(one, most=max(now - part * (more + slack), floor)) if more > 0 else one)
    return tuple(told)


def with_less_room(
    found: Pipeline, limit: float, whole_within: Callable[[float], Cutting], clock: Clock
) -> tuple[Cutting, Pipeline]:
    """The quickest that fits of plans of the whole model with less room, by bisection. Raises Infeasible."""
    best: tuple[Cutting, Pipeline] | None = None
    needed, most, least = found.peak_bytes, float(found.whole.peak_bytes[DEVICE]), 0.0  # room of the whole plan
    for _ in range(TRIES):
        room = (least + most) / 2
        if most - least < CLOSE * most or (best is not None and clock.is_late):
            break
        try:
            cutting = whole_within(room)
            found = cutting.first()
        except Infeasible as error:  # the least of the whole plan is told: no need to look for it by halves
            least = max(room, error.at_least or 0.0)
            continue
        except (NoAnswerInTime, NotCut):  # it was cut with more room
            least = room
            continue
        needed = min(needed, found.peak_bytes)
        if found.peak_bytes > limit:
            most = min(room, float(found.whole.peak_bytes[DEVICE]))
            continue
        least = room
        if best is None or found.step_seconds < best[1].step_seconds:
            best = cutting, found
    if best is None:
        raise does_not_fit(found, limit, needed)
    return best


def does_not_fit(found: Pipeline, limit: float, needed: float) -> Infeasible:
    """What is said where no pipeline fits. `needed`: bytes per rank of the one that takes the least."""
    return Infeasible(
        f"no pipeline on {count_of(found.schedule.ranks, 'rank')} over {found.schedule.micro_batches} micro-batches "
        f"fits in {human(limit)} per rank: the least that was found takes {human(needed)}; give more micro-batches, "
        "stages or devices, or more memory",
        enough=needed,
    )
