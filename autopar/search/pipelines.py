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
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.errors import Infeasible, NoAnswerInTime
from autopar.ir.graph import Graph
from autopar.ir.layout import local_type
from autopar.ir.mesh import Mesh
from autopar.ir.words import count_of
from autopar.lower import lower
from autopar.lower.memory import changes, peaks, resident_bytes
from autopar.pipeline import (
    Durations,
    StageBytes,
    make_schedule,
    memory,
    play,
)
from autopar.plan import Plan
from autopar.plan.renamed import names_of, renamed
from autopar.plan.tell import human
from autopar.price.pricer import Pricer
from autopar.rewrite.micro_batches import in_rounds
from autopar.rewrite.stages import Stage
from autopar.search.context import Progress, Question, ask
from autopar.search.cuts import Cut, Cuts, Send
from autopar.search.pipeline import Pipeline
from autopar.search.request import DEFAULT, Request
from autopar.search.search import answer
from autopar.simulate.timeline import timeline_of
from cost_models.hardware import Hardware
from cost_models.steps import DEVICE, Comm

PIPE = "pipe"  # the axis of stages
SCHEDULES = ("1f1b", "gpipe")  # in the order of preference
TRIES, CLOSE = 8, 0.02  # of the room for the whole plan, and how near to the right one it ends
MOVES, WORTH = 8, 1e-3  # of ends of stages that are tried, and what part of the step one has to promise
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
    question = ask(in_rounds(graph, micro_batches), inner, hardware, optimizer=optimizer, progress=progress)
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

    def whole_within(room: float | None) -> Cutting:
        left = max(LEAST_S, request.time_limit_s - (time.perf_counter() - began))
        asked = replace(request, memory=room, simulation=False, time_limit_s=left)
        whole = answer(question, asked, progress=progress)
        if not named:
            return Cutting.of(whole, mesh, question.pricer.hardware, schedule, limit)
        whole = renamed(whole, names_of(whole))
        called = Mesh((PIPE, *whole.mesh.names[: len(mesh.names) - 1]), mesh.sizes)
        return Cutting.of(whole, called, question.pricer.hardware, schedule, limit)

    def ended(cutting: Cutting, found: Pipeline) -> Pipeline:
        return cutting.moved(found) if moved else found

    cutting = whole_within(None)
    found = ended(cutting, cutting.first())
    told = f"{count_of(count, 'stage')}: {1e3 * found.step_seconds:.3f} ms a step, simulated, {found.schedule.name}"
    progress(told)
    if limit is None or found.peak_bytes <= limit:
        return found
    best: tuple[Cutting, Pipeline] | None = None
    needed, most, least = found.peak_bytes, float(found.whole.peak_bytes[DEVICE]), 0.0  # room of the whole plan
    for _ in range(TRIES):
        room = (least + most) / 2
        late = best is not None and time.perf_counter() - began > request.time_limit_s
        if most - least < CLOSE * most or late:
            break
        try:
            cutting = whole_within(room)
        except (Infeasible, NoAnswerInTime):
            least = room
            continue
        found = cutting.first()
        needed = min(needed, found.peak_bytes)
        if found.peak_bytes > limit:
            most = min(room, float(found.whole.peak_bytes[DEVICE]))
            continue
        least = room
        if best is None or found.step_seconds < best[1].step_seconds:
            best = cutting, found
    if best is None:
        raise Infeasible(
            f"no pipeline of {count_of(count, 'stage')} over {question.graph.rounds.count} micro-batches fits in "
            f"{human(limit)} per rank: the least that was found takes {human(needed)}; give more micro-batches, stages "
            "or devices, or more memory",
            enough=needed,
        )
    return ended(*best)


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
        pricer = Pricer.on(whole.mesh, hardware, whole.optimizer, whole.bucket_bytes, whole.graph.rounds.count)
        cuts = Cuts.of(whole, stages_of(mesh), pricer, _sending(mesh, hardware))
        return Cutting(whole, mesh, SCHEDULES if schedule == "auto" else (schedule,), pricer, cuts, limit)

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
        count, send = len(cut), self.cuts.send
        stages, plans = tuple(stage for stage, _ in cut), tuple(plan for _, plan in cut)
        timed = [_timed(plan, self.pricer) for plan in plans]
        crossing = [_crossing_bytes(stage, plan) for stage, plan in cut[:-1]]
        halves = tuple(one.backward / 2 for one in timed)
        durations = Durations(tuple(one.forward for one in timed), halves, halves, tuple(map(send, crossing)))
        nbytes = StageBytes(
            tuple(one.fixed for one in timed), tuple(one.saved for one in timed), (0.0,) * count, tuple(crossing)
        )
        updates = max(one.update for one in timed)
        found: list[Pipeline] = []
        for name in self.schedules:
            lists = make_schedule(name, count, self.whole.graph.rounds.count)
            played = play(lists, durations)
            found.append(
                Pipeline(
                    self.mesh, stages, plans, tuple(ends), lists, durations, played, memory(lists, nbytes),
                    played.makespan + updates, self.whole, nbytes,
                )
            )  # fmt: skip
        fits = [one for one in found if self.limit is None or one.peak_bytes <= self.limit] or found
        return min(fits, key=lambda one: (round(one.step_seconds, 9), one.peak_bytes))


