"""A step in pipeline stages: where the model is cut, which schedule runs, what it takes and holds.

One plan is found for the whole model on the mesh of one stage, in micro-batches, and cut: a node's strategy does not
hang on the stage that it is in. What does is memory: a stage holds its own parameters, and what is saved of as many
micro-batches as are in flight there. Where some stage does not fit, the whole plan is found again with less room, until
all of them do.

A cut is first that of least step time under 1F1B by `solver.cut_pipeline`, among the places where little crosses, or
the even one; the schedules are played with the seconds of each stage's own timeline, and then one end after the other
is moved as long as the played step gets shorter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.decide.stages import in_stages
from autopar.errors import Infeasible, NoAnswerInTime
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.words import count_of
from autopar.pipeline import Durations, StageBytes, in_flight, make_schedule, memory, play
from autopar.plan import Plan
from autopar.plan.renamed import names_of, renamed
from autopar.plan.tell import human
from autopar.price.pricer import Pricer
from autopar.rewrite.cast_once import in_rounds_of_stages
from autopar.rewrite.micro_batches import NotCut
from autopar.search.context import Progress, Question, ask
from autopar.search.cuts import Cut, Cuts, Send
from autopar.search.micro_batches import AUTO
from autopar.search.pipeline import Pipeline
from autopar.search.request import DEFAULT, Request
from autopar.search.search import answer
from autopar.search.stage_prices import price_of
from cost_models.hardware import Hardware
from cost_models.steps import DEVICE, Comm

PIPE = "pipe"  # the axis of stages
WHOLE = ("1f1b", "gpipe")  # schedules, in the order of preference
IN_HALVES = ("zb-h1", "zb-h2")  # backward runs in two: of inputs, which the stage before waits for, and of weights
SCHEDULES = (*WHOLE, *IN_HALVES)
TRIES, CLOSE = 8, 0.02  # of the room for the whole plan, and how near to the right one it ends
MOVES, WORTH = 8, 1e-3  # of ends of stages that are tried, and what part of the step one has to promise
Saved = tuple[tuple[frozenset[str], float], ...]
LEAST_S = 1.0  # seconds for each search, however late it is


def find_pipeline(
    graph: Graph,
    mesh: Mesh,
    hardware: Hardware,
    micro_batches: int,
    request: Request = DEFAULT,
    *,
    schedule: str = "auto",
    optimizer: str = "adamw",
    progress: Progress = lambda text: None,
) -> Pipeline:
    """The quickest pipeline of `graph`, a step of the whole batch, over the axis `pipe` of the mesh, which is its first
    one. `schedule`: one of `SCHEDULES`, or auto for the quicker of them.

    Raises NotCut where the model cannot be cut into so many micro-batches or stages, Infeasible where no cut fits.
    """
    stages_of(mesh)
    inner = within_stage(mesh)
    question = ask(in_rounds_of_stages(graph, micro_batches), inner, hardware, optimizer=optimizer, progress=progress)
    return pipeline_of(question, mesh, request, schedule=schedule, progress=progress)


def pipeline_of(
    question: Question,
    mesh: Mesh,
    request: Request = DEFAULT,
    *,
    schedule: str = "auto",
    moved: bool = True,
    named: bool = False,
    progress: Progress = lambda text: None,
) -> Pipeline:
    """`find_pipeline`, of a question already asked: of a step in micro-batches, on the mesh of one stage.

    `moved`: ends of stages are moved where that is quicker. `named`: the axes are called by what they do. The time
    limit is one of all searches together that a memory limit needs, as far as something fits by then.
    """
    count, limit, began = stages_of(mesh), request.memory, time.perf_counter()

    def whole_within(room: float | None, saved: Saved = ()) -> Cutting:
        left = max(LEAST_S, request.time_limit_s - (time.perf_counter() - began))
        asked = replace(request, memory=room, saved=saved, simulation=False, time_limit_s=left)
        whole = answer(question, asked, progress=progress)
        if not named:
            return Cutting.of(whole, mesh, question.pricer.hardware, schedule, limit)
        whole = renamed(whole, names_of(whole))
        called = Mesh((PIPE, *whole.mesh.names[: len(mesh.names) - 1]), mesh.sizes)
        return Cutting.of(whole, called, question.pricer.hardware, schedule, limit)

    def in_halves(cutting: Cutting, found: Pipeline) -> Pipeline:
        return cutting.in_halves(found, moved=moved) if schedule == AUTO else found

    def ended(cutting: Cutting, found: Pipeline) -> Pipeline:
        return in_halves(cutting, cutting.moved(found) if moved else found)

    cutting = whole_within(None)
    free = replace(cutting, limit=None)
    quickest = free.moved(free.first()) if moved else free.first()
    found = in_halves(free, quickest)
    told = f"{count_of(count, 'stage')}: {1e3 * found.step_seconds:.3f} ms a step, simulated, {found.schedule.name}"
    progress(told)
    if limit is None or found.peak_bytes <= limit:
        return found
    fitting = [ended(cutting, cutting.first())]  # as the cut and the schedule alone make room
    if (less := _saving_less(quickest, limit, lambda saved: whole_within(None, saved), progress)) is not None:
        fitting.append(ended(*less))
    if fitting := [one for one in fitting if one.peak_bytes <= limit]:
        return min(fitting, key=lambda one: one.step_seconds)
    return ended(
        *_with_less_room(found, limit, whole_within, lambda: time.perf_counter() - began > request.time_limit_s)
    )


def _with_less_room(
    found: Pipeline, limit: float, whole_within: Callable[[float], Cutting], is_late: Callable[[], bool]
) -> tuple[Cutting, Pipeline]:
    """The quickest that fits of plans of the whole model with less room, by bisection. Raises Infeasible."""
    best: tuple[Cutting, Pipeline] | None = None
    needed, most, least = found.peak_bytes, float(found.whole.peak_bytes[DEVICE]), 0.0  # room of the whole plan
    for _ in range(TRIES):
        room = (least + most) / 2
        if most - least < CLOSE * most or (best is not None and is_late()):
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
        raise Infeasible(
            f"no pipeline of {count_of(len(found.plans), 'stage')} over {found.schedule.micro_batches} micro-batches "
            f"fits in {human(limit)} per rank: the least that was found takes {human(needed)}; give more "
            "micro-batches, stages or devices, or more memory",
            enough=needed,
        )
    return best


def _saving_less(
    found: Pipeline, limit: float, whole_saving: Callable[[Saved], Cutting], progress: Progress
) -> tuple[Cutting, Pipeline] | None:
    """The pipeline with the same cut whose stages save so much less of each micro-batch in flight that they fit, or the
    smallest that is found, which another cut may make fit; None where there is none. What is held once is more where
    values are run again, so the first answer may be too large yet.
    """
    names = [
        frozenset(node.name for node in stage.graph.nodes if node.phase == "forward" and not node.is_source)
        for stage in found.stages
    ]
    # masks and positions are of the first that has them
    names = [own.difference(*names[:at]) for at, own in enumerate(names)]
    rooms, least = [*found.nbytes.saved], None
    for _ in range(TRIES):
        flying = in_flight(found.schedule).most_saved
        over = [held.peak - limit for held in found.memory]
        rooms = [
            room - more / count if more > 0 or count == 0 else room
            for room, more, count in zip(rooms, over, flying, strict=True)
        ]
        if min(rooms) <= 0:
            break
        try:
            cutting = whole_saving(tuple(zip(names, rooms, strict=True)))
        except (Infeasible, NoAnswerInTime):
            break
        cut = cutting.cuts.at([*found.ends])
        if cut is None:
            break
        found = cutting.pipeline(*cut)
        progress(f"saving less: {found.step_seconds * 1e3:.3f} ms a step, {human(found.peak_bytes)}")
        if least is None or found.peak_bytes < least[1].peak_bytes:
            least = cutting, found
        if found.peak_bytes <= limit:
            break
    return least


def stages_of(mesh: Mesh) -> int:
    """Ranks along the axis of stages. Raises ValueError where that is not the first."""
    if mesh.names[0] != PIPE:
        raise ValueError(f"mesh {mesh}: stages lie farthest apart, so that {PIPE} has to be its first axis")
    return mesh.sizes[0]


def within_stage(mesh: Mesh) -> Mesh:
    """The mesh of one stage."""
    return Mesh(mesh.names[1:] or ("data",), mesh.sizes[1:] or (1,))


# --- one plan, cut ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cutting:
    """One plan of the whole model, and how good a pipeline of it each cut is."""

    whole: Plan
    mesh: Mesh
    schedules: tuple[str, ...]
    pricer: Pricer
    cuts: Cuts
    limit: float | None

    @staticmethod
    def of(whole: Plan, mesh: Mesh, hardware: Hardware, schedule: str, limit: float | None) -> Cutting:
        pricer = Pricer.on(whole.mesh, hardware, whole.optimizer, whole.bucket_bytes, whole.graph.rounds)
        cuts = Cuts.of(whole, stages_of(mesh), pricer, _sending(mesh, hardware))
        return Cutting(whole, mesh, WHOLE if schedule == AUTO else (schedule,), pricer, cuts, limit)

    def first(self) -> Pipeline:
        """Of the best cut by the program's estimate, and the even one."""
        even = self.cuts.even()
        found = self.pipeline(*self.cuts.best())
        return found if even is None else min(self.pipeline(*even), found, key=self._order)

    def moved(self, best: Pipeline) -> Pipeline:
        """The best that is found by moving one end after the other, where the played step of what that would do to the
        two stages beside it, estimated from their times now, or their bytes, promises something.
        """
        seen = {best.ends}
        for _ in range(MOVES):
            near = [(promise, ends) for promise, ends in self._promises(best) if tuple(ends) not in seen]
            if not near:
                break
            _, ends = min(near)
            seen.add(tuple(ends))
            cut = self.cuts.at(ends)
            found = None if cut is None else self.pipeline(*cut)
            if found is not None and self._order(found) < self._order(best):
                best = found
        return best

    def in_halves(self, best: Pipeline, *, moved: bool) -> Pipeline:
        """The best where backward may run in two halves, too: of the same cut, and where that is better, of those that
        are found by moving its ends.
        """
        halves, cut = replace(self, schedules=IN_HALVES), tuple(zip(best.stages, best.plans, strict=True))
        found = halves.pipeline(best.ends, cut)
        if self._order(found) >= self._order(best):
            return best
        return halves.moved(found) if moved else found

    def _promises(self, now: Pipeline) -> Iterator[tuple[float, list[int]]]:
        """(estimated seconds, ends) of cuts beside this one; the first are those that make room where that is short."""
        durations, spent = now.durations, self.cuts.spent
        taken = [forward + backward for forward, backward in zip(durations.forward, durations.whole, strict=True)]
        over = self.limit is not None and now.peak_bytes > self.limit
        peaks = [rank.peak for rank in now.memory]
        fullest = peaks.index(max(peaks))
        for which, ends in self.cuts.beside(now.ends, taken):
            old, new = now.ends[which], ends[which]
            more = float(spent[old:new].sum() - spent[new:old].sum())  # that the stage before the end takes over
            grown = [*taken]
            grown[which], grown[which + 1] = max(0.0, taken[which] + more), max(0.0, taken[which + 1] - more)
            scale = [one / before if before else 1.0 for one, before in zip(grown, taken, strict=True)]
            seconds = play(now.schedule, _scaled(durations, scale)).makespan
            if over and fullest in (which, which + 1):
                if (more < 0) == (fullest == which):
                    yield seconds - now.played.makespan, ends
            elif not over and seconds < now.played.makespan * (1 - WORTH):
                yield seconds, ends

    def _order(self, found: Pipeline) -> tuple[float, float, int]:
        over = 0.0 if self.limit is None else max(0.0, found.peak_bytes - self.limit)
        return over, found.step_seconds, found.peak_bytes

    def pipeline(self, ends: Sequence[int], cut: Cut) -> Pipeline:
        """The better schedule of this cut."""
        found: list[Pipeline] = []
        for inputs_first in (False, True):
            names = [name for name in self.schedules if (name in IN_HALVES) == inputs_first]
            if names:
                as_run = in_stages(self.whole, ends, self.pricer, inputs_first=True) if inputs_first else cut
                found += self._played(ends, as_run, names)
        fits = [one for one in found if self.limit is None or one.peak_bytes <= self.limit] or found
        return min(fits, key=lambda one: (round(one.step_seconds, 9), one.peak_bytes))

    def _played(self, ends: Sequence[int], cut: Cut, names: Sequence[str]) -> Iterator[Pipeline]:
        """Under each of the schedules."""
        stages, plans = tuple(stage for stage, _ in cut), tuple(plan for _, plan in cut)
        priced = [price_of(stage, plan, self.pricer) for stage, plan in cut]
        weights = tuple(one.backward - one.inputs for one in priced)
        crossing = tuple(one.sent for one in priced[:-1])
        durations = Durations(
            tuple(one.forward for one in priced), tuple(one.inputs for one in priced), weights,
            tuple(map(self.cuts.send, crossing)), tuple(one.backward for one in priced),
        )  # fmt: skip
        nbytes = StageBytes(
            tuple(one.fixed for one in priced), tuple(one.saved for one in priced),
            tuple(one.pending for one in priced), crossing,
        )  # fmt: skip
        updates = max(one.update for one in priced)
        for name in names:
            lists = make_schedule(name, len(cut), self.whole.graph.rounds.count)
            played = play(lists, durations)
            yield Pipeline(
                self.mesh, stages, plans, tuple(ends), lists, durations, played, memory(lists, nbytes),
                played.makespan + updates, self.whole, nbytes,
            )  # fmt: skip


def _scaled(durations: Durations, scale: Sequence[float]) -> Durations:
    def times(entries: Sequence[float]) -> tuple[float, ...]:
        return tuple(one * by for one, by in zip(entries, scale, strict=True))

    return Durations(
        times(durations.forward), times(durations.backward_input), times(durations.backward_weight), durations.send,
        times(durations.whole),
    )  # fmt: skip


def _sending(mesh: Mesh, hardware: Hardware) -> Send:
    pricer = Pricer.on(mesh, hardware, "none")

    def send(nbytes: float) -> float:
        return pricer.seconds((Comm("shift", PIPE, mesh.sizes[0], round(nbytes)),))

    return send