def _scaled(durations: Durations, scale: Sequence[float]) -> Durations:
    def times(entries: Sequence[float]) -> tuple[float, ...]:
        return tuple(one * by for one, by in zip(entries, scale, strict=True))

    return Durations(
        times(durations.forward), times(durations.backward_input), times(durations.backward_weight), durations.send
    )


@dataclass(frozen=True)
class _Timed:
    """Seconds of one micro-batch, and of the updates; bytes of a device: always, and per micro-batch in flight."""

    forward: float
    backward: float
    update: float
    fixed: float
    saved: float


def _timed(plan: Plan, pricer: Pricer) -> _Timed:
    timeline, rounds = timeline_of(plan, pricer, plan.prefetch), plan.graph.rounds.count
    spent = defaultdict[str, float](float)
    for phase, begin, end in timeline.phases:
        spent[phase] += end - begin
    program = lower(plan, plan.prefetch, pricer)
    resident = resident_bytes(program).get(DEVICE, 0)
    saved = sum(
        sign * buffer.nbytes for phase, buffer, sign in changes(program) if phase == "forward" and buffer.tier == DEVICE
    )
    received = sum(
        local_type(node.outputs[0], plan.choices[node.name].gives[0], plan.mesh).nbytes
        for node in plan.graph.nodes
        if node.op == "input" and node.target.startswith("%") and node.outputs[0] is not None
    )
    update = timeline.seconds - spent["forward"] - spent["backward"]
    fixed = peaks(program)[DEVICE] - saved - received
    return _Timed(
        spent["forward"] / rounds, spent["backward"] / rounds, update, max(fixed, resident - received), saved + received
    )


def _crossing_bytes(stage: Stage, plan: Plan) -> float:
    """That a device sends over the cut behind a stage, one way."""
    layout = {
        result.target: delivery.layout
        for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True)
        if result.kind == "output" and delivery is not None
    }
    refs = {result.target: result.ref for result in plan.graph.results if result.kind == "output"}
    found = 0
    for channel in stage.sends:
        ref = refs[channel]
        assert ref is not None
        found += local_type(plan.graph.type_of(ref), layout[channel], plan.mesh).nbytes
    return float(found)


def _sending(mesh: Mesh, hardware: Hardware) -> Send:
    pricer = Pricer.on(mesh, hardware, "none")

    def send(nbytes: float) -> float:
        return pricer.seconds((Comm("shift", PIPE, mesh.sizes[0], round(nbytes)),))

    return send
